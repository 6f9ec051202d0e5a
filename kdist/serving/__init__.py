"""Serving what was trained: export, request batching and its tuning, a server, Ray, Kubernetes.

    kdist.serving.export(model, "models/fashion")
    # then: python scripts/serve.py --model_dir=models/fashion

Importing it imports no TensorFlow; what needs it is imported when it is asked for. The server needs
`kdist[serve]`, `kdist.serving.ray` needs `kdist[ray]`.
"""

import importlib

from kdist.serving.arrivals import bursty, poisson, read_trace
from kdist.serving.kubernetes import manifests, write_manifests
from kdist.serving.kubernetes_options import KubernetesOptions
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.settings import BatchSettings, Limits, Objective
from kdist.serving.simulation import Outcome, simulate
from kdist.serving.tuning import Choice, choose

# Name -> the module that holds it, imported late.
_LATE = {
    "ServerOptions": "server",
    "export": "exporting",
    "run": "server",
}

__all__ = [
    "BatchSettings",
    "Choice",
    "KubernetesOptions",
    "LatencyCurve",
    "Limits",
    "Objective",
    "Outcome",
    "ServerOptions",
    "bursty",
    "choose",
    "export",
    "manifests",
    "poisson",
    "read_trace",
    "run",
    "simulate",
    "write_manifests",
]


def __getattr__(name):
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {__all__}")
    return getattr(importlib.import_module(f"kdist.serving.{_LATE[name]}"), name)
