"""Main loop of the process that communicates with a tracking server; `TrackerWriter` starts it.

It reads JSON objects from its standard input: first the settings of the run, then commands. Its
answers on standard output are where the run is, problems, and that the run has finished.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil


def serve(open_run: Callable[[dict[str, Any], Callable[..., None]], Any]):
    """Opens a run, executes commands until the input ends, and finishes the run.

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
        with lock:
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
