"""Addresses of data workers, checked without TensorFlow."""

import os
import socket
import time
from collections.abc import Sequence

from kdist.cluster import Cluster
from kdist.cluster.handshake import parse_address

# Environment variable with the addresses that `kdist launch --data_workers` gives to its tasks.
DATA_WORKERS = "KDIST_DATA_WORKERS"
_CONNECT_SECONDS = 5.0
# Data workers of the same job are started together with the tasks, and import TensorFlow first.
_START_SECONDS = 180.0
_POLL_SECONDS = 0.2


def parse_data_workers(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Returns addresses of data workers as a tuple; they may be separated by commas.

    Raises:
        ValueError: one is not `host:port`, or occurs twice.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(part.strip() for part in parts if part.strip())
    try:
        Cluster({"worker": found})
    except ValueError as error:
        raise ValueError(f"data_workers={','.join(found)}: {error}") from None
    return found


def resolve_data_workers(addresses: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns addresses of data workers; if they are None, those that `kdist launch` has started.

    Raises:
        ValueError: one is not `host:port`, or occurs twice.
    """
    return parse_data_workers(os.environ.get(DATA_WORKERS, "") if addresses is None else addresses)


def wait_until_answers(address: str):
    """Waits until a data worker of this job has started; raises ConnectionError if none answers."""
    waits = address in resolve_data_workers(None)
    deadline = time.monotonic() + (_START_SECONDS if waits else 0.0)
    while True:
        try:
            check_answers(address)
            return
        except ConnectionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_POLL_SECONDS)


def check_answers(address: str):
    """Raises a ConnectionError if no data worker answers at an address within seconds."""
    try:
        socket.create_connection(parse_address(address), _CONNECT_SECONDS).close()
    except OSError as error:
        port = parse_address(address)[1]
        raise ConnectionError(
            f"the data worker {address} does not answer ({error}). Start it there: kdist "
            f"data_worker --port={port}"
        ) from None


def addresses_of(host: str, port: int, batch_port: int | None = None) -> Cluster:
    """Returns the two addresses of a data worker, by default at `port` and the next one."""
    return Cluster({"worker": [f"{host}:{port}", f"{host}:{batch_port or port + 1}"]})
