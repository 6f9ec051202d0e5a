"""Real training under the launcher."""

import json
import subprocess
import sys

import pytest

from kdist.testing import python
from tests.forked import python_tasks


@pytest.mark.slow
def test_two_workers_train_and_the_chief_alone_writes(scripts, tmp_path):
    process = subprocess.run(
        [
            *(sys.executable, scripts / "launch.py", "--workers=2", "--timeout_seconds=240"),
            *("--", "kdist", "train", "--model=lenet"),  # --strategy=auto is multi_worker in a job
            *("--dataset=digits", "--examples=512", "--epochs=1", "--verbose=1"),
            # All workers predict the samples together.
            *("--run_dir=run", "--wandb_mode=offline", "--wandb_samples=2"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:] + process.stdout[-3000:]
    results = [line for line in process.stdout.splitlines() if "test accuracy 0." in line]
    assert [line[:11] for line in results] == ["[worker 0] "]
    assert len(process.stdout.splitlines()) < 60  # a progress bar overwrites itself often
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_replicas"] == 2
    tables = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/samples_*.json")
    assert [len(json.loads(table.read_text())["data"]) for table in tables] == [2]
    for n in range(2):
        assert (tmp_path / "run" / "logs" / f"worker-{n}.log").stat().st_size > 0


TERMINATED = """
import json, os, signal, sys, time
import kdist
received = []
if json.loads(sys.argv[1]):
    signal.signal(signal.SIGTERM, lambda *_: received.append("SIGTERM"))
kdist.create_strategy("multi_worker")
if not json.loads(sys.argv[1]):
    caught = next(line for line in open("/proc/self/status") if line.startswith("SigCgt"))
    received.append(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
else:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
print(json.dumps(received))
"""


@pytest.mark.parametrize(("handles", "received"), [(True, ["SIGTERM"]), (False, [0])])
def test_a_task_keeps_its_handler_of_sigterm(handles, received):
    """TensorFlow's coordination service replaces it; the signal was lost before training."""
    assert python_tasks(TERMINATED, {"worker": 2}, [json.dumps(handles)]) == [received] * 2


# CPU seconds per second that a matrix product uses.
CORES_TAKEN = """
import json, time
import tensorflow as tf
a = tf.random.normal((1500, 1500))
tf.matmul(a, a)
wall, processor = time.perf_counter(), time.process_time()
for _ in range(5):
    tf.matmul(a, a).numpy()
taken = (time.process_time() - processor) / (time.perf_counter() - wall)
print(json.dumps([taken]))
"""


@pytest.mark.slow
def test_tensorflow_uses_only_its_threads():
    """An upper bound, which holds also on one core and on a busy machine."""
    (taken,) = python(CORES_TAKEN, environment={"TF_NUM_INTRAOP_THREADS": "1"})
    assert taken < 1.2


@pytest.mark.exhaustive
def test_logical_devices_divide_the_launchers_share():
    code = """
import json, os
import tensorflow as tf
from kdist import devices
devices.find_devices(2)
print(json.dumps(tf.config.threading.get_intra_op_parallelism_threads()))
"""
    launchers = {"KDIST_CORES": "2", "TF_NUM_INTRAOP_THREADS": "2"}
    assert python(code, environment=launchers) == 1  # as many devices as cores: one thread each
    assert python(code, environment={**launchers, "KDIST_CORES": "3"}) == 0
