"""Waiting for what happens in another thread or process."""

import time


def wait_until(condition, seconds=10.0):
    """Returns when `condition()` holds; fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
