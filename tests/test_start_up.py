"""What `import tensorflow` writes to standard error after `import kdist`."""

import os
import subprocess
import sys

import pytest

PROGRAM = "import kdist, keras, tensorflow; print(tensorflow.ones(2).numpy())"


def stderr_of(program, **environment):
    unset = {name: text for name, text in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**unset, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stderr


@pytest.mark.slow
def test_nothing_is_logged_by_default():
    assert stderr_of(PROGRAM) == ""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("level", "shown"), [("0", True), ("1", False)])
def test_the_level_that_a_user_set_counts(level, shown):
    logged = stderr_of(PROGRAM, TF_CPP_MIN_LOG_LEVEL=level)
    assert ("absl::InitializeLog" in logged) == shown
