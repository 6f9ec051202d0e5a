import subprocess
import sys

import pytest

# Nobody closes these groups, and only Python's search for garbage finds them, as it ends.
LEFT_BEHIND = """
import gc

import numpy as np
import tensorflow as tf

from kdist.training.groups.step_groups import StepGroups


class Witness:
    def __del__(self):
        print("found", flush=True)


def run():
    groups = StepGroups(tf.distribute.get_strategy(), x=np.zeros([8, 2]), batch_size=2)
    next(groups._enumerate_iterator())
    groups.itself = groups
    groups.witness = Witness()


gc.disable()
run()
"""


@pytest.mark.slow
def test_a_process_ends_that_has_groups_left():
    command = [sys.executable, "-c", LEFT_BEHIND]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout) == (0, "found\n"), process.stderr
