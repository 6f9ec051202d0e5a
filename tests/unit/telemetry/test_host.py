"""Measurements of this host and this process from the operating system."""

import collections
import os
import threading
import time

import psutil
import pytest

from kdist.telemetry.devices.sampler import HostSampler, ProcessSampler


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def by_device(records):
    return {record["device"]: record for record in records}


def test_each_core_disk_and_network():
    sampler = HostSampler()
    time.sleep(0.1)
    records = by_device(sampler.sample())
    cores = [device for device in records if device.startswith("cpu/")]
    assert cores == [f"cpu/{core}" for core in range(len(psutil.cpu_times(percpu=True)))]
    for core in cores:
        assert 0 <= records[core]["utilization"] <= 1
    assert set(records) <= {*cores, "disk", "network"}


def test_utilization_of_a_core_is_the_share_in_which_it_was_busy(monkeypatch):
    Times = collections.namedtuple("Times", "user system idle iowait guest")
    # Of 10 s: 3 busy, of which 1 for a guest, 5 idle, 2 waiting for a disk.
    reads = [[Times(100, 10, 500, 50, 20)] * 2, [Times(102, 11, 505, 52, 21)] * 2]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: reads.pop(0))
    records = by_device(HostSampler().sample())
    assert records["cpu/0"]["utilization"] == records["cpu/1"]["utilization"] == 0.3


def test_rates_are_bytes_per_second_without_loopback(monkeypatch):
    class Counters:
        def __init__(self, grown):
            self.read_bytes, self.write_bytes = 100 + 1000 * grown, 5 + 3000 * grown
            self.bytes_sent, self.bytes_recv = 50 * grown, 70 * grown

    clock, grown = [0.0], [0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: Counters(grown[0]))
    interfaces = {"lo": 100, "eth0": 1, "eth1": 1}
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda pernic: {name: Counters(k * grown[0]) for name, k in interfaces.items()},
    )
    sampler = HostSampler()
    clock[0], grown[0] = 2.0, 1
    records = by_device(sampler.sample())
    disk = {"read_bytes_per_second": 500, "written_bytes_per_second": 1500}
    assert records["disk"] == {"device": "disk", **disk}
    network = {"sent_bytes_per_second": 50, "received_bytes_per_second": 70}
    assert records["network"] == {"device": "network", **network}
    clock[0] = 3.0
    assert by_device(sampler.sample())["disk"]["read_bytes_per_second"] == 0  # measured: none
    clock[0], grown[0] = 4.0, 0
    assert "disk" not in by_device(sampler.sample())  # the counter was reset


@pytest.mark.parametrize("lacking", [None, OSError("no /proc"), NotImplementedError()])
def test_counters_that_a_container_lacks_are_omitted(monkeypatch, lacking):
    def lacks(*_, **__):
        if lacking is None:
            return
        raise lacking

    monkeypatch.setattr(psutil, "disk_io_counters", lacks)
    monkeypatch.setattr(
        psutil, "net_io_counters", (lambda pernic: {}) if lacking is None else lacks
    )
    if lacking is not None:
        monkeypatch.setattr(psutil, "cpu_times", lacks)
    sampler = HostSampler()
    time.sleep(0.05)
    devices = set(by_device(sampler.sample()))
    assert not devices & {"disk", "network"}
    assert bool(devices) == (lacking is None)


def test_a_core_that_is_switched_off(monkeypatch):
    times = psutil.cpu_times(percpu=True)[0]
    reads = [[times] * 4, [times] * 3, [times] * 3]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: reads.pop(0))
    sampler = HostSampler()
    assert not [device for device in by_device(sampler.sample()) if device.startswith("cpu/")]
    sampler.sample()


def test_this_process():
    sampler = ProcessSampler("worker-3")
    began, cpu_began = time.monotonic(), sum(os.times()[:2])
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    busy(0.5)
    (record,) = sampler.sample()
    cores = (sum(os.times()[:2]) - cpu_began) / (time.monotonic() - began)
    stop.set()
    thread.join()
    assert record["device"] == "process/worker-3"
    assert record["utilization"] == pytest.approx(cores, abs=0.15)
    assert record["utilization"] > 0.1
    assert record["memory_used_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert record["threads"] >= 2
