"""Saves a view of a W&B project, with panels for what kdist logs.

    pip install wandb-workspaces
    wandb login
    python wandb_workspace.py ENTITY/PROJECT

The table of runs has settings, accuracy, and speed as columns. Panels show progress, the learning
rate, the time of a step, sample predictions, and each GPU.
"""

import argparse

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

_COLUMNS = (
    *("model", "dataset", "strategy", "global_batch_size", "precision", "epochs"),
    *("test_accuracy", "test_loss", "seconds_per_epoch", "examples_per_second", "goodput"),
)


def workspace(entity: str, project: str) -> ws.Workspace:
    """Returns the view, which is not saved yet.

    Args:
        entity: user or team in W&B.
        project: project of the runs.
    """
    progress = [
        _curves("Loss", ["train/loss", "epoch/val_loss"]),
        _curves("Accuracy", ["train/accuracy", "epoch/val_accuracy"]),
        _curves("Learning rate", ["learning_rate"]),
        wr.WeavePanelSummaryTable(table_name="samples"),
    ]
    shares = ("input_share", "callback_share", "compute_share", "reduce_share", "step_share")
    speed = [
        _curves("Examples per second", ["timing/examples_per_second"]),
        _curves("Seconds per step", [f"timing/step_seconds_p{p}" for p in (50, 90, 99)]),
        _curves("Fractions of a step", [f"timing/{share}" for share in shares]),
    ]
    # Numbers of GPUs, and of hosts such as node1, are in the names of curves.
    gpus = [
        _of_gpus("GPU utilization", "utilization"),
        _of_gpus("GPU time spent accessing memory", "memory_utilization"),
        _of_gpus("GPU memory in use (bytes)", "memory_used_bytes"),
        _of_gpus("GPU power (W)", "power_watts"),
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name="kdist",
        sections=[
            ws.Section(name="Progress", panels=progress, is_open=True),
            ws.Section(name="Speed", panels=speed, is_open=True),
            ws.Section(name="GPUs", panels=gpus, is_open=True),
            ws.Section(name="Runs", panels=[wr.RunComparer(diff_only="split")]),
        ],
        settings=ws.WorkspaceSettings(x_axis="examples"),
        runset_settings=ws.RunsetSettings(pinned_columns=[f"summary:{name}" for name in _COLUMNS]),
    )


def _curves(title, names):
    return wr.LinePlot(title=title, x="examples", y=names)


def _of_gpus(title, metric):
    return wr.LinePlot(title=title, x="seconds", metric_regex=f"^gpu/.*/{metric}$")


def main():
    """Saves the view, and prints its address."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("project", help="ENTITY/PROJECT, such as me/kdist")
    entity, separator, project = parser.parse_args().project.partition("/")
    if not (entity and separator and project):
        parser.error("give ENTITY/PROJECT, such as me/kdist")
    print(workspace(entity, project).save().url)


if __name__ == "__main__":
    main()
