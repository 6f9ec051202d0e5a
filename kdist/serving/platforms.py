"""Hosting platforms, and what each asks of a server: its address, its routes, and its time to end.

    platform = kdist.serving.find_platform()  # by the environment; None outside of a platform
    options = kdist.serving.ServerOptions(models, **(platform.options() if platform else {}))

The contracts:

- SageMaker: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html and
  https://github.com/aws/sagemaker-tensorflow-serving-container
- Vertex AI: https://cloud.google.com/vertex-ai/docs/predictions/custom-container-requirements
- KServe: https://kserve.github.io/website/docs/concepts/architecture/data-plane
- Cloud Run: https://cloud.google.com/run/docs/container-contract

Imports no TensorFlow.
"""

import dataclasses
import logging
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kdist.mirror.store import Store, is_url
from kdist.serving.core.model_directory import SAVED_MODEL
from kdist.serving.core.settings import ServerLimits

_logger = logging.getLogger(__name__)
_HTTP_PORT = 8080  # default of all platforms
_SAGEMAKER_MODELS, _KSERVE_MODELS = "opt/ml/model", "mnt/models"
# SageMaker sets these for endpoints, and others for notebooks and jobs as well.
_SAGEMAKER_VARIABLES = re.compile("SAGEMAKER_(BIND_TO_PORT|SAFE_PORT_RANGE|MULTI_MODEL|TFS_.*)")
_ROUTE = re.compile(r"/[\w./:@~%+-]*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Platform:
    """Contract of one hosting platform.

    Example:

        platform = kdist.serving.find_platform("cloud_run")
        options = kdist.serving.ServerOptions({"m": "models/m"}, **platform.options())

    Attributes:
        name: one of `PLATFORMS`.
        port: port for REST.
        grpc_port: port for gRPC; None if the platform forwards no gRPC to a second port.
        end_seconds: seconds for requests to finish after SIGTERM. Closing the models takes up to 2
            more, and the platform kills the process after that.
        body_bytes: largest request that the platform forwards; None if kdist's default is lower.
        health_route: path that reports whether the server is ready. Defaults to none.
        predict_route: path of predictions of the first model. Defaults to none.
        model_directories: directories in which the platform puts models.
        model_url: URL of a directory in which the platform keeps the model. Defaults to none.
        first_model: name of the model for requests that name none. Defaults to the first one.
    """

    name: str
    port: int = _HTTP_PORT
    grpc_port: int | None = None
    end_seconds: float = 25.0
    body_bytes: int | None = None
    health_route: str | None = None
    predict_route: str | None = None
    model_directories: Sequence[str] = ()
    model_url: str | None = None
    first_model: str | None = None

    def options(self) -> dict[str, Any]:
        """Returns arguments of `ServerOptions`. The server listens on all addresses."""
        limits = {} if self.body_bytes is None else {"body_bytes": self.body_bytes}
        return {
            "platform": self,
            "host": "0.0.0.0",
            "port": self.port,
            "grpc_port": self.grpc_port,
            "end_seconds": self.end_seconds,
            "limits": ServerLimits(**limits),
        }


def find_platform(
    name: str = "auto", environment: Mapping[str, str] = os.environ, root: str = "/"
) -> Platform | None:
    """Returns the platform that this process runs on.

    Args:
        name: a name of `PLATFORMS`, whatever the environment says; "none"; or "auto", which goes
            by the environment. Defaults to "auto".
        environment: environment variables. Defaults to those of this process.
        root: root of the file system. Defaults to "/".

    Returns:
        The platform, or None.

    Raises:
        ValueError: a port or route in the environment is not valid, or the platform asks for what
            the server does not offer.

    Example:

        >>> find_platform("cloud_run", {"PORT": "8080"}).port
        8080
        >>> find_platform("auto", {})
    """
    if name == "auto":
        name = _detect(environment, pathlib.Path(root))
    return None if name == "none" else PLATFORMS[name](environment, pathlib.Path(root))


def _detect(environment, root):
    if "AIP_HTTP_PORT" in environment:
        return "vertex"
    if any(map(_SAGEMAKER_VARIABLES.fullmatch, environment)):
        return "sagemaker"
    if "K_SERVICE" in environment and "PORT" in environment:  # of Knative, which KServe uses
        return "kserve" if (root / _KSERVE_MODELS).is_dir() else "cloud_run"
    return "none"


def _sagemaker(environment, root):
    if environment.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true":
        raise ValueError(
            "SAGEMAKER_MULTI_MODEL=true: endpoints that load models on request are not supported; "
            "put all models into one archive, and name one in each request by tfs-model-name"
        )
    found = {}
    for path in sorted((root / _SAGEMAKER_MODELS).rglob(SAVED_MODEL)):
        if path.parent.name.isdecimal():
            found[str(path.parents[1])] = None
    return Platform(
        "sagemaker",
        port=_port(environment, "SAGEMAKER_BIND_TO_PORT"),
        health_route="/ping",
        predict_route="/invocations",
        model_directories=tuple(found),
        first_model=environment.get("SAGEMAKER_TFS_DEFAULT_MODEL_NAME"),
    )


def _vertex(environment, root):
    return Platform(
        "vertex",
        port=_port(environment, "AIP_HTTP_PORT"),
        body_bytes=1_500_000,
        health_route=_route(environment, "AIP_HEALTH_ROUTE", "/health"),
        predict_route=_route(environment, "AIP_PREDICT_ROUTE", "/predict"),
        model_url=environment.get("AIP_STORAGE_URI") or None,
    )


def _kserve(environment, root):
    directory = root / _KSERVE_MODELS
    return Platform(
        "kserve",
        port=_port(environment, "PORT"),
        grpc_port=8081,
        model_directories=(str(directory),) if directory.is_dir() else (),
    )


def _cloud_run(environment, root):
    # The process is killed 10 seconds after SIGTERM.
    return Platform("cloud_run", port=_port(environment, "PORT"), end_seconds=7.0)


PLATFORMS: Mapping[str, Callable[[Mapping[str, str], pathlib.Path], Platform]] = {
    "sagemaker": _sagemaker,
    "vertex": _vertex,
    "kserve": _kserve,
    "cloud_run": _cloud_run,
}


def _port(environment, name):
    text = environment.get(name, str(_HTTP_PORT))
    if not (re.fullmatch("[0-9]{1,5}", text) and int(text) < 1 << 16):
        raise ValueError(f"{name}={text} in the environment is not a port, from 0 to 65535")
    return int(text)


def _route(environment, name, default):
    route = environment.get(name) or default
    if not _ROUTE.fullmatch(route):
        raise ValueError(
            f"{name}={route} in the environment: give a path of letters, digits, and ._-:@~%+/ "
            "that starts with /"
        )
    return route


def fetch_models(url: str, directory: str | os.PathLike) -> None:
    """Copies the complete versions of a model from a URL to a directory.

    Args:
        url: directory of the versions, or of one SavedModel, such as `gs://bucket/models/digits`.
        directory: receives the versions. A SavedModel becomes version 1.

    Raises:
        ValueError: `url` is no URL of object storage.
        ImportError: the package that opens the URL is not installed.
        OSError: there are no files, or they cannot be read.
    """
    store = Store(url)
    names = [name for name in store.names() if ".." not in pathlib.PurePosixPath(name).parts]
    is_version = SAVED_MODEL in names
    # One that is being written, or was cut off, has no SavedModel yet.
    complete = {name.rpartition("/")[0] for name in names if name.endswith(f"/{SAVED_MODEL}")}
    names = [name for name in names if is_version or name.partition("/")[0] in complete]
    if not names:
        raise FileNotFoundError(f"{url} has no complete version of a model")
    target = pathlib.Path(directory, "1" if is_version else "")
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        store.get(name, target / name)


def local_copies(directories: Sequence[str], parent: str | os.PathLike) -> list[str]:
    """Returns directories of models, of which those at URLs are copied into a directory.

    Args:
        directories: directories or URLs, each with a name before it or none: `NAME=URL`.
        parent: receives a directory for each URL.

    Raises:
        ImportError: the package that opens a URL is not installed.
        OSError: there are no files at a URL, or they cannot be read.
    """
    found = []
    for number, each in enumerate(directories):
        name, _, url = each.rpartition("=") if not is_url(each) else ("", "", each)
        if is_url(url):
            _logger.info("copying %s", url)
            copy = os.path.join(parent, str(number))
            fetch_models(url, copy)
            each = f"{name or url.rstrip('/').rpartition('/')[2]}={copy}"
        found.append(each)
    return found
