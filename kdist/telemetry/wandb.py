"""Measurements in Weights & Biases, without ever waiting for it.

writer = WandbWriter("runs/first", "auto", config={"model": "resnet18"})
writer.write({"kind": "epoch", "epoch": 1, "examples": 60000, "loss": 0.4})
writer.close()   # takes at most 20 s

All that talks to wandb is in a process of its own (`kdist.telemetry.wandb_process`): whatever wandb
does, wherever it hangs, it takes no time from training, and can be ended.
"""

import contextlib
import json
import os
import pathlib
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import psutil

import kdist
from kdist.run_directory import finite

MODES = ("auto", "online", "offline", "disabled", "off")

# Records that wait to be taken; some hours of usual logging.
_MOST_WAITING = 10_000
# How long a server may take to answer before a run is kept offline, and between two looks at it.
_ANSWER_SECONDS = 5.0
_WATCH_SECONDS = 30.0

_PROGRAM = "from kdist.telemetry import wandb_process; wandb_process.main()"


class WandbWriter:
    """Writes a run's measurements, configuration, summary and report page to Weights & Biases.

    Curves have examples seen as their x-axis, those of devices seconds. wandb's files go to
    `<run_directory>/wandb/`, so that nothing is lost where W&B cannot be reached: what is missing
    there is sent later by `wandb sync`. A line on stderr says where the run is; another one, once,
    if something goes wrong. The API key is where `wandb login` or WANDB_API_KEY put it and goes
    nowhere else.

    Args:
        run_directory: the run's; its name is the run's name in W&B.
        mode: `auto` is online where there is a login and the server answers within some seconds,
            else offline, and heeds WANDB_MODE. `online` is the same and says why where it cannot
            be had. `disabled` and `off` do nothing. Defaults to auto.
        project: in W&B. Defaults to WANDB_PROJECT or, without it, kdist.
        group: what W&B shows together, such as a job's name.
        job_type: what W&B groups by within it, such as "train".
        name: of the run in W&B. Defaults to the run directory's name.
        config: what the run was asked to do.
        close_seconds: how long `close` waits at most. Defaults to 20.

    Raises:
        ValueError: there is no such mode.
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
    ):
        if mode not in MODES:
            raise ValueError(f"W&B mode {mode!r}: take one of {', '.join(MODES)}")
        self._directory = pathlib.Path(run_directory).absolute()
        self._close_seconds = close_seconds
        self._lock = threading.Lock()
        self._closed = mode in ("disabled", "off")
        self._ended = threading.Event()
        self._abandoned = False
        self._said = False
        self._process: subprocess.Popen | None = None
        self._location: str | None = None
        self._sync: str | None = None
        # Unbounded, so that the end of it always fits; `_put` keeps it small.
        self._waiting: queue.SimpleQueue = queue.SimpleQueue()
        if self._closed:
            return
        self._waiting.put(
            {
                "directory": str(self._directory),
                "mode": mode,
                "project": project or os.environ.get("WANDB_PROJECT") or "kdist",
                "group": group,
                "job_type": job_type,
                "name": name or self._directory.name,
                "config": finite(dict(config or {})),
                "program": sys.argv[0],
                "answer_seconds": _ANSWER_SECONDS,
                "watch_seconds": _WATCH_SECONDS,
                "close_seconds": close_seconds,
            }
        )
        threading.Thread(target=self._send, name="kdist-wandb", daemon=True).start()

    @property
    def location(self) -> str | None:
        """The run's web address, or its directory if it is offline; None until it is known."""
        return self._location

    def write(self, record: Mapping[str, Any]):
        """Hands on the numbers of a record, as `<kind>/<name>`."""
        self._put({"do": "write", "record": dict(record)})

    def write_device(self, record: Mapping[str, Any]):
        """Hands on what a device did, as `<device kind>/<host>/<index>/<metric>`."""
        self._put({"do": "write_device", "record": dict(record)})

    def write_summary(self, summary: Mapping[str, Any]):
        """Hands on all of it."""
        self._put({"do": "write_summary", "summary": dict(summary)}, always=True)

    def write_report(self, path: str | os.PathLike):
        """Adds the page to the run, as an artifact of type "report"."""
        self._put({"do": "write_report", "path": os.path.abspath(path)}, always=True)

    def close(self):
        """Ends the run, and waits for it no longer than `close_seconds`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._waiting.put({"do": "finish"})
        self._waiting.put(None)
        if not self._ended.wait(self._close_seconds):
            self._abandoned = True
            self._end_processes()
            self._say(f"not everything was taken within {self._close_seconds:g} s; {self._remedy}")

    def _put(self, item, always=False):
        if self._closed or self._ended.is_set():
            return
        if not always and self._waiting.qsize() >= _MOST_WAITING:
            all_of_it = f"all are in {self._directory}"
            self._say(f"it is too slow, some records are left out ({all_of_it}); {self._remedy}")
            return
        self._waiting.put(item)

    def _send(self):
        """Runs in a thread: starts the process and hands it a line for each item."""
        try:
            self._process = self._start()
        except OSError as error:
            self._say(f"its process cannot be started ({error}); the run goes on without")
            self._ended.set()
            return
        threading.Thread(target=self._listen, name="kdist-wandb-answers", daemon=True).start()
        try:
            with self._process.stdin as pipe:
                for item in iter(self._waiting.get, None):
                    pipe.write(json.dumps(finite(item), default=str).encode() + b"\n")
                    pipe.flush()
        except OSError:
            pass  # The process has ended, which `_listen` says.
        except (TypeError, ValueError) as error:
            self._say(f"a record that JSON cannot hold ({error}); the run goes on without")

    def _start(self):
        files = self._directory / "wandb"
        files.mkdir(parents=True, exist_ok=True)
        # kdist is that of this process, whatever the working directory is.
        package = str(pathlib.Path(kdist.__file__).parents[1])
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        environment = {
            # Reports of crashes and of use, which wandb would post to its makers.
            "WANDB_ERROR_REPORTING": "false",
            # Otherwise in the user's home.
            "WANDB_CACHE_DIR": str(files / "cache"),
            "WANDB_DATA_DIR": str(files / "data"),
            **os.environ,
            "WANDB_SILENT": "true",
            "PYTHONPATH": path,
        }
        # Of another run in this process; ours is to end with our process.
        environment.pop("WANDB_SERVICE", None)
        with open(files / "process.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # Ctrl-C in a terminal is for training, which then closes this in order.
                start_new_session=True,
            )

    def _listen(self):
        """Runs in a thread: says what the process has to say, until it ends."""
        finished = False
        try:
            with self._process.stdout as answers:
                for line in answers:
                    finished = self._hear(json.loads(line)) or finished
        except (OSError, ValueError):
            pass  # It was ended in the middle of a line.
        code = self._process.wait()
        if not finished and not self._abandoned:
            log = self._directory / "wandb" / "process.log"
            self._say(f"its process ended with code {code} (see {log}); {self._remedy}")
        self._ended.set()

    def _hear(self, answer):
        """Whether it says that it has finished."""
        if "location" in answer:
            self._location = answer["location"]
            # W&B leaves out what has been online, unless told.
            online = ["--include-online"] if answer["online"] else []
            self._sync = shlex.join(["wandb", "sync", *online, answer["files"]])
            self._print(self._where(answer))
        elif "problem" in answer:
            self._say(f"{answer['problem']}; {self._remedy}")
        return "finished" in answer

    def _where(self, answer):
        if answer["online"]:
            return answer["location"]
        reason = f"{answer['reason']}; " if answer["reason"] else ""
        return f"{reason}offline; to send it: {self._sync}"

    @property
    def _remedy(self):
        if self._sync is None:
            return f"the run goes on without; all is in {self._directory}"
        return f"training is not concerned; afterwards: {self._sync}"

    def _say(self, problem):
        """Once: what follows from a problem is no news."""
        with self._lock:
            said, self._said = self._said, True
        if not said:
            self._print(problem)

    def _print(self, text):
        print(f"kdist: W&B: {text}", file=sys.stderr, flush=True)

    def _end_processes(self):
        """Ends our process and wandb's, which is its child in a session of its own."""
        if self._process is None:
            return
        try:
            ours = psutil.Process(self._process.pid)
            everyone = [*ours.children(recursive=True), ours]
        except psutil.NoSuchProcess:
            return
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
