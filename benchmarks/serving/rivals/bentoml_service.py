"""BentoML: bentoml serve benchmarks.serving.rivals.bentoml_service:Model, told by its environment.

KDIST_MODEL: the directory. KDIST_MAX_BATCH: rows. KDIST_MAX_LATENCY_MS: how long a request may
take, by which BentoML's dispatcher finds how long it waits.
"""

import os

import bentoml
import numpy as np

from benchmarks.serving.rivals.saved_model import load


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, traffic={"timeout": 60})
class Model:
    def __init__(self):
        self._predict = load(os.environ["KDIST_MODEL"])

    @bentoml.api(
        batchable=True,
        max_batch_size=int(os.environ["KDIST_MAX_BATCH"]),
        max_latency_ms=int(os.environ["KDIST_MAX_LATENCY_MS"]),
    )
    def predict(self, instances: np.ndarray) -> np.ndarray:
        return self._predict(instances)
