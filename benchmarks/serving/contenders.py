"""kdist's server and its rivals: commands, protocols, and settings."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Sequence

from benchmarks.serving.servers import Command

OURS = "kdist"
_PACKAGE = "benchmarks.serving.rivals"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options that all servers of a session share.

    Attributes:
        max_batch: rows of the largest batch.
        program: `scripts/serve.py` of a checkout.
        workers: worker processes of kdist's server.
        rivals: directory of the rivals' environments.
    """

    max_batch: int
    program: str
    workers: int
    rivals: pathlib.Path


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """Server that takes part in a comparison.

    Attributes:
        title: name in tables.
        dialect: of `benchmarks.serving.dialects`.
        path: of the URL that predicts; "{model}" stands for the model's name.
        command: from interpreter, setting, directory of the model and options.
        environment: of `benchmarks.serving.environments`; None for this interpreter's.
        imports: a package that it needs there.
        settings: that are tried; the best takes part.
        unit: of the settings, with a blank before it.
        is_rival: whether ours has to be faster.
    """

    title: str
    dialect: str
    path: str
    command: Callable[[str, str, pathlib.Path, Options], Command]
    environment: str | None = None
    imports: str = "tensorflow"
    settings: Sequence[str] = ("",)
    unit: str = ""
    is_rival: bool = False

    def said(self, setting: str) -> str:
        """Returns the title with a setting."""
        return f"{self.title}, {setting}{self.unit}" if setting else self.title


def _ours(*flags):
    def command(python, setting, directory, options):
        given = flags or (
            f"--batch_timeout_us={setting}",
            f"--max_batch={options.max_batch}",
            f"--workers={options.workers}",
        )
        ports = ("--port={port}", "--grpc_port={grpc_port}")
        return Command(
            [python, options.program, f"--model_dir={directory}", *ports, *given], "/readyz"
        )

    return command


def _unbatched(python, setting, directory, options):
    return Command([python, "-m", f"{_PACKAGE}.unbatched", str(directory), "{port}"], "/readyz")


def _ray(python, setting, directory, options):
    line = [python, "-m", f"{_PACKAGE}.ray_serve", str(directory), "{port}"]
    environment = {"RAY_USAGE_STATS_ENABLED": "0"}
    return Command([*line, _seconds(setting), str(options.max_batch)], "/", environment)


def _mlserver(python, setting, directory, options):
    environment = {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": "{port}",
        "MLSERVER_GRPC_PORT": "{grpc_port}",
        "MLSERVER_METRICS_PORT": "{other_port}",
        "MLSERVER_PARALLEL_WORKERS": "0",
        "MLSERVER_DEBUG": "False",
        "MLSERVER_MODEL_NAME": "model",
        "MLSERVER_MODEL_IMPLEMENTATION": f"{_PACKAGE}.mlserver_runtime.Runtime",
        "MLSERVER_MODEL_URI": str(directory),
        "MLSERVER_MODEL_MAX_BATCH_SIZE": str(options.max_batch),
        "MLSERVER_MODEL_MAX_BATCH_TIME": _seconds(setting),
    }
    program = pathlib.Path(python).with_name("mlserver")
    return Command([str(program), "start", str(directory)], "/v2/health/ready", environment)


def _bentoml(python, setting, directory, options):
    service = f"{_PACKAGE}.bentoml_service:Model"
    environment = {
        "KDIST_MODEL": str(directory),
        "KDIST_MAX_BATCH": str(options.max_batch),
        "KDIST_MAX_LATENCY_MS": setting,
        "BENTOML_DO_NOT_TRACK": "True",
        "BENTOML_HOME": str(options.rivals / "bentoml_home"),
    }
    line = [python, "-m", "bentoml", "serve", service, "--host", "127.0.0.1", "--port", "{port}"]
    return Command(line, "/readyz", environment)


def _seconds(milliseconds):
    return str(float(milliseconds) / 1e3)


_REST = "/v1/models/{model}:predict"

CONTENDERS = {
    OURS: Contender("kdist", "rest", _REST, _ours(), settings=["auto"]),
    "kdist_grpc": Contender("kdist, gRPC", "grpc", "", _ours(), settings=["auto"]),
    "kdist_single": Contender(
        "kdist, batches of one", "rest", _REST, _ours("--max_batch=1", "--batch_timeout_us=0")
    ),
    "unbatched": Contender("unbatched", "rest", "/predict", _unbatched),
    "ray": Contender(
        "Ray Serve", "rest", "/", _ray, None, "ray.serve", ["2", "5"], " ms", is_rival=True
    ),
    "mlserver": Contender(
        *("MLServer", "v2", "/v2/models/model/infer", _mlserver, "mlserver", "mlserver"),
        *(["2", "5"], " ms"),
        is_rival=True,
    ),
    "bentoml": Contender(
        *("BentoML", "rows", "/predict", _bentoml, "bentoml", "bentoml"),
        *(["100", "1000", "60000"], " ms at most"),
        is_rival=True,
    ),
}


def with_timeout(contender: Contender, timeout_us: str) -> Contender:
    """Returns kdist's server with another `--batch_timeout_us`."""
    return dataclasses.replace(contender, settings=[timeout_us])


def this_python() -> str:
    """Returns the interpreter of servers that need no separate environment."""
    return sys.executable
