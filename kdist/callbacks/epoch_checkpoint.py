"""Saves the model at the end of each epoch, whole or not at all."""

import math
import os
import pathlib

import keras

from kdist.telemetry import JsonlWriter


class EpochCheckpoint(keras.callbacks.Callback):
    """Writes `epoch-0001.keras` and so on: the model with its optimizer, a file an epoch.

    A file appears under its name only when it is complete. The state before the first step is
    `epoch-0000.keras`. A model whose loss is not a number is not saved.

    Args:
        directory: where to; made if it is not there.
        keep: how many of the newest files stay. Defaults to 2.

    Raises:
        ValueError: `keep` is smaller than 1.
    """

    # With several workers, the chief does it.
    only_writes = True

    def __init__(self, directory: str | os.PathLike, keep: int = 2):
        super().__init__()
        if keep < 1:
            raise ValueError(f"EpochCheckpoint(keep={keep}): keep at least 1 file")
        self._directory = pathlib.Path(directory)
        self._keep = keep

    def newest(self) -> pathlib.Path | None:
        """The last file that was completed, if any."""
        return max(self._files(), default=None)

    def written(self) -> list[tuple[int, pathlib.Path]]:
        """(epoch, file) of all files that are complete."""
        return [(int(file.stem.removeprefix("epoch-")), file) for file in self._files()]

    def note_evaluation(self, epoch: int, results: dict[str, float]):
        """Adds a line to `evaluations.jsonl`, beside the files, and says it."""
        self._directory.mkdir(parents=True, exist_ok=True)
        writer = JsonlWriter(self._directory / "evaluations.jsonl")
        writer.write({"epoch": epoch, **results})
        writer.close()
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in results.items())
        print(f"epoch {epoch}: {numbers}", flush=True)

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
