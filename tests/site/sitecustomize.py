"""Halves the CPU time that a process takes to import TensorFlow and Keras.

Both import JAX, scikit-learn, SciPy, Matplotlib, and IPython, where these are installed, for parts
of them that no test uses: `tf.lite`, `keras.wrappers`, `keras.visualization`, and others below.
These find none. `tests/conftest.py` uses it, and puts this folder on the path of all processes that
tests start, where Python runs it.

Imports and traces create many objects that stay. Here Python looks for garbage less often.
"""

import gc
import sys

_UNUSED = (
    "tensorflow.lite.python.util",
    "tensorflow.python.keras.engine.training",
    "keras.src.callbacks.orbax_checkpoint",
    "keras.src.saving.file_editor",
    "keras.src.visualization.",
    "keras.src.wrappers.",
)
_PACKAGES = frozenset({"IPython", "jax", "matplotlib", "scipy", "sklearn"})


class _HideFromUnused:
    def find_spec(self, name, path=None, target=None):
        if name in _PACKAGES and _importer().startswith(_UNUSED):
            raise ModuleNotFoundError(f"{name} is hidden by {__file__}", name=name)


def _importer():
    """Returns the name of the module whose `import` statement runs."""
    frame = sys._getframe(2)
    while frame and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals.get("__name__", "") if frame else ""


sys.meta_path.insert(0, _HideFromUnused())
gc.set_threshold(50_000, 20, 20)  # 700, 10, 10 by default
