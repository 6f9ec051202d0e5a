"""Writer of Weights & Biases, which never blocks training.

All communication with wandb happens in a process of its own
(`kdist.telemetry.writers.wandb_process`). Whatever wandb does, it takes no time from training, and
it can be killed.
"""

import contextlib
import logging
import os
import shlex
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.run_directory import finite
from kdist.telemetry.writers.tracker import TrackerWriter

MODES = ("auto", "online", "offline", "disabled", "off")

# Time for a server to answer before a run is kept offline, and time between two checks of it.
_ANSWER_SECONDS = 5.0
_WATCH_SECONDS = 30.0

_logger = logging.getLogger(__name__)

_STREAMS = ("stdout", "stderr")
# Lines of a program that never ends one.
_MAX_LINE = 10_000


class WandbWriter(TrackerWriter):
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

    tracker, library = "W&B", "wandb"

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
        super().__init__(run_directory, close_seconds)
        self._sync_command: str | None = None
        if mode in ("disabled", "off"):
            return
        self._begin(
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
            }
        )
        self._console = ConsoleCopy(self._put_console)
        self._console.start()

    def write_samples(self, record: Mapping[str, Any]):
        """Adds sample predictions as the table `samples`."""
        self._put({"do": "write_samples", "record": dict(record)})

    def _put_console(self, stream, text):
        self._put({"do": "write_console", "stream": stream, "text": text})

    def _before_end(self):
        self._console.stop()

    def _environment(self, files):
        environment = {
            # Otherwise wandb posts reports of crashes and of usage to its makers.
            "WANDB_ERROR_REPORTING": "false",
            # These are in the user's home by default.
            "WANDB_CACHE_DIR": str(files / "cache"),
            "WANDB_DATA_DIR": str(files / "data"),
            **os.environ,
            "WANDB_SILENT": "true",
        }
        # Another run in this process may have set it; this run's service ends with this process.
        environment.pop("WANDB_SERVICE", None)
        return environment

    def _locate(self, answer):
        self._location = answer["location"]
        # `wandb sync` skips runs that have been online, unless asked for them.
        online = ["--include-online"] if answer["online"] else []
        self._sync_command = shlex.join(["wandb", "sync", *online, answer["files"]])
        _logger.info("W&B: %s", self._where(answer))

    def _where(self, answer):
        if answer["online"]:
            return answer["location"]
        reason = f"{answer['reason']}; " if answer["reason"] else ""
        return f"{reason}offline; to upload it: {self._sync_command}"

    @property
    def _remedy(self):
        if self._sync_command is None:
            return super()._remedy
        return f"training is not affected; afterwards: {self._sync_command}"


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
