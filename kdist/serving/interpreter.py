"""Python itself, set for a process that serves."""

import gc
import sys

# Parsed requests are many small objects; with Python's own threshold their collections would look
# at all of TensorFlow's objects several times a second.
_COLLECT_AFTER = (50_000, 50, 100)
# How long a thread that has answered waits for another that works in Python; by default 5 ms,
# which is as long as a batch.
_SWITCH_SECONDS = 0.0005


def prepare_interpreter() -> None:
    """To be called before models are loaded: what there is then is never looked at again.

    Nor ever freed, where it is in cycles, as the weights of a version are.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)
