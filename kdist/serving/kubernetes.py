"""Kubernetes manifests: an ordinary TensorFlow Serving serves what `kdist.serving.export` wrote.

    write_manifests("models/fashion", "fashion.yaml", KubernetesOptions(cpu="4"))
    # kubectl apply -f fashion.yaml

A Deployment, its Service, a HorizontalPodAutoscaler and, unless the models lie on the machines,
a PersistentVolumeClaim, whose volume has to hold what is in the model's directory: the versions,
`models.config` and `batching_parameters.txt`. Imports no TensorFlow.
"""

import json
import os
import pathlib
from typing import Any

from kdist.serving.kubernetes_options import KubernetesOptions, check_name
from kdist.serving.kubernetes_pod import GRPC_PORT, REST_PORT, pod
from kdist.serving.model_directory import needed_devices, versions
from kdist.serving.serving_files import BATCHING_PARAMETERS, MODEL_CONFIG, mount_path


def write_manifests(
    model_directory: str | os.PathLike,
    path: str | os.PathLike,
    options: KubernetesOptions | None = None,
) -> pathlib.Path:
    """Writes `manifests(model_directory, options)` to a file of YAML; gives its path.

    Raises:
        ValueError, OSError: as `manifests`.
        ModuleNotFoundError: PyYAML, a part of `kdist[serve]`, is missing.
    """
    import yaml

    text = yaml.safe_dump_all(manifests(model_directory, options), sort_keys=False)
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def manifests(
    model_directory: str | os.PathLike, options: KubernetesOptions | None = None
) -> list[dict[str, Any]]:
    """The objects that have a cluster serve a model.

    Clients reach it as `NAME:8501/v1/models/MODEL` (REST) and `NAME:8500` (gRPC).

    Args:
        model_directory: what `kdist.serving.export` has written versions to.
        options: of the cluster.

    Raises:
        ValueError: the model's name is none for Kubernetes, its directory was renamed, or it is
            split over devices that the pods have not.
        FileNotFoundError: it is no such directory.
    """
    directory, options = pathlib.Path(model_directory).resolve(), options or KubernetesOptions()
    _check_is_model(directory)
    _check_devices(directory, options)
    name = directory.name if options.name is None else options.name
    check_name("name", name)
    objects = [
        _object("apps/v1", "Deployment", name, options, _deployment(name, directory.name, options)),
        _object("v1", "Service", name, options, _service(name)),
        _object("autoscaling/v2", "HorizontalPodAutoscaler", name, options, _scaler(name, options)),
    ]
    if options.host_path is None:
        claim = _object("v1", "PersistentVolumeClaim", name, options, _claim(options))
        objects.insert(0, claim)
    return objects


def _check_is_model(directory):
    for path in (directory / MODEL_CONFIG, directory / BATCHING_PARAMETERS):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there: kdist.serving.export writes it")
    if (
        f"base_path: {json.dumps(mount_path(directory.name))}\n"
        not in (directory / MODEL_CONFIG).read_text()
    ):
        raise ValueError(
            f"{directory / MODEL_CONFIG} is of a directory of another name, and TensorFlow Serving "
            f"would find no model: export to {directory} anew, or name the directory as it was"
        )
    if not versions(directory):
        raise FileNotFoundError(f"{directory} holds no version: kdist.serving.export writes them")


def _check_devices(directory, options):
    newest = directory / str(versions(directory)[-1])  # which TensorFlow Serving loads
    there_are = ["CPU:0", *(f"GPU:{number}" for number in range(options.gpus))]
    needed = needed_devices(newest)
    if not set(needed) <= set(there_are):
        raise ValueError(
            f"{newest} is placed on {', '.join(needed)}, and a pod has {', '.join(there_are)}: "
            'give as many gpus, or export with placement="joined"'
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
        # Their number is the autoscaler's.
        "selector": {"matchLabels": _labels(name)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}},
        "template": {"metadata": {"labels": _labels(name)}, "spec": pod(name, model, options)},
    }


def _service(name):
    return {
        "selector": _labels(name),
        "ports": [
            {"name": "grpc", "port": GRPC_PORT, "targetPort": "grpc"},
            {"name": "rest", "port": REST_PORT, "targetPort": "rest"},
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
    spec = {
        "accessModes": [options.access_mode],
        "resources": {"requests": {"storage": options.storage}},
    }
    if options.storage_class is not None:
        spec["storageClassName"] = options.storage_class
    return spec
