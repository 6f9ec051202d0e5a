"""Preemption notices, from stand-ins for the metadata servers of clouds."""

import signal
import threading
import time

import pytest

from kdist.cluster import notices
from kdist.launch.task import Screen
from kdist.launch.task_group import TaskGroup, Timeouts, stop_on_signals
from kdist.testing.metadata import metadata_server

CLOUDS = ("gce", "aws", "azure")


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    monkeypatch.setattr(notices, "_POLL_SECONDS", dict.fromkeys(CLOUDS, 0.02))
    monkeypatch.setattr(notices, "_RETRY_SECONDS", 0.02)


@pytest.fixture
def signals():
    """Returns the list of the SIGTERMs that this process receives."""
    received = []
    before = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


def wait_until(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_is_one_sigterm(cloud, signals, caplog):
    with metadata_server(cloud) as server:
        watch = notices.watch(server.environment)
        wait_until(lambda: server.answered)
        time.sleep(0.05)
        assert (signals, watch.has_notice) == ([], False)
        server.announce()
        wait_until(lambda: signals)
        time.sleep(0.1)
        watch.close()
    assert (signals, watch.has_notice) == ([signal.SIGTERM], True)
    assert f"{cloud} takes this machine away soon" in caplog.text


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_notice_from_before_the_start_is_seen(cloud, signals):
    with metadata_server(cloud) as server:
        server.announce()
        watch = notices.watch(server.environment)
        wait_until(lambda: signals)
        watch.close()


def test_a_closed_watch_sends_nothing(signals):
    with metadata_server("gce") as server:
        watch = notices.watch(server.environment)
        wait_until(lambda: server.answered)
        watch.close()
        server.announce()
        wait_until(lambda: "kdist-notices" not in {t.name for t in threading.enumerate()})
    assert signals == []


def test_a_server_that_does_not_answer_is_asked_again(signals, caplog):
    caplog.set_level("INFO")
    with metadata_server("aws") as server:
        environment, port = server.environment, server.server_address[1]
    watch = notices.watch(environment)
    wait_until(lambda: "no preemption notices from aws" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("no preemption notices") == 1
    with metadata_server("aws", port) as server:
        server.announce()
        wait_until(lambda: signals)
    watch.close()


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({}, ""),
        ({"product_name": "Google Compute Engine\n", "sys_vendor": "Google\n"}, "gce"),
        ({"product_name": "p4d.24xlarge\n", "sys_vendor": "Amazon EC2\n"}, "aws"),
        ({"sys_vendor": "Xen\n", "bios_version": "4.11.amazon\n"}, "aws"),
        (
            {
                "sys_vendor": "Microsoft Corporation\n",
                "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n",
            },
            "azure",
        ),
        ({"sys_vendor": "Microsoft Corporation\n", "product_name": "Virtual Machine\n"}, ""),
    ],
)
def test_the_kernel_tells_the_cloud(tmp_path, files, cloud):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert notices.find_cloud(tmp_path) == cloud


def test_other_machines_are_not_watched(monkeypatch):
    monkeypatch.setattr(notices, "find_cloud", lambda: "")
    assert notices.watch({}) is None
    assert notices.watch({notices.URL_VARIABLE: ""}) is None


@pytest.mark.parametrize("text", ["gce", "http://127.0.0.1:1", "gcp=http://a", "gce=127.0.0.1"])
def test_a_malformed_address(text):
    with pytest.raises(ValueError, match="KDIST_METADATA_URL=.*such as gce=http"):
        notices.watch({notices.URL_VARIABLE: text})


def test_the_launcher_gives_time_to_save_and_ignores_the_shutdown(monkeypatch):
    job = TaskGroup([], "mark", Screen(), Timeouts(end_seconds=1))
    with metadata_server("gce") as server:
        monkeypatch.setenv(notices.URL_VARIABLE, server.environment[notices.URL_VARIABLE])
        with stop_on_signals(job):
            server.announce()
            wait_until(lambda: job.stopped_by)
            signal.raise_signal(signal.SIGTERM)
            assert (job.stopped_by, job._kill_now) == (signal.SIGTERM, False)
            assert job._seconds_to_end() == notices.GRACE_SECONDS
            signal.raise_signal(signal.SIGINT)
            assert job._kill_now
