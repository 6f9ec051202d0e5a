"""Hangs in a job without a launcher: the chief names the task, and ends the job with 75."""

import json
import signal
import sys

import pytest

from kdist.exit_codes import PEER_HANGS
from kdist.launch.local_engine import loopback_addresses, reserve_ports
from tests.faults.jobs import Run

pytestmark = pytest.mark.slow


class ByHand(Run):
    """Two workers that are started one by one, each with its TF_CONFIG; `process` is the first."""

    def start(self, ports, fault=""):
        """Starts the workers on these ports."""
        self.checkpoints.mkdir(parents=True)
        job = loopback_addresses({"worker": 2}, ports)
        command = [sys.executable, self._program, self._kind, self.checkpoints, self.result]
        self.processes = [
            self._popen(
                command,
                TF_CONFIG=json.dumps({"cluster": job, "task": {"type": "worker", "index": index}}),
                KDIST_HANG_SECONDS="8",
                KDIST_STEP_TIMEOUT_SECONDS="600",
                KDIST_FAULT=fault,
            )
            for index in range(2)
        ]
        self.process = self.processes[0]
        return self

    def stop(self):
        """Kills the workers that are left."""
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def by_hand(tmp_path):
    """Returns a function that starts a job; it ends with the test at the latest."""
    run = ByHand(tmp_path, "multi_worker")
    with reserve_ports(2) as ports:
        yield lambda **options: run.start(ports, **options)
        run.stop()


@pytest.mark.exhaustive
def test_a_stopped_worker_is_named_by_the_chief(by_hand, record):
    run = by_hand()
    run.wait_for_checkpoint(5)
    run.signal("worker 1", signal.SIGSTOP)
    seconds = run.wait_for_message("worker 1 hung: it sent no heartbeat for ")
    assert run.process.wait(60) == PEER_HANGS, run.output()
    assert "worker 1 has sent no heartbeat for " in run.output()
    assert "Traceback" not in run.output()
    record(
        "SIGSTOP for good, started by TF_CONFIG, KDIST_HANG_SECONDS=8",
        "multi_worker",
        "named by the chief, which ends with 75",
        seconds,
    )


def test_a_callback_that_hangs_ends_both_workers(by_hand, record):
    run = by_hand(fault="sleep:1:7")
    run.wait_until(lambda: (run.directory / "fault-done").exists(), seconds=300)
    seconds = run.wait_for_message("worker 1 hung: it was between steps, after step ")
    run.wait_for_message("in _sleep")  # its stack
    assert [process.wait(60) for process in run.processes] == [PEER_HANGS] * 2, run.output()
    record(
        "a callback sleeps forever, started by TF_CONFIG, KDIST_HANG_SECONDS=8",
        "multi_worker",
        "named by the chief; both workers end with 75",
        seconds,
    )
