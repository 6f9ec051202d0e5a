"""Keras callbacks, one a file; they go into `fit(callbacks=[...])` of any Keras model.

callbacks = [
    kdist.callbacks.Telemetry("runs/first"),
    kdist.callbacks.StopOnNonFiniteLoss(),
    kdist.callbacks.EpochCheckpoint("runs/first/checkpoints"),
]
"""

from kdist.callbacks.checkpoint import Checkpoint
from kdist.callbacks.epoch_checkpoint import EpochCheckpoint
from kdist.callbacks.epoch_seconds import EpochSeconds
from kdist.callbacks.profile import Profile
from kdist.callbacks.stop_on_nonfinite_loss import NonFiniteLossError, StopOnNonFiniteLoss
from kdist.callbacks.telemetry import Telemetry

__all__ = [
    "Checkpoint",
    "EpochCheckpoint",
    "EpochSeconds",
    "NonFiniteLossError",
    "Profile",
    "StopOnNonFiniteLoss",
    "Telemetry",
]
