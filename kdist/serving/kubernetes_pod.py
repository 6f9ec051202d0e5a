"""A pod with TensorFlow Serving, which reads a model's directory and writes nothing."""

import urllib.parse
from typing import Any

from kdist.serving.kubernetes_options import KubernetesOptions
from kdist.serving.serving_files import BATCHING_PARAMETERS, MODEL_CONFIG, mount_path

GRPC_PORT, REST_PORT = 8500, 8501

# A model may take so long to load before the server counts as hung.
_LOADING_SECONDS = 600


def pod(name: str, model: str, options: KubernetesOptions) -> dict[str, Any]:
    """The `PodSpec` of pods that serve the model of that name.

    Args:
        name: of the claimed volume.
        model: as TensorFlow Serving calls it.
        options: of the cluster.
    """
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
    return {
        "name": "tensorflow-serving",
        "image": options.image_or_default,
        "command": ["tensorflow_model_server"],
        "args": _arguments(mount_path(model)),
        "ports": [
            {"name": "grpc", "containerPort": GRPC_PORT},
            {"name": "rest", "containerPort": REST_PORT},
        ],
        "resources": {"requests": {"cpu": options.cpu, **memory}, "limits": {**memory, **gpus}},
        **_probes(model),
        # A pod that is told to stop still gets requests for a moment.
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


def _arguments(models):
    return [
        f"--port={GRPC_PORT}",
        f"--rest_api_port={REST_PORT}",
        f"--model_config_file={models}/{MODEL_CONFIG}",
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
