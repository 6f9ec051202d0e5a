"""Base of writers to tracking servers, which never block training.

All communication with a server happens in a process of its own, whose main loop is `serve`.
Whatever the server and its library do, they take no time from training, and the process can be
killed.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

import kdist
from kdist.run_directory import finite
from kdist.telemetry.writers import Writer

# Queued records; hours of usual logging.
_MAX_QUEUED = 10_000
# Slowest upload of a model that `close` waits for.
_MIN_BYTES_PER_SECOND = 1e6

_logger = logging.getLogger("kdist.telemetry")


class TrackerWriter(Writer):
    """Writer that passes everything to a process, which communicates with a tracking server.

    A subclass sets `tracker` and `library`, and calls `_begin` if there is a run to write.

    Args:
        run_directory: the run directory. Files of the process go to a directory in it, which is
            named after the library.
        close_seconds: longest time that `close` waits, without uploads of models.

    Attributes:
        tracker: name of the service in messages.
        library: name of its Python package. `<library>_process` is the module of the process.

    Example:

        class MyWriter(TrackerWriter):
            tracker, library = "My tracker", "my_tracker"
    """

    tracker: str
    library: str

    def __init__(self, run_directory: str | os.PathLike, close_seconds: float):
        self._directory = pathlib.Path(run_directory).absolute()
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._closed = True
        self._ended = threading.Event()
        self._killed = False
        self._has_reported = False
        self._model_bytes = 0
        self._process: subprocess.Popen | None = None
        self._location: str | None = None
        # Unbounded, so that the final commands always fit; `_put` limits it.
        self._queue: queue.SimpleQueue = queue.SimpleQueue()

    def _begin(self, start):
        """Starts the process, whose first line of input is `start`."""
        self._closed = False
        self._queue.put({"close_seconds": self._close_seconds, **start})
        threading.Thread(target=self._send, name=f"kdist-{self.library}", daemon=True).start()

    @property
    def location(self) -> str | None:
        """URL of the run, or its directory if it is offline; None until it is known."""
        return self._location

    def write(self, record: Mapping[str, Any]):
        """Adds the numbers of a record as `<kind>/<name>`."""
        self._put({"do": "write", "record": dict(record)})

    def write_device(self, record: Mapping[str, Any]):
        """Adds the measurements of a device as `<device kind>/<index>/<metric>`.

        On several hosts the name of the host's number comes after the kind, such as `node1`.
        """
        self._put({"do": "write_device", "record": dict(record)})

    def write_config(self, config: Mapping[str, Any]):
        """Adds values to the configuration; those of groups are shown as `batch.global`."""
        self._put({"do": "write_config", "config": dict(config)}, always=True)

    def write_summary(self, summary: Mapping[str, Any]):
        """Adds all values of the summary."""
        self._put({"do": "write_summary", "summary": dict(summary)}, always=True)

    def write_report(self, path: str | os.PathLike):
        """Adds the page to the run."""
        self._put({"do": "write_report", "path": os.path.abspath(path)}, always=True)

    def write_model(
        self,
        path: str | os.PathLike,
        metadata: Mapping[str, Any],
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
    ):
        """Adds a model to the run, with the alias "latest".

        `close` then waits longer by the time of a slow upload, unless the server is lost.
        """
        path = pathlib.Path(path).absolute()
        if name is None:
            name = path.parent.name if path.name.isdecimal() else path.stem
        item = {
            "path": str(path),
            # Names that W&B accepts.
            "name": re.sub(r"[^\w.-]", "-", name, flags=re.ASCII),
            "metadata": dict(metadata),
            "aliases": sorted({"latest", *aliases}),
        }
        with contextlib.suppress(OSError):
            self._model_bytes += sum(file.stat().st_size for file in files_of(path))
        self._put({"do": "write_model", **item}, always=True)

    def close(self):
        """Finishes the run, and waits for it up to `close_seconds`."""
        with self._lock:
            if self._closed:
                return
            self._before_end()
            self._closed = True
        self._queue.put({"do": "finish"})
        self._queue.put(None)
        seconds = self._close_seconds
        if not self._has_reported:
            seconds += self._model_bytes / _MIN_BYTES_PER_SECOND
        if not self._ended.wait(seconds):
            self._killed = True
            self._kill_processes()
            self._report(f"the upload did not end within {seconds:.0f} s; {self._remedy}")

    def _before_end(self):
        """Called once, before the last command."""

    def _environment(self, files):
        """Returns the environment variables of the process, whose files go to `files`."""
        return dict(os.environ)

    def _locate(self, answer):
        """Notes and logs where the run is, as the process has answered."""
        self._location = answer["location"]
        _logger.info("%s: %s", self.tracker, self._location)

    @property
    def _remedy(self):
        """Advice that ends the message about a problem."""
        return (
            f"the run continues without {self.tracker}; all measurements are in {self._directory}"
        )

    def _put(self, item, always=False):
        if self._closed or self._ended.is_set():
            return
        if not always and self._queue.qsize() >= _MAX_QUEUED:
            self._report(
                f"{self.library} is too slow and misses some records; all of them are in "
                f"{self._directory}; {self._remedy}"
            )
            return
        self._queue.put(item)

    def _send(self):
        """Starts the process and sends it a line for each item; runs in a thread."""
        try:
            self._process = self._start()
        except OSError as error:
            self._report(
                f"its process cannot be started ({error}); the run continues without {self.tracker}"
            )
            self._ended.set()
            return
        threading.Thread(
            target=self._listen, name=f"kdist-{self.library}-answers", daemon=True
        ).start()
        try:
            with self._process.stdin as pipe:
                for item in iter(self._queue.get, None):
                    pipe.write(json.dumps(finite(item), default=str).encode() + b"\n")
                    pipe.flush()
        except OSError:
            pass  # The process has ended, which `_listen` reports.
        except (TypeError, ValueError) as error:
            self._report(
                f"JSON cannot hold a record ({error}); the run continues without {self.tracker}"
            )

    def _start(self):
        files = self._directory / self.library
        files.mkdir(parents=True, exist_ok=True)
        # The process imports the same kdist as this one, whatever the working directory is.
        package = str(pathlib.Path(kdist.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        module = f"kdist.telemetry.writers.{self.library}_process"
        with open(files / "process.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", f"import {module}; {module}.main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environment(files), "PYTHONPATH": path},
                # Ctrl-C in a terminal is for training, which then closes this writer.
                start_new_session=True,
            )

    def _listen(self):
        """Logs the answers of the process until it ends; runs in a thread."""
        finished = False
        try:
            with self._process.stdout as answers:
                for line in answers:
                    finished = self._handle(json.loads(line)) or finished
        except (OSError, ValueError):
            pass  # The process was killed in the middle of a line.
        code = self._process.wait()
        if not finished and not self._killed:
            log = self._directory / self.library / "process.log"
            self._report(f"its process ended with code {code} (see {log}); {self._remedy}")
        self._ended.set()

    def _handle(self, answer):
        """Handles an answer; returns whether the run has finished."""
        if "location" in answer:
            self._locate(answer)
        elif "problem" in answer:
            self._report(f"{answer['problem']}; {self._remedy}")
        return "finished" in answer

    def _report(self, problem):
        """Logs the first problem only, as later ones follow from it."""
        with self._lock:
            has_reported, self._has_reported = self._has_reported, True
        if not has_reported:
            _logger.warning("%s: %s", self.tracker, problem)

    def _kill_processes(self):
        """Kills our process and its children, which may be in another session."""
        if self._process is None:
            return
        try:
            ours = psutil.Process(self._process.pid)
            processes = [*ours.children(recursive=True), ours]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def files_of(path: str | os.PathLike) -> list[pathlib.Path]:
    """Returns the files in a directory and its directories; of a file, the file itself."""
    path = pathlib.Path(path)
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]


def serve(open_run: Callable[[dict[str, Any], Callable[..., None]], Any]):
    """Opens a run, executes commands until the input ends, and finishes the run.

    It is the main loop of a tracker's process. The input has JSON objects: first the settings of
    the run, then commands. The answers are where the run is, problems, and that the run has
    finished.

    Args:
        open_run: function of the settings, and of a function that sends an answer. It returns an
            object with a method for each command, and `finish(exit_code)`.
    """
    # The training program decides when this process ends, and has priority.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    commands, answers = _own_pipes()
    lock = threading.Lock()

    def send(**answer):
        # A training program that was killed reads no answers, but its commands are still here.
        with lock, contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(answer) + "\n")

    start = json.loads(commands.readline())
    try:
        run = open_run(start, send)
    except Exception as error:
        send(problem=f"no run was created ({type(error).__name__}: {first_line(error)})")
        send(finished=True)
        os._exit(0)
    in_order = False
    for line in commands:
        command = json.loads(line)
        do = command.pop("do")
        if do == "finish":
            in_order = True
            break
        try:
            getattr(run, do)(**command)
        except Exception as error:
            send(problem=f"{do} failed ({type(error).__name__}: {first_line(error)})")
    if not in_order:
        # The training program has ended and cannot kill this process if it hangs.
        limit = threading.Timer(start["close_seconds"], _end_all)
        limit.daemon = True
        limit.start()
    run.finish(exit_code=0 if in_order else 1)
    send(finished=True)


def _own_pipes():
    """Returns copies of standard input and output, which children of the process must not inherit.

    It would keep them open after this process has ended.
    """
    commands, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", buffering=1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    # What is written to these is the training program's output, which only a tracker shall copy.
    sys.stdout, sys.stderr = (open(os.devnull, "w") for _ in range(2))  # noqa: SIM115
    return commands, answers


def first_line(error: Exception) -> str:
    """Returns the first line of the message of an error."""
    return (str(error).splitlines() or [""])[0]


def _end_all():
    """Kills this process and its children."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)
