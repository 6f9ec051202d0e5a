"""Settings that `kdist tune` found for a training: a file for `kdist train` and `create_strategy`.

Imports no TensorFlow.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

from kdist.hardware import count_cores, find_gpus
from kdist.json_text import parse_json
from kdist.layout import Layout
from kdist.run_directory import write_text

# Flags of `kdist train` that a file may set, with the types of their values.
FLAG_TYPES: dict[str, type] = {
    "strategy": str,
    "layout": str,
    "num_devices": int,
    "devices": list,
    "shard": str,
    "reduction": str,
    "num_packs": int,
    "local_batch_size": int,
    "accumulate": int,
    "scale_learning_rate": str,
    "base_batch_size": int,
    "precision": str,
    "jit_compile": bool,
    "steps_per_execution": str,
    "intra_op_threads": int,
    "parallel_calls": int,
}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Fast settings of a training on one machine, as `kdist tune --output` writes them.

    Args:
        settings: values of flags of `kdist train`, such as `{"jit_compile": True}`.
        gain: measured speed, divided by that before. Defaults to 1.
        interval: 95 % confidence interval of the gain. Defaults to None, unknown.
        model: name of the model. Defaults to `""`.
        machine: cores and GPUs of the machine. Defaults to `""`.
        replicas: number of replicas. Defaults to 1.
        examples_per_second: measured rate with these settings, of all replicas together. Defaults
            to None, unknown.

    Raises:
        ValueError: If a setting is unknown, or its value has another type.

    Example:

        tuned = kdist.tuning.Tuned.load("tuned.json")
        strategy = kdist.create_strategy(tuned)
        local, micro_steps = tuned.settings["local_batch_size"], tuned.settings.get("accumulate", 1)
        batch = kdist.Batch(local, strategy.num_replicas_in_sync, micro_steps)
        train, test = kdist.data.load("digits", batch=batch, **tuned.data_options)
        ...
        model.compile("adam", "sparse_categorical_crossentropy", **tuned.compile_options)
    """

    settings: dict[str, Any]
    gain: float = 1.0
    interval: tuple[float, float] | None = None
    model: str = ""
    machine: str = ""
    replicas: int = 1
    examples_per_second: float | None = None

    def __post_init__(self):
        for name, value in self.settings.items():
            if name not in FLAG_TYPES:
                raise ValueError(f"unknown setting {name!r}; known are {', '.join(FLAG_TYPES)}")
            if type(value) is not FLAG_TYPES[name]:
                raise ValueError(f"{name} is {FLAG_TYPES[name].__name__}, not {value!r}")

    @property
    def compile_options(self) -> dict[str, Any]:
        """Arguments of `model.compile` among the settings."""
        names = ("jit_compile", "steps_per_execution", "accumulate")
        options = {name: self.settings[name] for name in names if name in self.settings}
        if options.get("steps_per_execution", "auto") != "auto":
            options["steps_per_execution"] = int(options["steps_per_execution"])
        return options

    @property
    def data_options(self) -> dict[str, Any]:
        """Arguments of `kdist.data.load` and `kdist.data.Pipeline` among the settings."""
        names = ("parallel_calls",)
        return {name: self.settings[name] for name in names if name in self.settings}

    @property
    def strategy_options(self) -> dict[str, Any]:
        """Arguments of `kdist.create_strategy` among the settings."""
        given = self.settings
        names = ("reduction", "num_packs", "shard", "intra_op_threads")
        options = {name: given[name] for name in names if name in given}
        devices = given.get("num_devices", given.get("devices"))
        layout = Layout.parse(given["layout"]) if "layout" in given else None
        return {"name": layout or given.get("strategy", "auto"), "devices": devices, **options}

    def differences(self, model: str, machine: str) -> list[str]:
        """Returns how a training differs from the one that was tuned; nothing if unknown.

        Args:
            model: name of the model.
            machine: the machine, as `this_machine` describes it.
        """
        pairs = [("the model ", self.model, model), ("a machine with ", self.machine, machine)]
        return [f"{what}{tuned}, not {now}" for what, tuned, now in pairs if tuned not in ("", now)]

    def save(self, path: str | os.PathLike):
        """Writes the settings as JSON and replaces an existing file."""
        write_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Tuned":
        """Returns the settings that `save` wrote.

        Raises:
            FileNotFoundError: If there is no such file.
            ValueError: If the file holds no such settings.
        """
        try:
            fields = dict(parse_json(pathlib.Path(path).read_text()))
            if fields.get("interval") is not None:
                fields["interval"] = tuple(fields["interval"])
            return cls(**fields)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{os.fspath(path)} holds no tuned settings ({error}); write them with kdist tune "
                "--output"
            ) from None


def this_machine() -> str:
    """Returns the cores and GPUs of this machine, such as `"2 cores, 0 GPUs"`."""
    return f"{count_cores(os.environ)} cores, {len(find_gpus(os.environ))} GPUs"
