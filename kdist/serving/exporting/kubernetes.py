"""Kubernetes manifests that serve an exported model with TensorFlow Serving.

    write_manifests("models/fashion", "fashion.yaml", KubernetesOptions(cpu="4"))
    # kubectl apply -f fashion.yaml

The objects are a Deployment, its Service, and a HorizontalPodAutoscaler. A PersistentVolumeClaim is
added unless the models are on the nodes. Its volume must hold the contents of the model's
directory: the versions, `models.config`, and `batching_parameters.txt`. Imports no TensorFlow.
"""

import dataclasses
import json
import os
import pathlib
import re
import urllib.parse
from typing import Any

from kdist.run_directory import write_text
from kdist.serving.core.model_directory import (
    BATCHING_PARAMETERS,
    MODEL_CONFIG,
    mount_path,
    needed_devices,
    versions,
)

_GRPC_PORT, _REST_PORT = 8500, 8501

# A server that takes longer to load its model counts as hung.
_LOADING_SECONDS = 600
# Matches the version of TensorFlow that kdist is tested with.
_IMAGE = "tensorflow/serving:2.21.0"

_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
_TAGGED = re.compile(
    r"[^\s@:]+(:\d+)?(/[^\s@:]+)*(:(?!latest$)[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})"
)
_ACCESS_MODES = ("ReadWriteMany", "ReadOnlyMany", "ReadWriteOnce")
_LEAST = {"min_replicas": 1, "max_replicas": 1, "cpu_percent": 1, "gpus": 0, "user": 1}


@dataclasses.dataclass(frozen=True)
class KubernetesOptions:
    """Options of the objects that `kdist.serving.manifests` returns.

    Example:

        >>> KubernetesOptions(gpus=1).image_or_default
        'tensorflow/serving:2.21.0-gpu'

    Attributes:
        name: name of all objects. Defaults to the name of the model's directory.
        model: name of the model for clients. Defaults to the name of its directory.
        namespace: namespace of all objects. Defaults to the current namespace of `kubectl`.
        image: image of TensorFlow Serving, with a tag. Defaults to
            `tensorflow/serving:2.21.0`, or its `-gpu` variant with `gpus`.
        min_replicas: smallest number of pods. Defaults to 1.
        max_replicas: largest number of pods. Defaults to 4.
        cpu_percent: mean utilization of the requested cores that the autoscaler aims at, in
            percent. Defaults to 70.
        cpu: cores that each pod requests, such as `"2"` or `"500m"`; a pod may use more. Defaults
            to `"1"`.
        memory: memory of each pod. Defaults to `"2Gi"`.
        gpus: NVIDIA GPUs of each pod. Defaults to 0.
        storage: size of the claimed volume. Defaults to `"10Gi"`.
        storage_class: storage class of the claimed volume. Defaults to the cluster's.
        access_mode: access mode of the claimed volume. Defaults to `"ReadWriteMany"`: pods on
            several nodes read the volume, and one process writes versions.
        host_path: directory on each node that holds the contents of the model's directory. Used
            instead of a claimed volume.
        user: number of the user that the server runs as; not 0 (root). Defaults to 1000.

    Raises:
        ValueError: Kubernetes would reject a value, or the tag of the image names no version.
    """

    name: str | None = None
    model: str | None = None
    namespace: str | None = None
    image: str | None = None
    min_replicas: int = 1
    max_replicas: int = 4
    cpu_percent: int = 70
    cpu: str = "1"
    memory: str = "2Gi"
    gpus: int = 0
    storage: str = "10Gi"
    storage_class: str | None = None
    access_mode: str = "ReadWriteMany"
    host_path: str | None = None
    user: int = 1000

    def __post_init__(self):
        self._check_names()
        self._check_numbers()
        if self.access_mode not in _ACCESS_MODES:
            raise ValueError(
                f"access_mode={self.access_mode!r}: choose one of {', '.join(_ACCESS_MODES)}"
            )
        if self.host_path is not None and not self.host_path.startswith("/"):
            raise ValueError(f"host_path={self.host_path!r}: give a path that begins with /")

    def _check_names(self):
        for field in ("name", "namespace"):
            if (value := getattr(self, field)) is not None:
                _check_name(field, value)
        if self.image is not None and not _TAGGED.fullmatch(self.image):
            raise ValueError(
                f"image={self.image!r}: give a tag that names a version, such as {_IMAGE}"
            )

    def _check_numbers(self):
        for field, least in _LEAST.items():
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{field}={value!r}: give a whole number of at least {least}")
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas={self.max_replicas}: give at least min_replicas={self.min_replicas}"
            )
        for field in ("cpu", "memory", "storage"):
            value = getattr(self, field)
            if not (_QUANTITY.fullmatch(str(value)) and re.search("[1-9]", str(value))):
                raise ValueError(
                    f"{field}={value!r}: give a quantity, such as '500m', '2' or '4Gi'"
                )

    @property
    def image_or_default(self) -> str:
        """Image with its tag."""
        return self.image or _IMAGE + ("-gpu" if self.gpus else "")


def write_manifests(
    model_directory: str | os.PathLike,
    path: str | os.PathLike,
    options: KubernetesOptions | None = None,
) -> pathlib.Path:
    """Writes `manifests(model_directory, options)` to a YAML file.

    Args:
        model_directory: directory that `kdist.serving.export` wrote versions to.
        path: file to write; its directory is created if needed.
        options: options of the cluster. Defaults to `KubernetesOptions()`.

    Returns:
        The path of the file.

    Raises:
        ValueError, OSError: see `manifests`.
        ModuleNotFoundError: PyYAML, a part of `kdist[serve]`, is not installed.

    Example:

        kdist.serving.write_manifests("models/fashion", "fashion.yaml")
        # kubectl apply -f fashion.yaml
    """
    import yaml

    text = yaml.safe_dump_all(manifests(model_directory, options), sort_keys=False)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def manifests(
    model_directory: str | os.PathLike, options: KubernetesOptions | None = None
) -> list[dict[str, Any]]:
    """Builds the Kubernetes objects that serve a model.

    Clients reach the model at `NAME:8501/v1/models/MODEL` (REST) and `NAME:8500` (gRPC).

    Args:
        model_directory: directory that `kdist.serving.export` wrote versions to.
        options: options of the cluster. Defaults to `KubernetesOptions()`.

    Returns:
        One dictionary per object, in the order in which they should be created.

    Raises:
        ValueError: the model's name is not valid in Kubernetes, its directory was renamed, or the
            model is split over devices that the pods do not have.
        FileNotFoundError: the directory holds no exported model.

    Example:

        options = kdist.serving.KubernetesOptions(max_replicas=8)
        objects = kdist.serving.manifests("models/fashion", options)
        [each["kind"] for each in objects]
    """
    directory, options = pathlib.Path(model_directory).resolve(), options or KubernetesOptions()
    _check_is_model(directory)
    _check_devices(directory, options)
    name = directory.name if options.name is None else options.name
    _check_name("name", name)
    objects = [
        _object("apps/v1", "Deployment", name, options, _deployment(name, directory.name, options)),
        _object("v1", "Service", name, options, _service(name)),
        _object("autoscaling/v2", "HorizontalPodAutoscaler", name, options, _scaler(name, options)),
    ]
    if options.host_path is None:
        claim = _object("v1", "PersistentVolumeClaim", name, options, _claim(options))
        objects.insert(0, claim)
    return objects


def _check_name(field: str, value: str) -> None:
    """Raises ValueError unless a name is a label by RFC 1035, as Services require.

    Every such label is also valid by RFC 1123, which other objects require.
    """
    if not _LABEL.fullmatch(value):
        suggestion = re.sub("[^a-z0-9]+", "-", value.lower()).strip("-0123456789")[:63].rstrip("-")
        raise ValueError(
            f"{field}={value!r}: a Kubernetes name has up to 63 of a-z, 0-9 and -, starts with a "
            f"letter, and does not end with - (RFC 1035): give {field}={suggestion or 'model'!r}"
        )


def _check_is_model(directory):
    for path in (directory / MODEL_CONFIG, directory / BATCHING_PARAMETERS):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: kdist.serving.export writes it")
    config = (directory / MODEL_CONFIG).read_text()
    if f"base_path: {json.dumps(mount_path(directory.name))}\n" not in config:
        raise ValueError(
            f"{directory / MODEL_CONFIG} belongs to a directory with another name, so TensorFlow "
            f"Serving would find no model: export to {directory} again, or restore the name"
        )
    if not versions(directory):
        raise FileNotFoundError(f"{directory} holds no version: kdist.serving.export writes them")


def _check_devices(directory, options):
    newest = directory / str(versions(directory)[-1])  # the one that TensorFlow Serving loads
    available = ["CPU:0", *(f"GPU:{number}" for number in range(options.gpus))]
    needed = needed_devices(newest)
    if not set(needed) <= set(available):
        raise ValueError(
            f"{newest} is placed on {', '.join(needed)}, and a pod has {', '.join(available)}: "
            'set gpus to match, or export with placement="merged"'
        )


def _object(api, kind, name, options, spec):
    metadata = {"name": name, "labels": _labels(name)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _labels(name):
    return {"app.kubernetes.io/name": name}


def _deployment(name, model, options):
    return {
        # No `replicas`: the autoscaler sets their number.
        "selector": {"matchLabels": _labels(name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}},
        "template": {"metadata": {"labels": _labels(name)}, "spec": _pod(name, model, options)},
    }


def _service(name):
    return {
        "selector": _labels(name),
        "ports": [
            {"name": "grpc", "port": _GRPC_PORT, "targetPort": "grpc"},
            {"name": "rest", "port": _REST_PORT, "targetPort": "rest"},
        ],
    }


def _scaler(name, options):
    target = {"type": "Utilization", "averageUtilization": options.cpu_percent}
    return {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": options.min_replicas,
        "maxReplicas": options.max_replicas,
        "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
    }


def _claim(options):
    resources = {"requests": {"storage": options.storage}}
    spec = {"accessModes": [options.access_mode], "resources": resources}
    if options.storage_class is not None:
        spec["storageClassName"] = options.storage_class
    return spec


def _pod(name, model, options):
    """Returns the `PodSpec` of pods that serve a model."""
    if options.host_path is None:
        models = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
    else:
        models = {"hostPath": {"path": options.host_path, "type": "Directory"}}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(model, options)],
        "volumes": [{"name": "models", **models}, {"name": "tmp", "emptyDir": {}}],
    }


def _container(model, options):
    memory = {"memory": options.memory}
    gpus = {"nvidia.com/gpu": str(options.gpus)} if options.gpus else {}
    served = options.model or model
    return {
        "name": "tensorflow-serving",
        "image": options.image_or_default,
        "command": ["tensorflow_model_server"],
        "args": _arguments(mount_path(model), served if served != model else None),
        "ports": [
            {"name": "grpc", "containerPort": _GRPC_PORT},
            {"name": "rest", "containerPort": _REST_PORT},
        ],
        "resources": {"requests": {"cpu": options.cpu, **memory}, "limits": {**memory, **gpus}},
        **_probes(served),
        # A pod that is being stopped still receives requests for a moment.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "models", "mountPath": mount_path(model), "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }


def _arguments(models, other_name):
    """Returns the flags of TensorFlow Serving. The exported configuration has no other name."""
    served = [f"--model_name={other_name}", f"--model_base_path={models}"]
    return [
        f"--port={_GRPC_PORT}",
        f"--rest_api_port={_REST_PORT}",
        *(served if other_name else [f"--model_config_file={models}/{MODEL_CONFIG}"]),
        "--enable_batching",
        f"--batching_parameters_file={models}/{BATCHING_PARAMETERS}",
    ]


def _probes(model):
    period = 5
    loading = {"periodSeconds": period, "failureThreshold": _LOADING_SECONDS // period}
    hung = {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    return {
        "startupProbe": {"httpGet": _status(model), **loading},
        "readinessProbe": {"httpGet": _status(model), "periodSeconds": period, "timeoutSeconds": 2},
        "livenessProbe": {"httpGet": _status(model), **hung},
    }


def _status(model):
    return {"path": f"/v1/models/{urllib.parse.quote(model)}", "port": "rest"}
