"""Model server: serves exported models over REST and gRPC until a signal ends it.

run(ServerOptions({"fashion": "models/fashion"}, port=8501, grpc_port=8500))
"""

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping

import uvicorn
import uvloop

from kdist.serving.core.model_directory import all_needed_devices
from kdist.serving.core.resources import limit_connections
from kdist.serving.core.settings import BatchSettings, Objective, ServerLimits
from kdist.serving.engine.in_process import InProcess, prepare_interpreter
from kdist.serving.engine.models import Models
from kdist.serving.engine.worker_pool import WorkerPool
from kdist.serving.platforms import Platform
from kdist.serving.protocol.connections import connection_factory
from kdist.serving.protocol.rest import create_application
from kdist.serving.protocol.rpc import create_grpc_server

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.01  # until the server listens
# Time limit for closing the models after the requests have ended.
_CLOSE_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Options of the model server.

    Example:

        options = kdist.serving.ServerOptions({"fashion": "models/fashion"}, port=8501, workers=2)
        kdist.serving.run(options)

    Attributes:
        directories: {name: directory of the model's versions}.
        port: port for REST; 0 chooses a free port. Defaults to 8501.
        grpc_port: port for gRPC; 0 chooses a free port, None disables gRPC. Defaults to 8500.
        host: address to listen on. Defaults to 127.0.0.1, which only this machine can reach.
        workers: number of processes that compute. Defaults to 0: the server process computes.
        settings: batch settings; with an objective, only `max_batch` is used.
        objective: goal for adapting the settings to the load; None keeps them fixed. Defaults to
            the lowest mean latency.
        limits: limits on requests and connections.
        newest: number of newest versions of a model to serve. Defaults to 1.
        watch_seconds: seconds between checks for new versions. Defaults to 1.
        end_seconds: seconds for requests to finish after a signal. Defaults to 30.
        platform: hosting platform whose routes are served as well; `Platform.options` returns the
            arguments that go with it. Defaults to none.
    """

    directories: Mapping[str, str | os.PathLike]
    port: int = 8501
    grpc_port: int | None = 8500
    host: str = "127.0.0.1"
    workers: int = 0
    settings: BatchSettings = dataclasses.field(default_factory=BatchSettings)
    objective: Objective | None = dataclasses.field(default_factory=Objective)
    limits: ServerLimits = dataclasses.field(default_factory=ServerLimits)
    newest: int = 1
    watch_seconds: float = 1.0
    end_seconds: float = 30.0
    platform: Platform | None = None


def run(options: ServerOptions, on_ready: Callable[[str], None] | None = None) -> None:
    """Serves models until SIGTERM or SIGINT. Accepted requests are answered before it returns.

    Args:
        options: models, addresses, and limits.
        on_ready: called with a message that contains the addresses, once all models are loaded.
            Defaults to logging the message.

    Raises:
        OSError: a port is in use, or the address does not belong to this machine.
        ValueError: a directory does not exist, or no model in it loads.

    Example:

        kdist.serving.run(kdist.serving.ServerOptions({"fashion": "models/fashion"}))
        # curl -d '{"instances": [[…]]}' http://127.0.0.1:8501/v1/models/fashion:predict
    """
    uvloop.run(serve(options, on_ready))


async def serve(options: ServerOptions, on_ready: Callable[[str], None] | None = None) -> None:
    """Serves models in the running event loop; see `run`."""
    _warn_if_exposed(options.host)
    on_ready = on_ready or functools.partial(_logger.info, "%s")
    with _listening(options.host, options.port, "port") as listener:
        compute_engine = _create_engine(options)
        models = Models(
            options.directories,
            compute_engine,
            settings=options.settings,
            objective=options.objective,
            limits=limit_connections(options.limits, options.workers),
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


def _create_engine(options):
    devices = all_needed_devices(options.directories.values(), options.newest)
    if not options.workers:
        return InProcess(devices)
    return WorkerPool(options.workers, devices=devices, load_seconds=options.limits.load_seconds)


async def _serve(options, models, listener, grpc_server, on_ready, addresses):
    prepare_interpreter()
    await models.refresh()
    models.check_served()
    web = _Web(_uvicorn_settings(options, models))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, web.stop, models, number)
    await grpc_server.start()
    watching = asyncio.create_task(models.watch(options.watch_seconds))
    serving = asyncio.create_task(web.serve([listener]))
    try:
        while not (web.started or serving.done()):
            await asyncio.sleep(_POLL_SECONDS)
        if web.started:
            on_ready(f"kdist serves {', '.join(models.names)}: {', '.join(addresses)}")
        stop_signal = asyncio.create_task(web.stopping.wait())
        await asyncio.wait([serving, stop_signal], return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        # Both at once, so that they share the time limit.
        await asyncio.gather(serving, grpc_server.stop(options.end_seconds))


class _Web(uvicorn.Server):
    """HTTP server that `stop` ends; uvicorn alone would raise the signal again afterwards."""

    def __init__(self, config):
        super().__init__(config)
        self.stopping = asyncio.Event()

    def stop(self, models, number):
        if self.should_exit:  # a second signal skips the wait for requests
            _logger.warning("ended by a second signal; requests in flight get no response")
            os._exit(128 + number)  # as shells report it
        _logger.info(
            "ending after the requests in flight, within %g s; a second signal ends it immediately",
            self.config.timeout_graceful_shutdown,
        )
        models.ending = True  # /readyz reports it immediately
        self.should_exit = True
        self.stopping.set()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _uvicorn_settings(options, models):
    return uvicorn.Config(
        create_application(models, platform=options.platform),
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="none",
        http=connection_factory(models.limits, models.metrics),
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
            raise OSError(_listen_error(host, port, flag, error.strerror)) from error
        yield listener


def _listen(grpc_server, options):
    try:
        port = grpc_server.add_insecure_port(_address(options.host, options.grpc_port))
    except RuntimeError as error:
        raise OSError(
            _listen_error(options.host, options.grpc_port, "grpc_port", "it is in use")
        ) from error
    return _address(options.host, port)


def _listen_error(host, port, flag, reason):
    return f"cannot listen at {_address(host, port)}: {reason}; choose another {flag}, or 0 for any"


def _address(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _warn_if_exposed(host):
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    if host != "localhost":
        _logger.warning(
            "listening at %s: anyone who can reach this address can use the models, without "
            "encryption or a password; put a proxy that provides both in front",
            host,
        )
