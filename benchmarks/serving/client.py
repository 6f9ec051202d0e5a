"""Process of clients: python -m benchmarks.serving.client '{"port": 8501, …}' (`Order`).

Prints the outcome as a line of JSON. Imports TensorFlow only for gRPC.
"""

import asyncio
import dataclasses
import functools
import json
import subprocess
import sys

from benchmarks.serving.connections import GrpcConnection, HttpConnection
from benchmarks.serving.dialects import dialect
from benchmarks.serving.examples import Examples, Requests
from benchmarks.serving.loads import Limits, closed_loop, open_loop
from benchmarks.serving.outcomes import Outcome


@dataclasses.dataclass(frozen=True)
class Order:
    """Work order of a process of clients.

    Attributes:
        examples: a file of `Examples.save`.
        port: of the server, on this machine.
        path: of its URL; none for gRPC.
        dialect: a name of `benchmarks.serving.dialects`.
        limits: fields of `Limits`.
        clients: of a closed loop; or
        rate: of an open one, in requests a second.
        model: its name, for gRPC.
        input_name: of the model, for gRPC.
    """

    examples: str
    port: int
    path: str
    dialect: str
    limits: dict
    clients: int | None = None
    rate: float | None = None
    model: str = ""
    input_name: str = ""


def run(order: Order, root: str) -> dict:
    """Runs an order in a new process, and returns its `Outcome.summary`.

    Args:
        order: the work order.
        root: of the repository.

    Raises:
        RuntimeError: the process failed, or exceeded its limits by a minute.
    """
    limits = Limits(**order.limits)
    most = limits.seconds + limits.warm_up_seconds + limits.timeout_seconds + 60
    command = [sys.executable, "-m", __spec__.name, json.dumps(dataclasses.asdict(order))]
    try:
        process = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=most, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the clients did not end within {most:.0f} s") from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"the clients failed:\n{error.stderr[-3000:]}") from error
    return json.loads(process.stdout.strip().splitlines()[-1])


async def execute(order: Order) -> Outcome:
    """Executes an order in this process, and returns its outcome."""
    spoken = dialect(order.dialect, order.model, order.input_name)
    requests = Requests(Examples.load(order.examples), spoken)
    connect = _connect(order, spoken.is_grpc)
    limits = Limits(**order.limits)
    if order.rate:
        return await open_loop(connect, requests, order.rate, limits)
    return await closed_loop(connect, requests, order.clients or 1, limits)


def _connect(order, is_grpc):
    if not is_grpc:
        return functools.partial(HttpConnection.open, "127.0.0.1", order.port, order.path)

    async def connect():
        return GrpcConnection("127.0.0.1", order.port)

    return connect


def _main(given):
    order = Order(**json.loads(given))
    if order.dialect == "grpc":
        outcome = asyncio.run(execute(order))  # gRPC's own loop goes with asyncio's
    else:
        import uvloop

        outcome = uvloop.run(execute(order))
    print(json.dumps(outcome.summary()))


if __name__ == "__main__":
    _main(sys.argv[1])
