"""Devices of all tasks at the first one: within a process, and in jobs of several."""

import contextlib
import itertools
import json
import socket
import threading
import time

import pytest

from kdist.cluster import Cluster
from kdist.cluster.heartbeat import Beat
from kdist.telemetry.devices import collector as collector_module
from kdist.telemetry.devices.collector import Collector, attend
from tests.telemetry.waiting import wait_until

TOKEN = "only the job knows"


@pytest.fixture
def job():
    """The tasks of a job on loopback, whose own ports nobody needs."""
    return Cluster({"worker": [f"127.0.0.1:{port}" for port in (1, 2, 3)]}).all_tasks()


@pytest.fixture
def collector(job):
    collector = Collector.listening(job[0], TOKEN)
    yield collector
    collector.close()


@pytest.fixture
def call(collector):
    """A function that calls the collector as a task of a host, or says something else."""
    with contextlib.ExitStack() as stack:

        def call(host=None, token=TOKEN, line=None):
            connection = socket.create_connection(("127.0.0.1", collector.port), 10)
            stack.enter_context(connection)
            if host is not None:
                line = json.dumps({"token": token, "host": host}).encode() + b"\n"
            if line is not None:
                connection.sendall(line)
            return _Task(connection)

        yield call


class _Task:
    """The other end of a connection to the collector."""

    def __init__(self, connection):
        self.connection = connection
        self._lines = connection.makefile("rb")

    def order(self):
        """Returns the next command; None if the collector disconnects."""
        try:
            line = self._lines.readline()
        except ConnectionError:  # unread data was left
            return None
        return json.loads(line) if line else None

    def send(self, start, **record):
        line = json.dumps({"start": start, "record": record}).encode() + b"\n"
        with contextlib.suppress(ConnectionError):
            self.connection.sendall(line)


def others(records):
    return [record for record in records if record.get("host") in ("a", "b")]


def test_it_samples_this_process(collector):
    records = []
    collector.start(records.append, every_seconds=0.1, began=time.time() - 50)
    assert collector.overhead_share is None
    wait_until(lambda: {"process/worker-0", "cpu/0"} <= {record["device"] for record in records})
    collector.stop()
    number = len(records)
    assert collector.overhead_share > 0
    assert records[0]["seconds"] > 50
    time.sleep(0.3)
    assert len(records) == number


def test_a_single_process_does_not_listen():
    records = []
    collector = Collector()
    assert collector.port is None
    collector.start(records.append, every_seconds=0.1)
    collector.start(records.append, every_seconds=0.1)
    wait_until(lambda: "process/chief-0" in {record["device"] for record in records})
    collector.stop()
    collector.stop()


def test_it_listens_only_on_its_own_address(collector):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", collector.port), 1)


def test_tasks_receive_commands_and_send_records(collector, call):
    records = []
    early = call("a")
    collector.start(records.append, every_seconds=3.5, began=1000.0)
    late = call("b")
    for task in (early, late):
        order = task.order()
        assert (order["every_seconds"], order["began"]) == (3.5, 1000.0)
        assert order["now"] == pytest.approx(time.time(), abs=5)
        assert order["samples_host"]
        task.send(order["start"], host="ab"[task is late], device="gpu/0", utilization=0.5)
    wait_until(lambda: len(others(records)) == 2)
    collector.stop()
    assert early.order() == late.order() == {"stop": True}


def test_late_records_do_not_count_for_the_next_training(collector, call):
    records = []
    collector.start(records.append)
    task = call("a")
    first = task.order()
    collector.stop()
    assert task.order() == {"stop": True}
    task.send(first["start"], host="a", device="gpu/0", utilization=0.1)
    collector.start(records.append)
    second = task.order()
    task.send(second["start"], host="a", device="gpu/0", utilization=0.2)
    wait_until(lambda: others(records))
    assert [record["utilization"] for record in others(records)] == [0.2]


def test_of_several_tasks_on_one_host_one_samples_it(collector, call):
    collector.start(print)
    here, first = call(socket.gethostname()), call("a")
    assert not here.order()["samples_host"]  # the collector's own task does
    assert first.order()["samples_host"]
    second = call("a")
    assert not second.order()["samples_host"]
    first.connection.shutdown(socket.SHUT_RDWR)
    assert second.order()["samples_host"]  # it has become the first


def test_a_shared_gpu_is_reported_by_one_connected_task(collector, call):
    records = []
    collector.start(records.append)
    first, second = call("a"), call("a")
    start = first.order()["start"]
    second.order()
    first.send(start, host="a", device="gpu/0", utilization=0.1)
    wait_until(lambda: len(others(records)) == 1)
    second.send(start, host="a", device="gpu/0", utilization=0.2)
    second.send(start, host="a", device="gpu/1", utilization=0.3)
    wait_until(lambda: len(others(records)) == 2)
    first.connection.shutdown(socket.SHUT_RDWR)
    start = second.order()["start"]
    second.send(start, host="a", device="gpu/0", utilization=0.4)
    wait_until(lambda: len(others(records)) == 3)
    assert [record["utilization"] for record in others(records)] == [0.1, 0.3, 0.4]


STRANGERS = {
    "another token": b'{"token": "guess", "host": "a"}\n',
    "no host": json.dumps({"token": TOKEN}).encode() + b"\n",
    "a browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a token that is no text": b'{"token": 7, "host": "a"}\n',
    "half a character": b'{"token": "\\ud800", "host": "a"}\n',
    "a list": b"[1, 2]\n",
    "nothing": b"null\n",
    "a deep list": b"[" * 60000 + b"\n",
    "bytes": bytes(range(128, 256)) + b"\n",
    "no end": b"x" * 200_000,
}


@pytest.mark.parametrize("line", STRANGERS.values(), ids=list(STRANGERS))
def test_clients_without_the_token_are_dropped(collector, call, line):
    records = []
    collector.start(records.append)
    task = call("b")
    stranger = call()
    with contextlib.suppress(ConnectionError):
        stranger.connection.sendall(line)
    assert stranger.order() is None
    task.send(task.order()["start"], host="b", device="gpu/0", utilization=0.5)
    wait_until(lambda: others(records))


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"host": "b", "device": "gpu/0"}, id="another host's"),
        pytest.param({"host": "a"}, id="no device"),
        pytest.param({"host": "a", "device": ["gpu/0"]}, id="no name"),
    ],
)
def test_a_task_that_sends_something_else_is_dropped(collector, call, record):
    records = []
    collector.start(records.append)
    task = call("a")
    task.send(task.order()["start"], **record)
    assert task.order() is None
    assert not others(records)


def test_clients_that_do_not_authenticate_are_dropped(collector, call, monkeypatch):
    monkeypatch.setattr(collector_module, "_SECONDS_TO_AUTHENTICATE", 0.5)
    collector.start(print)
    assert call().order() is None


def test_many_silent_clients_do_not_block_tasks(collector, call, monkeypatch):
    monkeypatch.setattr(collector_module, "_MAX_UNAUTHENTICATED", 3)
    collector.start(print)
    silent = [call() for _ in range(10)]
    assert call("a").order()["samples_host"]
    assert silent[0].order() is None


def test_a_failing_writer_does_not_stop_collecting(collector, call, capsys):
    records = []

    def write(record):
        records.append(record)
        raise ValueError("no room")

    collector.start(write)
    task = call("a")
    start = task.order()["start"]
    for number in range(3):
        task.send(start, host="a", device="gpu/0", utilization=number)
    wait_until(lambda: len(others(records)) == 3)
    assert capsys.readouterr().err.count("no room") == 1


def test_stopping_is_fast(collector, call):
    collector.start(print, every_seconds=60)
    task = call("a")
    task.order()
    began = time.monotonic()
    collector.stop()
    assert time.monotonic() - began < 1


def test_heartbeats_and_the_end_of_a_connection_are_passed_on(collector, call):
    beats = []
    collector.pass_heartbeats(lambda *beat: beats.append(beat))
    line = json.dumps({"token": TOKEN, "host": "a", "task": "worker 1"}).encode()
    task = call(line=line + b'\n{"beat": {"doing": "in step 3"}}\n')
    wait_until(lambda: beats)  # also while nothing is sampled
    task.connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: len(beats) == 2)
    assert beats == [("worker 1", Beat("in step 3")), ("worker 1", None)]


def test_a_task_ends_on_command(collector, job):
    ends = []
    attend(job[1], collector.port, TOKEN, lambda *end: ends.append(end))
    collector.start(print, every_seconds=0.1)
    wait_until(lambda: len(sampling_threads()) == 2)  # it has connected
    collector.end_tasks("worker 2", "was between steps")
    wait_until(lambda: ends == [("worker 2", "was between steps")])
    collector.stop()
    wait_until(lambda: not sampling_threads())  # commands are still followed


def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kdist-devices"]


def test_a_task_samples_on_command(collector, job):
    attend(job[1], collector.port, TOKEN)
    time.sleep(0.2)
    assert not sampling_threads()
    records = []
    for _ in range(2):
        records.clear()
        collector.start(records.append, every_seconds=0.1, began=time.time())
        wait_until(lambda: "process/worker-1" in {record["device"] for record in records})
        collector.stop()
        wait_until(lambda: not sampling_threads())
    assert all(0 <= record["seconds"] < 10 for record in records)


def test_a_task_stops_when_the_first_one_disconnects(collector, job):
    attend(job[1], collector.port, TOKEN)
    collector.start(print, every_seconds=0.1)
    wait_until(lambda: len(sampling_threads()) == 2)
    collector.close()
    wait_until(lambda: not sampling_threads())


def test_an_unreachable_first_task_is_logged(job, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    attend(job[1], port, TOKEN)
    attend(job[1], None, TOKEN)
    said = ""

    def is_said():
        nonlocal said
        said += capsys.readouterr().err
        return "devices of worker 1 are not recorded" in said

    wait_until(is_said)


def test_failure_to_listen_is_logged(capsys):
    job = Cluster({"worker": ["192.0.2.1:1", "192.0.2.2:1"]})  # nobody's addresses
    collector = Collector.listening(job, TOKEN)
    assert collector.port is None
    assert "worker 0 cannot listen on 192.0.2.1" in capsys.readouterr().err
    collector.start(print, every_seconds=60)
    collector.close()


COLLECTING = """
import json, os, sys, time
name = json.loads(os.environ["TF_CONFIG"])["task"]
os.environ["CUDA_VISIBLE_DEVICES"] = str(name["index"])
import kdist
from kdist.telemetry.devices.collector import collector_of
strategy = kdist.create_strategy(sys.argv[1], cluster_timeout_seconds=60)
if not kdist.strategies.is_chief(strategy):
    time.sleep(4)
    print(json.dumps({}))
    sys.exit()
records = []
collector = collector_of(strategy)
assert collector_of(strategy) is collector
collector.start(records.append, every_seconds=0.3)
wanted = set(sys.argv[2:])
deadline = time.monotonic() + 30
while wanted - {record["device"] for record in records} and time.monotonic() < deadline:
    time.sleep(0.1)
collector.stop()
print(json.dumps({"records": records, "overhead": collector.overhead_share}))
"""


def _check(records, wanted):
    devices = {record["device"] for record in records}
    assert set(wanted) <= devices
    assert {record["host"] for record in records} == {socket.gethostname()}
    assert all(-1 < record["seconds"] < 60 for record in records)
    # All tasks share the host, whose cores come from one of them: not twice in an interval.
    times = sorted(record["time"] for record in records if record["device"] == "cpu/0")
    assert all(b - a > 0.15 for a, b in itertools.pairwise(times))
