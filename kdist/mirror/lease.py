"""Sole right of one process to write to a prefix of object storage."""

import json
import logging
import os
import pathlib
import platform
import threading
import time
import uuid
from typing import Any

import psutil

from kdist.json_text import parse_json
from kdist.mirror.store import Store

_logger = logging.getLogger(__name__)

LEASE = "lease.json"
_RENEWAL_SECONDS = 15.0
# The lease of another machine has ended if it was not renewed for this time.
_EXPIRY_SECONDS = 40.0


class Lease:
    """Sole right to write to a store, from `acquire` to `release` or the end of the process.

    The holder renews a small file. Clocks of machines differ, so another machine only looks at
    whether the file changes. On the same machine it looks for the process.

    Args:
        store: the store.

    Attributes:
        is_lost: whether the lease was abandoned, or taken by another process because this one could
            not renew it.
    """

    def __init__(self, store: Store):
        self._store = store
        self._record: dict[str, Any] = {}
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self.is_lost = False

    def read(self) -> dict[str, Any]:
        """Returns what the last holder wrote; empty without one.

        Raises:
            OSError: the store cannot be read.
        """
        try:
            record = parse_json(self._store.read(LEASE) or b"{}")
        except ValueError:
            return {}
        return record if isinstance(record, dict) else {}

    def acquire(self, run: str):
        """Takes the lease and renews it in the background.

        Args:
            run: identifier of the run, which stays in the file after `release`.

        Raises:
            FileExistsError: another process holds the lease.
            OSError: the store cannot be read or written.
        """
        held = self.read()
        if held.get("holder") and self._is_alive(held):
            raise FileExistsError(
                f"another run writes to {self._store.url} (process {held.get('process')} on "
                f"{held.get('host')}); wait for it, or use another prefix"
            )
        self._record = {
            "run": run,
            "holder": uuid.uuid4().hex,
            "host": platform.node(),
            "machine": _machine(),
            "process": os.getpid(),
            "started": _start_time(os.getpid()),
        }
        self._write(renewals=0)
        self._ending.clear()
        self.is_lost = False
        self._thread = threading.Thread(target=self._renew, name="kdist-lease", daemon=True)
        self._thread.start()

    def release(self):
        """Ends the lease, as far as the store can be written."""
        self._ending.set()
        if self._thread is None:
            return
        self._thread.join(_RENEWAL_SECONDS)
        if self.is_lost or self._thread.is_alive():  # lost, or the store does not answer
            return
        try:
            self._write(holder=None)
        except OSError as error:
            _logger.debug("the lease was not released: %s", error)

    def abandon(self):
        """Ends the renewal without a message to the store, which does not answer."""
        self.is_lost = True
        self._ending.set()

    def _is_alive(self, held):
        if held.get("machine") == _machine():
            started = _start_time(held.get("process"))
            return started is not None and started == held.get("started")
        _logger.info(
            "%s was last written from %s; waiting %.0f seconds to see whether it still is",
            self._store.url,
            held.get("host"),
            _EXPIRY_SECONDS,
        )
        time.sleep(_EXPIRY_SECONDS)
        now = self.read()
        return now != held and bool(now.get("holder"))

    def _renew(self):
        renewals = 0
        while not self._ending.wait(_RENEWAL_SECONDS):
            try:
                found = self.read()
                if found and found.get("holder") != self._record["holder"]:
                    self.is_lost = True
                    _logger.warning(
                        "another run writes to %s now; nothing is copied there any more, and "
                        "training continues",
                        self._store.url,
                    )
                    return
                renewals += 1
                self._write(renewals=renewals)
            except OSError as error:  # the copies report it
                _logger.debug("the lease was not renewed: %s", error)

    def _write(self, **changes):
        self._store.write(LEASE, json.dumps({**self._record, **changes}).encode())


def _machine():
    """Returns a text that two processes share if they can see each other's process ids."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return platform.node()


def _start_time(process):
    """Returns a number that tells a process from later ones of its id; None if it has ended."""
    try:
        state, *others = (
            pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        )
        return None if state in "ZX" else int(others[18])  # in ticks: unlike times, it never shifts
    except (OSError, IndexError, ValueError):
        return None if os.path.isdir("/proc/self") else _start_time_elsewhere(process)


def _start_time_elsewhere(process):
    try:
        return psutil.Process(process).create_time()
    except (psutil.Error, TypeError, ValueError):
        return None
