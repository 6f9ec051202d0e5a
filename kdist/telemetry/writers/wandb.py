"""Writer of Weights & Biases, which never blocks training.

All communication with wandb happens in a process of its own
(`kdist.telemetry.writers.wandb_process`). Whatever wandb does, it takes no time from training, and
it can be killed.
"""

import contextlib
import json
import logging
import os
import pathlib
import queue
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

import kdist
from kdist.run_directory import finite
from kdist.telemetry.writers.base import Writer

MODES = ("auto", "online", "offline", "disabled", "off")

# Queued records; hours of usual logging.
_MAX_QUEUED = 10_000
# Time for a server to answer before a run is kept offline, and time between two checks of it.
_ANSWER_SECONDS = 5.0
_WATCH_SECONDS = 30.0
# Slowest upload of a model that `close` waits for.
_MIN_BYTES_PER_SECOND = 1e6

_PROGRAM = "from kdist.telemetry.writers import wandb_process; wandb_process.main()"

_logger = logging.getLogger(__name__)

_STREAMS = ("stdout", "stderr")
# Lines of a program that never ends one.
_MAX_LINE = 10_000


class WandbWriter(Writer):
    """Writes measurements, configuration, summary, report, and models to Weights & Biases.

    The x-axis of curves is the number of examples seen; for devices it is seconds. W&B's own system
    monitor, console log, and git commit are on, for this process. wandb's files go to
    `<run_directory>/wandb/`, so that nothing is lost while W&B cannot be reached: `wandb sync`
    uploads the rest later. The writer logs where the run is, and its first problem. It reads the
    API key from where `wandb login` or WANDB_API_KEY put it and stores it nowhere.

    Args:
        run_directory: the run directory.
        mode: "auto" is online with a login and a server that answers within seconds, otherwise
            offline, and follows WANDB_MODE. "online" does the same and logs why the run is not
            online. "disabled" and "off" do nothing. Defaults to "auto".
        project: W&B project. Defaults to WANDB_PROJECT, or "kdist" without it.
        group: name under which W&B groups runs, such as the name of a job.
        job_type: name within the group, such as "train".
        name: name of the run in W&B. Defaults to the name of the run directory.
        config: configuration of the run; that of `write_config` is added.
        tags: tags of the run. Defaults to those in WANDB_TAGS, separated by commas.
        notes: notes on the run, which W&B shows and lets edit. Defaults to WANDB_NOTES.
        close_seconds: longest time that `close` waits, without uploads of models. Defaults to 20.

    Raises:
        ValueError: `mode` is unknown.

    Example:

        writer = WandbWriter("runs/first", "auto", config={"model": "resnet18"})
        writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
        writer.close()  # takes at most 20 s
    """

    def __init__(
        self,
        run_directory: str | os.PathLike,
        mode: str = "auto",
        project: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        close_seconds: float = 20.0,
        *,
        tags: Sequence[str] = (),
        notes: str | None = None,
    ):
        if mode not in MODES:
            raise ValueError(f"W&B mode {mode!r} is unknown; use one of {', '.join(MODES)}")
        self._directory = pathlib.Path(run_directory).absolute()
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._closed = mode in ("disabled", "off")
        self._ended = threading.Event()
        self._killed = False
        self._has_reported = False
        self._model_bytes = 0
        self._process: subprocess.Popen | None = None
        self._location: str | None = None
        self._sync_command: str | None = None
        # Unbounded, so that the final commands always fit; `_put` limits it.
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        if self._closed:
            return
        self._queue.put(
            {
                "directory": str(self._directory),
                "mode": mode,
                "project": project or os.environ.get("WANDB_PROJECT") or "kdist",
                "group": group,
                "job_type": job_type,
                "name": name or self._directory.name,
                "config": finite(dict(config or {})),
                "tags": list(tags) or None,
                "notes": notes,
                "program": sys.argv[0],
                "training_pid": os.getpid(),
                "answer_seconds": _ANSWER_SECONDS,
                "watch_seconds": _WATCH_SECONDS,
                "close_seconds": close_seconds,
            }
        )
        threading.Thread(target=self._send, name="kdist-wandb", daemon=True).start()
        self._console = ConsoleCopy(self._put_console)
        self._console.start()

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
        """Adds values to the configuration; W&B shows groups as `batch.global`."""
        self._put({"do": "write_config", "config": dict(config)}, always=True)

    def write_summary(self, summary: Mapping[str, Any]):
        """Adds all values of the summary."""
        self._put({"do": "write_summary", "summary": dict(summary)}, always=True)

    def write_report(self, path: str | os.PathLike):
        """Adds the page to the run, as an artifact of type "report"."""
        self._put({"do": "write_report", "path": os.path.abspath(path)}, always=True)

    def write_samples(self, record: Mapping[str, Any]):
        """Adds sample predictions as the table `samples`."""
        self._put({"do": "write_samples", "record": dict(record)})

    def write_model(
        self,
        path: str | os.PathLike,
        metadata: Mapping[str, Any],
        *,
        name: str | None = None,
        aliases: Sequence[str] = (),
    ):
        """Adds a model as an artifact of type "model" with the alias "latest".

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
            self._console.stop()
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

    def _put_console(self, stream, text):
        self._put({"do": "write_console", "stream": stream, "text": text})

    def _put(self, item, always=False):
        if self._closed or self._ended.is_set():
            return
        if not always and self._queue.qsize() >= _MAX_QUEUED:
            self._report(
                "wandb is too slow and misses some records; all of them are in "
                f"{self._directory}; {self._remedy}"
            )
            return
        self._queue.put(item)

    def _send(self):
        """Starts the process and sends it a line for each item; runs in a thread."""
        try:
            self._process = self._start()
        except OSError as error:
            self._report(f"its process cannot be started ({error}); the run continues without W&B")
            self._ended.set()
            return
        threading.Thread(target=self._listen, name="kdist-wandb-answers", daemon=True).start()
        try:
            with self._process.stdin as pipe:
                for item in iter(self._queue.get, None):
                    pipe.write(json.dumps(finite(item), default=str).encode() + b"\n")
                    pipe.flush()
        except OSError:
            pass  # The process has ended, which `_listen` reports.
        except (TypeError, ValueError) as error:
            self._report(f"JSON cannot hold a record ({error}); the run continues without W&B")

    def _start(self):
        files = self._directory / "wandb"
        files.mkdir(parents=True, exist_ok=True)
        # The process imports the same kdist as this one, whatever the working directory is.
        package = str(pathlib.Path(kdist.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {
            # Otherwise wandb posts reports of crashes and of usage to its makers.
            "WANDB_ERROR_REPORTING": "false",
            # These are in the user's home by default.
            "WANDB_CACHE_DIR": str(files / "cache"),
            "WANDB_DATA_DIR": str(files / "data"),
            **os.environ,
            "WANDB_SILENT": "true",
            "PYTHONPATH": path,
        }
        # Another run in this process may have set it; this run's service ends with this process.
        environment.pop("WANDB_SERVICE", None)
        with open(files / "process.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
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
            log = self._directory / "wandb" / "process.log"
            self._report(f"its process ended with code {code} (see {log}); {self._remedy}")
        self._ended.set()

    def _handle(self, answer):
        """Handles an answer; returns whether the run has finished."""
        if "location" in answer:
            self._location = answer["location"]
            # `wandb sync` skips runs that have been online, unless asked for them.
            online = ["--include-online"] if answer["online"] else []
            self._sync_command = shlex.join(["wandb", "sync", *online, answer["files"]])
            _logger.info("W&B: %s", self._where(answer))
        elif "problem" in answer:
            self._report(f"{answer['problem']}; {self._remedy}")
        return "finished" in answer

    def _where(self, answer):
        if answer["online"]:
            return answer["location"]
        reason = f"{answer['reason']}; " if answer["reason"] else ""
        return f"{reason}offline; to upload it: {self._sync_command}"

    @property
    def _remedy(self):
        if self._sync_command is None:
            return f"the run continues without W&B; all measurements are in {self._directory}"
        return f"training is not affected; afterwards: {self._sync_command}"

    def _report(self, problem):
        """Logs the first problem only, as later ones follow from it."""
        with self._lock:
            has_reported, self._has_reported = self._has_reported, True
        if not has_reported:
            _logger.warning("W&B: %s", problem)

    def _kill_processes(self):
        """Kills our process and wandb's, which is its child in another session."""
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


class ConsoleCopy:
    """Passes the lines of `sys.stdout` and `sys.stderr` to a function, from `start` to `stop`.

    Of a line that a progress bar writes again and again, only the last state is passed. Output that
    does not come from Python, such as that of TensorFlow's own code, is not copied.

    Args:
        receive: function of the stream's name and complete lines. It must not write to a stream.
    """

    def __init__(self, receive: Callable[[str, str], Any]):
        self._receive = receive
        self._originals: dict[str, tuple[Any, Callable]] = {}
        self._open = dict.fromkeys(_STREAMS, "")  # a line without its end
        self._lock = threading.RLock()

    def start(self):
        """Starts copying; does nothing for a stream that cannot be copied."""
        for name in _STREAMS:
            stream = getattr(sys, name)
            with contextlib.suppress(AttributeError, TypeError):
                write = stream.write
                stream.write = self._copying(name, write)
                self._originals[name] = stream, write

    def stop(self):
        """Stops copying, and passes lines that have not ended."""
        for name, (stream, write) in self._originals.items():
            # Another program that has replaced it in the meantime still calls ours.
            if getattr(stream.write, "of", None) is self:
                stream.write = write
            with self._lock:
                rest, self._open[name] = self._open[name], ""
                if rest:
                    self._receive(name, _last_state(rest) + "\n")
        self._originals = {}

    def _copying(self, name, write):
        def copying(text):
            result = write(text)
            if name in self._originals:
                self._copy(name, text)
            return result

        copying.of = self  # type: ignore[attr-defined]
        return copying

    def _copy(self, name, text):
        with self._lock:
            *lines, rest = (self._open[name] + str(text)).split("\n")
            self._open[name] = rest[-_MAX_LINE:]
            if lines:
                self._receive(name, "".join(_last_state(line) + "\n" for line in lines))


def _last_state(line):
    """Returns what remains of a line after carriage returns and backspaces."""
    states = line.replace("\b", "").split("\r")
    return next((state for state in reversed(states) if state), "")
