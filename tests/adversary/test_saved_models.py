"""Mutated SavedModels: none touches a file, or changes what another model computes.

KDIST_FUZZ_CASES=2000 loads more of them.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys

import pytest

CASES = int(os.environ.get("KDIST_FUZZ_CASES", 60))
ROOT = pathlib.Path(__file__).parents[2]
_SECONDS_PER_CASE = 15


@pytest.mark.exhaustive
@pytest.mark.timeout(_SECONDS_PER_CASE * CASES + 100)
def test_mutated_saved_models_do_no_harm(tmp_path):
    outcomes, ended = [], []
    while len(outcomes) + len(ended) < CASES:
        first = len(outcomes) + len(ended)
        directory = tmp_path / str(first)
        directory.mkdir()
        command = ["-m", "tests.adversary.mutated_models", directory, str(first)]
        process = subprocess.run(
            [sys.executable, *command, str(CASES - first)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_SECONDS_PER_CASE * CASES,
        )
        lines = [json.loads(line) for line in process.stdout.splitlines()]
        outcomes += [line for line in lines if "outcome" in line]
        # TensorFlow itself ends in some graphs, which a worker process shields the server from.
        assert process.returncode <= 0, process.stderr[-2000:]
        if process.returncode < 0:
            ended.append(lines[-1])
    assert [line for line in outcomes if line["harm"]] == []
    assert len(ended) <= CASES / 100, ended
    # The mutations are worth their name, and models that they leave intact are loaded.
    counts = collections.Counter(line["outcome"] for line in outcomes)
    assert counts["refused"] > CASES / 10
    assert counts["loaded"] > CASES / 20
