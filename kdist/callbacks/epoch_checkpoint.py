"""Model files at the end of each epoch, written atomically."""

import logging
import math
import os
import pathlib

import keras

from kdist.telemetry import JsonlWriter

_logger = logging.getLogger(__name__)


class EpochCheckpoint(keras.callbacks.Callback):
    """Saves the model with its optimizer after each epoch, as `epoch-0001.keras` and so on.

    The state before the first step is `epoch-0000.keras`. A file is complete as soon as it has its
    name. A model with a NaN or infinite loss is not saved.

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
    only_writes = True

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        super().__init__()
        if keep < 1:
            raise ValueError(f"EpochCheckpoint: keep={keep} must be at least 1")
        self._directory = pathlib.Path(directory)
        self._keep = keep

    def newest(self) -> pathlib.Path | None:
        """Returns the newest complete file, or None."""
        return max(self._files(), default=None)

    def written(self) -> list[tuple[int, pathlib.Path]]:
        """Returns (epoch, file) of all complete files."""
        return [(int(file.stem.removeprefix("epoch-")), file) for file in self._files()]

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
        if self.newest() is None:
            self._save(0)

    def on_epoch_end(self, epoch, logs=None):
        if math.isfinite((logs or {}).get("loss", 0.0)):
            self._save(epoch + 1)

    def _files(self):
        return sorted(self._directory.glob("epoch-*.keras"))

    def _save(self, epoch):
        target = self._directory / f"epoch-{epoch:04d}.keras"
        unfinished = target.with_name(f"unfinished-{target.name}")
        self.model.save(unfinished)
        os.replace(unfinished, target)
        for old in self._files()[: -self._keep]:
            old.unlink()
