"""The thread that samples: when, what it costs, and what it survives."""

import itertools
import json
import socket
import threading
import time

import pytest

from kdist.telemetry.devices.sampler import DeviceSampler
from kdist.testing import python
from tests.telemetry.waiting import wait_until


class Fixed:
    """Gives one record a sample."""

    def __init__(self, device="gpu/0"):
        self.device, self.closed, self.threads = device, 0, {threading.current_thread()}

    def sample(self):
        self.threads.add(threading.current_thread())
        yield {"device": self.device, "utilization": 0.5}

    def close(self):
        self.closed += 1


class Failing(Fixed):
    def sample(self):
        yield {"device": "disk"}
        raise ValueError("no such counter")


class Costly(Fixed):
    """Takes 20 ms of a core a sample."""

    def sample(self):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        yield {"device": self.device}


@pytest.fixture
def sampler_of():
    """A function: samplers -> one that is started, and its records."""
    started = []

    def start(*samplers, every_seconds=0.05, **options):
        records = []
        makers = [lambda made=made: made for made in samplers]
        sampler = DeviceSampler(records.append, every_seconds, samplers=makers, **options)
        sampler.start()
        started.append(sampler)
        return sampler, records

    yield start
    for sampler in started:
        sampler.stop()


def test_records_have_time_and_host(sampler_of):
    began = time.time() - 100
    sampler, records = sampler_of(Fixed(), began=began, ahead_seconds=7)
    wait_until(lambda: len(records) >= 2)
    sampler.stop()
    first, second = records[:2]
    assert first["time"] == pytest.approx(time.time() - 7, abs=5)
    assert first["seconds"] == pytest.approx(first["time"] - began)
    assert second["time"] - first["time"] >= 0.045
    assert first["host"] == socket.gethostname()
    assert (first["device"], first["utilization"]) == ("gpu/0", 0.5)


def test_starting_and_stopping_twice(sampler_of):
    fixed = Fixed()
    sampler, records = sampler_of(fixed)
    sampler.start()
    wait_until(lambda: records)
    assert len([t for t in threading.enumerate() if t.name == "kdist-devices"]) == 1
    sampler.stop()
    sampler.stop()
    assert fixed.closed == 1
    assert threading.current_thread() in fixed.threads  # made by the test
    assert len(fixed.threads) == 2  # and sampled in one thread, not the test's
    number = len(records)
    time.sleep(0.15)
    assert len(records) == number
    sampler.start()
    wait_until(lambda: len(records) > number)


def test_stopping_is_immediate(sampler_of):
    sampler, records = sampler_of(Fixed(), every_seconds=60)
    began = time.monotonic()
    wait_until(lambda: records)  # after a second, not after sixty
    sampler.stop()
    assert time.monotonic() - began < 5


def test_stopping_works_between_two_devices(sampler_of):
    class Slow(Fixed):
        def sample(self):
            for index in range(1000):
                time.sleep(0.02)
                yield {"device": f"gpu/{index}"}

    sampler, records = sampler_of(Slow())
    wait_until(lambda: records)
    began = time.monotonic()
    sampler.stop()
    assert time.monotonic() - began < 1


def test_an_exception_is_logged_once_and_the_others_continue(sampler_of, capsys):
    sampler, records = sampler_of(Failing(), Fixed())
    wait_until(lambda: len(records) >= 6)
    sampler.stop()
    assert [record["device"] for record in records[:4]] == ["disk", "gpu/0"] * 2
    assert capsys.readouterr().err.count("Failing failed: ValueError: no such counter") == 1


def test_a_sampler_that_cannot_be_created_is_skipped(capsys):
    records = []

    def broken():
        raise OSError("no driver")

    sampler = DeviceSampler(records.append, 0.05, samplers=[broken, Fixed])
    sampler.start()
    wait_until(lambda: records)
    sampler.stop()
    assert capsys.readouterr().err.count("no driver") == 1


def test_a_failing_writer_is_logged_once(capsys):
    number = 0

    def write(record):
        nonlocal number
        number += 1
        raise OSError("disk full")

    sampler = DeviceSampler(write, 0.05, samplers=[Fixed])
    sampler.start()
    wait_until(lambda: number >= 3)
    sampler.stop()
    assert capsys.readouterr().err.count("disk full") == 1


@pytest.mark.slow
def test_sampling_takes_at_most_one_percent_of_a_core(sampler_of):
    """20 ms every 50 ms would be 40 %; every 2 s they are 1 %."""
    sampler, records = sampler_of(Costly())
    assert sampler.overhead_share is None
    wait_until(lambda: len(records) >= 3)
    sampler.stop()
    times = [record["time"] for record in records]
    # Far from the 0.05 s and the 40 % that it would be, since a busy machine delays the thread.
    assert min(b - a for a, b in itertools.pairwise(times)) > 1
    assert 0.001 < sampler.overhead_share < 0.1


@pytest.mark.parametrize("seconds", [0, -1])
def test_an_interval_must_be_positive(seconds):
    with pytest.raises(ValueError, match="positive"):
        DeviceSampler(print, seconds)


SAMPLING = """
import json, time
from kdist.telemetry.devices.sampler import DeviceSampler
records = []
sampler = DeviceSampler(records.append, 0.2, "worker-1", samples_host={samples_host})
sampler.start()
time.sleep(1.5)
sampler.stop()
print(json.dumps({{"records": records, "overhead": sampler.overhead_share}}))
"""


@pytest.mark.parametrize("samples_host", [True, False])
def test_all_devices_of_a_task(fake_nvml, samples_host):
    environment = {**fake_nvml(0.9, 0.9, 0.3), "CUDA_VISIBLE_DEVICES": "0,2"}
    told = python(SAMPLING.format(samples_host=samples_host), environment=environment)
    records = told["records"]
    json.dumps(records)
    devices = {record["device"] for record in records}
    assert {"gpu/0", "gpu/2", "process/worker-1"} <= devices
    assert "gpu/1" not in devices
    assert ("cpu/0" in devices) == samples_host
    assert {r["utilization"] for r in records if r["device"] == "gpu/2"} == {0.3}
    assert told["overhead"] > 0


def test_a_short_run_has_one_sample(sampler_of):
    sampler, records = sampler_of(Costly(), every_seconds=60)
    sampler.stop()
    assert len(records) == 1
