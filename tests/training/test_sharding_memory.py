"""A model whose training state exceeds the memory of a process, and not if processes divide it."""

import json
import os
import pathlib
import time

import pytest

from tests.forked import python_tasks
from tests.tiers import seldom

WORKERS = 3
# P bytes of weights need P for gradients and 4 P for the slots of this Adam: 6 P. Three processes
# divide the slots, and a copy of the weights: 3.7 P on each, and what a step computes with. If they
# divide the weights and gradients, too, it is 2 P. Seen: 5.5 P and 3.7 to 4.1 P.
CASES = [("weights", "optimizer", 4.7), *seldom([("optimizer", None, 5.9)])]

TASK = """
import json, os, pathlib, sys
shard, groups, limit = json.loads(sys.argv.pop())
import kdist, keras
import numpy as np
WIDTH, DEPTH = 960, 24
WEIGHTS = 4 * WIDTH * WIDTH * DEPTH
strategy = kdist.create_strategy("multi_worker", 1, shard=shard, cluster_timeout_seconds=60)

def losses(width, depth):
    with strategy.scope():
        inputs = x = keras.Input((width,))
        for _ in range(depth):
            x = keras.layers.Dense(width, use_bias=False)(x)
        model = kdist.Model(inputs, x)
        model.compile(keras.optimizers.Adam(1e-5, amsgrad=True, use_ema=True), "mse")
    x = np.ones((6, width), "float32")
    return model.fit(x, x, batch_size=6, epochs=2, verbose=0).history["loss"]

losses(64, 1)  # what TensorFlow allocates once does not count
group = pathlib.Path(groups[json.loads(os.environ["TF_CONFIG"])["task"]["index"]])
(group / "memory.limit_in_bytes").write_text(str(int(limit * WEIGHTS)))
(group / "cgroup.procs").write_text(str(os.getpid()))
found = losses(WIDTH, DEPTH)
used = int((group / "memory.max_usage_in_bytes").read_text())
print(json.dumps([found, used / WEIGHTS]))
"""


@pytest.fixture
def memory_groups():
    """Returns a control group for each worker."""
    parent = pathlib.Path("/sys/fs/cgroup/memory")
    groups = [parent / f"kdist-test-{os.getpid()}-{number}" for number in range(WORKERS)]
    try:
        for group in groups:
            group.mkdir()
    except OSError:
        pytest.skip("a memory limit needs root and the memory controller, version 1")
    yield [str(group) for group in groups]
    deadline = time.monotonic() + 10
    for group in groups:
        while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        group.rmdir()


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "too_large", "limit"), CASES)
def test_a_model_that_fits_only_if_processes_divide_its_state(
    shard, too_large, limit, memory_groups
):
    def train(shard):
        return python_tasks(TASK, {"worker": WORKERS}, [json.dumps([shard, memory_groups, limit])])

    for losses, used in train(shard):
        assert losses[1] < losses[0]
        assert used < limit
    with pytest.raises(AssertionError, match="exited with -9"):  # by the kernel
        train(too_large)
