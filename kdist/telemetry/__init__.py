"""Measurements of a training run, and the writers that store them.

Example:

    run = kdist.run_directory.RunDirectory("runs/first")
    writer = create_writer(run, is_chief=True, wandb_mode="auto", tensorboard=True)
    model.fit(..., callbacks=[kdist.callbacks.Telemetry(run, writer=writer)])
    writer.write_summary(summary)
    writer.close()

Public names are imported on demand. None of them imports wandb or mlflow, and only
TensorBoard's writer and `Telemetry` import TensorFlow.
"""

from kdist.public_names import import_on_demand

# Public name -> the module that holds it.
_PUBLIC = {
    "Collector": "devices.collector",
    "DeviceSampler": "devices.sampler",
    "JsonlWriter": "writers.run_directory",
    "MlflowWriter": "writers.mlflow",
    "NullWriter": "writers",
    "RunWriter": "writers.run_directory",
    "Samples": "samples",
    "SeveralWriters": "writers",
    "WandbWriter": "writers.wandb",
    "Writer": "writers",
    "collector_of": "devices.collector",
    "create_writer": "writers",
    "metric_curves": "writers",
}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return __all__
