"""MLServer's custom runtime: mlserver start DIRECTORY, told the rest by its environment.

It batches adaptively. Its parallel workers are off: they end with today's uvloop, and batches of
one model would be computed in one of them anyway.
"""

import asyncio

from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.serving.rivals.saved_model import load


class Runtime(MLModel):
    """The SavedModel at the settings' `uri`."""

    async def load(self) -> bool:
        self._predict = load(self.settings.parameters.uri)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = NumpyCodec.decode_input(payload.inputs[0])
        outputs = await asyncio.to_thread(self._predict, rows)
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("predictions", outputs)]
        )
