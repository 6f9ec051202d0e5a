"""Two workers on two hosts (network namespaces), and faults of the link between them."""

import contextlib
import json
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.clusters import network
from tests.faults import relay
from tests.faults.jobs import TRAINING_PROGRAM, Run, check_equal

pytestmark = pytest.mark.slow

PORT = 4567


class TwoHosts(Run):
    """A job with a worker on each of two hosts, started without the launcher."""

    def __init__(self, directory, hosts):
        super().__init__(directory, "multi_worker")
        self._hosts, self.processes = hosts, []

    def start(self, fault=""):
        """Starts both workers."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        cluster = {"worker": [f"{host.address}:{PORT}" for host in self._hosts]}
        command = [sys.executable, TRAINING_PROGRAM, "multi_worker", self.checkpoints, self.result]
        self.processes = []
        for index, host in enumerate(self._hosts):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            process = self._popen([*host.prefix, *command], TF_CONFIG=json.dumps(config))
            self.processes.append(process)
        self.process = self.processes[0]
        return self

    def wait_for_both(self, seconds=240):
        """Waits for both workers, and returns their exit codes."""
        deadline = time.monotonic() + seconds
        return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]

    def stop(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def hosts():
    """Returns two hosts with a fast link between them."""
    with contextlib.ExitStack() as stack:
        try:
            both = stack.enter_context(network.two_hosts(rate_mbit=1000))
        except (OSError, RuntimeError) as error:
            pytest.skip(str(error))
        yield both


@pytest.fixture
def run(tmp_path, hosts):
    run = TwoHosts(tmp_path, hosts)
    yield run.start()
    run.stop()


def test_a_link_that_is_cut_for_a_while(run, hosts, undisturbed, record):
    run.wait_for_checkpoint(10)
    network.cut(hosts[1])
    time.sleep(6)
    network.heal(hosts[1])
    assert run.wait_for_both() == [0, 0], run.output()
    check_equal(run, undisturbed("multi_worker"))
    assert run.attempts() == 1
    record("the link is cut for 6 s", "multi_worker", "waited for", None, 0, "yes")


@pytest.fixture
def short_timeout(monkeypatch):
    monkeypatch.setenv("KDIST_STEP_TIMEOUT_SECONDS", "20")


@pytest.mark.exhaustive
def test_a_link_that_is_cut_for_good(short_timeout, run, hosts, undisturbed, record):
    """Both workers end within the time limit of a step, 20 s; restarted, they resume."""
    run.wait_for_checkpoint(10)
    network.cut(hosts[1])
    began = time.monotonic()
    codes = run.wait_for_both(60)
    detected_after = time.monotonic() - began
    assert 0 not in codes
    assert run.count("a step took longer than 20 s: another worker has stopped") > 0, run.output()
    network.heal(hosts[1])
    run.start()
    assert run.wait_for_both() == [0, 0], run.output()
    check_equal(run, undisturbed("multi_worker"))
    outcome = "both end with a message; restarted, they resume"
    fault = "the link is cut for good, --step_timeout_seconds=20"
    record(fault, "multi_worker", outcome, detected_after, run.num_lost_examples(), "yes")


@pytest.mark.exhaustive
def test_a_link_that_becomes_slow(run, hosts, undisturbed, record):
    run.wait_for_checkpoint(10)
    network.limit(hosts[1], rate_mbit=1)
    assert run.wait_for_both() == [0, 0], run.output()
    check_equal(run, undisturbed("multi_worker"))
    record("the link falls to 1 Mbit/s", "multi_worker", "slower", None, 0, "yes")


@pytest.fixture
def delayed():
    """Returns two hosts and the process that relays packets between them."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(network.apart())
        except (OSError, RuntimeError) as error:
            pytest.skip(str(error))
        command = [sys.executable, relay.__file__, *(host.namespace for host in hosts), "50"]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout.readline() == b"ready\n"
        for host in hosts:
            network.set_up(host)
        yield hosts, process


@pytest.mark.exhaustive
def test_a_link_that_delays(delayed, tmp_path, undisturbed, record):
    hosts, carrier = delayed
    run = TwoHosts(tmp_path, hosts)
    try:
        run.start().wait_for_checkpoint(10)
        carrier.send_signal(signal.SIGUSR1)
        assert run.wait_for_both() == [0, 0], run.output()
        check_equal(run, undisturbed("multi_worker"))
        assert run.attempts() == 1
    finally:
        run.stop()
    record("the link delays by 50 ms", "multi_worker", "slower", None, 0, "yes")
