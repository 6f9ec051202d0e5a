"""Serving what was trained: so far, which batches requests are best gathered into."""

from kdist.serving.arrivals import bursty, poisson, read_trace
from kdist.serving.latency_curve import LatencyCurve
from kdist.serving.settings import BatchSettings, Objective
from kdist.serving.simulation import Outcome, simulate
from kdist.serving.tuning import Choice, choose

__all__ = [
    "BatchSettings",
    "Choice",
    "LatencyCurve",
    "Objective",
    "Outcome",
    "bursty",
    "choose",
    "poisson",
    "read_trace",
    "simulate",
]
