"""Model files at the end of each epoch, written atomically."""

import contextlib
import logging
import math
import os
import pathlib

import keras

from kdist.telemetry import JsonlWriter
from kdist.training.state import training_state_of

_logger = logging.getLogger(__name__)

_UNFINISHED = "unfinished-epoch-"


class EpochCheckpoint(keras.callbacks.Callback):
    """Saves the model with its optimizer after each epoch, as `epoch-0001.keras` and so on.

    The state before the first step is `epoch-0000.keras`. A file is complete as soon as it has its
    name. A model with a NaN or infinite loss is not saved. A file that cannot be written, as on a
    full disk, is logged, and training continues.

    Args:
        directory: directory of the files; created if missing.
        keep: number of newest files to keep. Defaults to 2.

    Raises:
        ValueError: `keep` is less than 1.

    Example:

        model.fit(train, epochs=3, callbacks=[kdist.callbacks.EpochCheckpoint("runs/a/models")])
        model = keras.saving.load_model("runs/a/models/epoch-0003.keras")
    """

    # With several workers, only the chief runs this callback.
    only_writes = saves_models = True

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        super().__init__()
        if keep < 1:
            raise ValueError(f"EpochCheckpoint: keep={keep} must be at least 1")
        self._directory = pathlib.Path(directory)
        self._keep = keep

    def newest(self) -> pathlib.Path | None:
        """Returns the newest complete file, or None."""
        return next(reversed(self._files()), None)

    def written(self) -> list[tuple[int, pathlib.Path]]:
        """Returns (epoch, file) of all complete files."""
        return [(_epoch(file), file) for file in self._files()]

    def note_evaluation(self, epoch: int, results: dict[str, float]):
        """Appends results to `evaluations.jsonl` in the same directory, and logs them."""
        self._directory.mkdir(parents=True, exist_ok=True)
        writer = JsonlWriter(self._directory / "evaluations.jsonl")
        writer.write({"epoch": epoch, **results})
        writer.close()
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        _logger.info("epoch %d: %s", epoch, numbers)

    def on_train_begin(self, logs=None):
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"{_UNFINISHED}*"):  # by a process that was killed
            _remove(left)
        written, state = self.written(), training_state_of(self.model)
        if not written:
            self._save(0)
        elif state and state.position.step == 0 and state.position.epoch > written[-1][0]:
            # A resumed training, whose disk was full after it had written its checkpoint.
            self._save(state.position.epoch)

    def on_epoch_end(self, epoch, logs=None):
        if math.isfinite((logs or {}).get("loss", 0.0)):
            self._save(epoch + 1)

    def _files(self):
        """Returns the complete files, the oldest first."""
        found = self._directory.glob("epoch-*.keras")
        return sorted((f for f in found if _epoch(f) is not None and f.is_file()), key=_epoch)

    def _save(self, epoch):
        target = self._directory / f"epoch-{epoch:04d}.keras"
        unfinished = self._directory / f"{_UNFINISHED}{epoch:04d}.keras"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)  # it may have been deleted
            self.model.save(unfinished)
            os.replace(unfinished, target)
        except (OSError, RuntimeError) as error:  # HDF5 reports a full disk by a RuntimeError, too
            _logger.warning(
                "cannot write %s (%s); training continues, and the next epoch's model will be "
                "tried. Free disk space, or use another directory",
                target,
                error,
            )
            _remove(unfinished)
            return
        for old in self._files()[: -self._keep]:
            _remove(old)


def _epoch(file):
    """Returns the epoch of a file such as epoch-0003.keras; None for other names."""
    number = file.stem.removeprefix("epoch-")
    return int(number) if number.isdecimal() else None


def _remove(file):
    """Removes a file; what cannot be removed ends no training."""
    with contextlib.suppress(OSError):
        file.unlink()
