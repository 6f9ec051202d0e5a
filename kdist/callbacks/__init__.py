"""Keras callbacks for `fit(callbacks=[...])`, one per file; they also work with plain Keras models.

callbacks = [
    kdist.callbacks.Telemetry("runs/first"),
    kdist.callbacks.StopOnNonFiniteLoss(),
    kdist.callbacks.EpochCheckpoint("runs/first/checkpoints"),
]

Names are imported on first use.
"""

from kdist.public_names import import_on_demand

_PUBLIC = {
    "AveragedWeights": "averaged_weights",
    "Checkpoint": "checkpoint",
    "EpochCheckpoint": "epoch_checkpoint",
    "EpochSeconds": "epoch_seconds",
    "LearningRateRange": "learning_rate_range",
    "NonFiniteLossError": "stop_on_nonfinite_loss",
    "Profile": "profile",
    "PruneTrial": "prune_trial",
    "StopOnNonFiniteLoss": "stop_on_nonfinite_loss",
    "Telemetry": "telemetry",
    "Unfreeze": "unfreeze",
}

__all__ = sorted(_PUBLIC)


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return sorted(__all__)
