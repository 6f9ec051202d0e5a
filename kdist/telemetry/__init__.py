"""What is measured, and where it goes: into the run directory, to W&B, to TensorBoard.

run = RunDirectory("runs/first")
writer = create_writer(run, is_chief=True, wandb_mode="auto", tensorboard=True)
model.fit(..., callbacks=[kdist.callbacks.Telemetry(run, writer=writer)])
writer.write_summary(summary)
writer.close()

`DeviceSampler` samples this task's devices; `collector_of` gives the collector of those of all of a
job's tasks.

Importing it imports neither TensorFlow nor wandb.
"""

from collections.abc import Mapping
from typing import Any

from kdist.run_directory import RunDirectory
from kdist.telemetry.collector import Collector, collector_of
from kdist.telemetry.jsonl import JsonlWriter
from kdist.telemetry.null import NullWriter
from kdist.telemetry.run import RunWriter
from kdist.telemetry.sampler import DeviceSampler
from kdist.telemetry.several import SeveralWriters
from kdist.telemetry.wandb import WandbWriter
from kdist.telemetry.writer import Writer

__all__ = [
    "Collector",
    "DeviceSampler",
    "JsonlWriter",
    "NullWriter",
    "RunWriter",
    "SeveralWriters",
    "WandbWriter",
    "Writer",
    "collector_of",
    "create_writer",
]


def create_writer(
    run: RunDirectory,
    *,
    is_chief: bool,
    wandb_mode: str = "off",
    tensorboard: bool = False,
    config: Mapping[str, Any] | None = None,
    project: str | None = None,
    group: str | None = None,
    job_type: str | None = None,
    name: str | None = None,
) -> Writer:
    """The writer that a run asks for: the run directory always, and what else is wanted.

    Args:
        run: where everything goes first.
        is_chief: whether this is the task that writes; the others get a `NullWriter`.
        wandb_mode: auto, online, offline, disabled or off; see `WandbWriter`. Defaults to off.
        tensorboard: whether to write curves for TensorBoard to `<run>/tensorboard/`.
        config: what the run was asked to do, for W&B.
        project: as `group`, `job_type` and `name`, for W&B; see `WandbWriter`.

    Raises:
        ValueError: there is no such `wandb_mode`.
    """
    if not is_chief:
        return NullWriter()
    writers: list[Writer] = [RunWriter(run)]
    if wandb_mode not in ("off", "disabled"):
        writers.append(
            WandbWriter(
                run.path,
                wandb_mode,
                project=project,
                group=group,
                job_type=job_type,
                name=name,
                config=config,
            )
        )
    if tensorboard:
        from kdist.telemetry.tensorboard import TensorBoardWriter  # imports TensorFlow

        writers.append(TensorBoardWriter(run.path / "tensorboard"))
    return writers[0] if len(writers) == 1 else SeveralWriters(writers)
