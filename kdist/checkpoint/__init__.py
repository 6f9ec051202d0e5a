"""Everything needed to go on as if nothing had happened.

saved = kdist.checkpoint.CheckpointFiles("runs/first/checkpoints").newest()
saved.step, saved.state["position"], saved.tensors()

They are written, and gone on from, by `kdist.callbacks.Checkpoint`.
"""

from kdist.checkpoint.files import CheckpointError, CheckpointFiles, Saved, opened

__all__ = ["CheckpointError", "CheckpointFiles", "Saved", "opened"]
