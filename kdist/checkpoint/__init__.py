"""Checkpoints of a training run: all state that an exact resume needs.

saved = kdist.checkpoint.CheckpointFiles("runs/first/checkpoints").newest()
saved.step, saved.state["position"], saved.tensors()

`kdist.callbacks.Checkpoint` writes them and resumes from them.
"""

from kdist.public_names import import_on_demand

# Public name -> the module that defines it.
_PUBLIC = {
    "CheckpointError": "files",
    "CheckpointFiles": "files",
    "SavedCheckpoint": "files",
    "open_checkpoint": "files",
}
# Deprecated name -> the public name that replaces it.
_RENAMED = {"Saved": "SavedCheckpoint", "opened": "open_checkpoint"}

__all__ = sorted(_PUBLIC)

__getattr__ = import_on_demand(__name__, _PUBLIC, _RENAMED)


def __dir__():
    return __all__
