"""Starts, measures, and ends the processes of a server."""

import contextlib
import dataclasses
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

import psutil

ROOT = pathlib.Path(__file__).parents[2]

# Names the GPU of all servers, as in CUDA_VISIBLE_DEVICES. Servers use none by default.
GPU_VARIABLE = "KDIST_BENCHMARK_GPU"

# Common to all servers: as many threads as cores, oneDNN, and no log.
_COMMON = {
    "TF_ENABLE_ONEDNN_OPTS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "CUDA_VISIBLE_DEVICES": os.environ.get(GPU_VARIABLE, ""),
    "PYTHONPATH": str(ROOT),
}


@dataclasses.dataclass(frozen=True)
class Command:
    """Command that starts a server.

    Attributes:
        line: program and arguments; "{port}", "{grpc_port}" and "{other_port}" stand for free ports
            here and in the environment.
        ready_path: of a URL that a GET finds as soon as the server serves.
        environment: variables besides the common ones.
    """

    line: Sequence[str]
    ready_path: str
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Server:
    """Running server; ends with `end` or the `with` block.

    Args:
        command: command that starts the server.
        cores: threads that TensorFlow may compute with.
        timeout_seconds: time limit for the start.

    Attributes:
        port, grpc_port: ports on 127.0.0.1.

    Raises:
        RuntimeError: it ended, or is not ready in time; says the end of its output.
    """

    def __init__(self, command: Command, cores: int, timeout_seconds: float = 120.0):
        ports = dict(zip(("port", "grpc_port", "other_port"), _free_ports(3), strict=True))
        self.port, self.grpc_port = ports["port"], ports["grpc_port"]
        self._folder = tempfile.TemporaryDirectory()
        self._output = pathlib.Path(self._folder.name, "output")
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [part.format(**ports) for part in command.line],
                cwd=ROOT,
                env=_environment(command, cores, ports),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        # Children are remembered: once the first process is gone, nothing leads to them.
        self._known: set[psutil.Process] = {psutil.Process(self._process.pid)}
        try:
            self._wait(f"http://127.0.0.1:{self.port}{command.ready_path}", timeout_seconds)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_):
        self.end()

    def memory(self) -> int:
        """Returns the resident bytes of all processes; memory that they share counts for each."""
        total = 0
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def workers(self) -> list[psutil.Process]:
        """Returns kdist's worker processes: the children of the fork server."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children()
            return [each for child in children for each in child.children()]
        return []

    def end(self, patience_seconds: float = 15.0):
        """Terminates the server, waits, and kills all remaining processes."""
        self._family()
        if self._process.poll() is None:
            self._process.terminate()
        _, left = psutil.wait_procs(self._known, timeout=patience_seconds)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._folder.cleanup()

    def _family(self):
        for process in list(self._known):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._known.update(process.children(recursive=True))
        return [process for process in self._known if process.is_running()]

    def _wait(self, url, timeout_seconds):
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended before it was ready:\n{self._said()}")
            if _answers(url):
                return
            time.sleep(0.1)
        raise RuntimeError(f"not ready within {timeout_seconds:.0f} s:\n{self._said()}")

    def _said(self):
        return self._output.read_text(errors="replace")[-3000:]


def _environment(command, cores, ports):
    threads = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"), str(cores))
    own = {name: value.format(**ports) for name, value in command.environment.items()}
    return {**os.environ, **_COMMON, **threads, **own}


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(number):
    """Returns ports that are currently free."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
