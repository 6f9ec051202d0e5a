"""One command serves models over REST and gRPC until it is told to end.

run(ServerOptions({"fashion": "models/fashion"}, port=8501, grpc_port=8500))
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

import uvicorn
import uvloop

from kdist.serving.computing import InProcess
from kdist.serving.http_protocol import protocol
from kdist.serving.interpreter import prepare_interpreter
from kdist.serving.model_directory import all_needed_devices
from kdist.serving.models import Models
from kdist.serving.rest import create_application
from kdist.serving.rpc import create_grpc_server
from kdist.serving.settings import BatchSettings, Limits, Objective
from kdist.serving.workers import Workers

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.01  # whether it listens
# For the models, when all requests have ended or had the time to.
_CLOSE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """What is served, and where.

    Attributes:
        directories: {name: directory of a model's versions}.
        port: for REST; 0 for any that is free.
        grpc_port: for gRPC; 0 for any that is free, None for no gRPC.
        host: the address to listen at; this machine alone unless told.
        workers: processes that compute; 0 computes in the server's own.
        settings: of batches; where there is an objective, only the largest batch counts.
        objective: what settings are chosen for while the load changes; None for fixed ones.
        limits: of requests.
        newest: versions of a model that are served.
        watch_seconds: between looks for new versions.
        end_seconds: that requests have to end in, once the server is told to end.
    """

    directories: Mapping[str, str | os.PathLike]
    port: int = 8501
    grpc_port: int | None = 8500
    host: str = "127.0.0.1"
    workers: int = 0
    settings: BatchSettings = dataclasses.field(default_factory=BatchSettings)
    objective: Objective | None = dataclasses.field(default_factory=Objective)
    limits: Limits = dataclasses.field(default_factory=Limits)
    newest: int = 1
    watch_seconds: float = 1.0
    end_seconds: float = 30.0


def run(options: ServerOptions, on_ready: Callable[[str], None] = print) -> None:
    """Serves until SIGTERM or SIGINT; requests that it has taken are answered first.

    Args:
        options: what, and where.
        on_ready: called with a sentence that names the addresses, when all models are loaded.

    Raises:
        OSError: a port is in use, or the address is not this machine's.
        ValueError: a directory is not there, or no model in it loads.
    """
    uvloop.run(serve(options, on_ready))


async def serve(options: ServerOptions, on_ready: Callable[[str], None] = print) -> None:
    """`run`, in an event loop."""
    _warn_of_the_world(options.host)
    with _listening(options.host, options.port, "port") as listener:
        computing = _computing(options)
        models = Models(
            options.directories,
            computing,
            settings=options.settings,
            objective=options.objective,
            limits=options.limits,
            newest=options.newest,
        )
        try:
            grpc_server = create_grpc_server(models)
            addresses = [f"http://{_address(options.host, listener.getsockname()[1])}"]
            if options.grpc_port is not None:
                addresses.append(f"gRPC at {_listen(grpc_server, options)}")
            await _serve(options, models, listener, grpc_server, on_ready, addresses)
        finally:
            await models.close(_CLOSE_SECONDS)


def _computing(options):
    devices = all_needed_devices(options.directories.values())
    return Workers(options.workers, devices=devices) if options.workers else InProcess(devices)


async def _serve(options, models, listener, grpc_server, on_ready, addresses):
    prepare_interpreter()
    await models.refresh()
    models.check_served()
    web = _Web(_uvicorn_settings(options, create_application(models)))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, web.end, models)
    await grpc_server.start()
    watching = asyncio.create_task(models.watch(options.watch_seconds))
    serving = asyncio.create_task(web.serve([listener]))
    try:
        while not (web.started or serving.done()):
            await asyncio.sleep(_LOOK_SECONDS)
        if web.started:
            on_ready(f"kdist serves {', '.join(models.names)}: {', '.join(addresses)}")
        told = asyncio.create_task(web.told.wait())
        await asyncio.wait([serving, told], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        # Both at once, so that together they take no longer than they may.
        await asyncio.gather(serving, grpc_server.stop(options.end_seconds))


class _Web(uvicorn.Server):
    """Ends when it is told to; by itself uvicorn would raise the signal anew afterwards."""

    def __init__(self, config):
        super().__init__(config)
        self.told = asyncio.Event()

    def end(self, models):
        if self.should_exit:  # told again: who does so does not want to wait
            os._exit(1)
        models.ending = True  # so that /readyz says so at once
        self.should_exit = True
        self.told.set()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _uvicorn_settings(options, application):
    return uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="none",
        http=protocol(options.limits),
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=options.end_seconds,
        backlog=2048,
    )


@contextlib.contextmanager
def _listening(host, port, flag):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise OSError(_not_listening(host, port, flag, error.strerror)) from error
        yield listener


def _listen(grpc_server, options):
    try:
        port = grpc_server.add_insecure_port(_address(options.host, options.grpc_port))
    except RuntimeError as error:
        raise OSError(
            _not_listening(options.host, options.grpc_port, "grpc_port", "it is in use")
        ) from error
    return _address(options.host, port)


def _not_listening(host, port, flag, why):
    return f"cannot listen at {_address(host, port)}: {why}; give another {flag}, or 0 for any"


def _address(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _warn_of_the_world(host):
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        _log.warning(
            "listening at %s: anyone who reaches it may ask the models; there is no encryption and "
            "no password, so put a proxy with both in front",
            host,
        )
