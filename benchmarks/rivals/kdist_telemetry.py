"""kdist's `fit` with one destination of measurements, or with checkpoints.

The workload's `telemetry` selects the destination:
  off        none
  checkpoint none; a checkpoint is written, starting in the middle of the steps
  mirror     the same, and copied to a store that takes half a second for each file
  run        the run directory
  offline    the run directory and W&B, offline
  healthy    the same with W&B online, at a stand-in for its server in a process of its own
  frozen, refusing, dead   the same, with a server that is in this state when the clock starts
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time

from benchmarks.measuring import ROOT
from benchmarks.rivals import workload

STUB = ROOT / "tests" / "telemetry" / "wandb_stub.py"

# W&B's process starts during the first training; the clock starts when it is ready.
START_SECONDS = 60.0


class Server:
    """Stand-in for W&B's server."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, STUB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.url = self._process.stdout.readline().strip()

    def become(self, mode: str):
        """Changes how the server answers from now on."""
        self._process.stdin.write(f"{mode}\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def end(self):
        """Ends its process."""
        self._process.kill()
        self._process.wait()


def wait_for(writer):
    """Waits until W&B has created a run.

    Raises:
        RuntimeError: it has none after START_SECONDS.
    """
    deadline = time.monotonic() + START_SECONDS
    while writer.location is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"wandb has created no run in {START_SECONDS:.0f} s")
        time.sleep(0.1)


def main():
    """Times the workload."""
    given = workload.read()

    import kdist
    from benchmarks.rivals import tensorflow_parts as parts
    from kdist.run_directory import RunDirectory
    from kdist.telemetry import RunWriter, SeveralWriters, WandbWriter
    from tests.faults.slow_store import slow_url

    with contextlib.ExitStack() as ends:
        directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        run = RunDirectory(ends.enter_context(directory))
        callbacks, between = [], lambda: None
        if given.telemetry in ("checkpoint", "mirror"):
            mirror = None
            if given.telemetry == "mirror":
                store = ends.enter_context(tempfile.TemporaryDirectory())
                mirror = ends.enter_context(kdist.mirror.Mirror(slow_url(store), run.path))
            # The checkpoint is written in the background during the remaining steps.
            middle = given.steps // 2 + 1
            callbacks = [
                kdist.callbacks.Checkpoint(run.checkpoints, every_steps=middle, mirror=mirror)
            ]
        elif given.telemetry != "off":
            writers = [RunWriter(run)]
            if given.telemetry != "run":
                online = given.telemetry != "offline"
                if online:
                    server = Server()
                    ends.callback(server.end)
                    os.environ |= {
                        "WANDB_BASE_URL": server.url,
                        "WANDB_API_KEY": "0" * 40,
                        "NO_PROXY": "127.0.0.1",
                        "no_proxy": "127.0.0.1",
                    }
                # The time to end is not measured.
                mode = "online" if online else "offline"
                wandb = WandbWriter(run.path, mode, close_seconds=3.0)
                writers.append(wandb)

                def between():
                    wait_for(wandb)
                    if online != wandb.location.startswith("http"):
                        raise RuntimeError(f"the run is at {wandb.location}, not {mode}")
                    if online:
                        server.become(given.telemetry)

            writer = SeveralWriters(writers)
            ends.callback(writer.close)
            callbacks = [kdist.callbacks.Telemetry(run, writer=writer)]
        with kdist.create_strategy("mirrored", given.replicas).scope():
            model = parts.new_model(given)
        parts.time_fit(given, model, callbacks, between)
        if given.telemetry == "mirror":
            written = mirror.checkpoints()
        elif given.telemetry == "checkpoint":
            written = list(run.checkpoints.glob("step-*"))
        else:
            written = not callbacks or '"epoch"' in run.metrics.read_text()
        if not written:
            raise RuntimeError("nothing was written")


if __name__ == "__main__":
    main()
