"""Model serving: export, dynamic batching and its tuning, a server, Ray, and Kubernetes.

    kdist.serving.export(model, "models/fashion")
    # then: kdist serve --model_dir=models/fashion

Public names are imported on demand, and TensorFlow with those that need it. The server needs
`kdist[serve]`; `kdist.serving.ray` needs `kdist[ray]`.
"""

from kdist.public_names import import_on_demand

# Public name -> the module that defines it.
_PUBLIC = {
    "BatchSettings": "core.settings",
    "Choice": "policy.selection",
    "KubernetesOptions": "exporting.kubernetes",
    "LatencyCurve": "policy.latency_curve",
    "Objective": "core.settings",
    "Outcome": "policy.simulation",
    "Platform": "platforms",
    "ServerLimits": "core.settings",
    "ServerOptions": "server",
    "bursty": "policy.simulation",
    "choose": "policy.selection",
    "export": "exporting.export",
    "find_platform": "platforms",
    "manifests": "exporting.kubernetes",
    "poisson": "policy.simulation",
    "read_trace": "policy.simulation",
    "run": "server",
    "simulate": "policy.simulation",
    "write_manifests": "exporting.kubernetes",
}

_DEPRECATED = {"Limits": "ServerLimits"}

__all__ = sorted(_PUBLIC)

__getattr__ = import_on_demand(__name__, {**_PUBLIC, "ray": "ray"}, _DEPRECATED)
