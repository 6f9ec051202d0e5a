"""kdist: one Keras model, trained with `model.fit` on one device or on many.

    import kdist, keras

    strategy = kdist.create_strategy("mirrored")
    batch = kdist.Batch(local=16, replicas=strategy.num_replicas_in_sync)
    train, test = kdist.data.load("fashion_mnist", batch=batch)

    with strategy.scope():
        model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
        rate = kdist.schedules.Ramp(peak=0.1, batch=batch, ramp_examples=5 * train.num_examples)
        optimizer = keras.optimizers.SGD(rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    model.fit(train, validation_data=test, epochs=10)

Importing kdist imports neither TensorFlow nor Keras; the first name that needs them does. Import it
before them: see below.
"""

import importlib
import os

# Otherwise TensorFlow opens every program with a page about oneDNN and missing CUDA drivers. What
# matters of its messages also comes as a Python exception.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# By itself TensorFlow takes oneDNN's kernels only where a CPU has AVX512-VNNI or AMX. Where it has
# no more than AVX2, as many of AMD's, they train ResNet-18 1.6 times as fast, and LeNet 1.5 times
# and more. TensorFlow reads this once, when it is imported.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

__version__ = "0.1.0"

# Public name -> the module that holds it; a module's own name stands for the module.
_PUBLIC = {
    "Batch": "batch",
    "Layout": "layout",
    "Model": "model",
    "create_strategy": "strategies",
    "callbacks": "callbacks",
    "Cluster": "cluster",
    "devices": "devices",
    "launch": "launch",
    "data": "data",
    "models": "models",
    "parallel": "parallel",
    "patch_keras": "model",
    "report": "report",
    "plan": "planner.planning",
    "planner": "planner",
    "schedules": "schedules",
    "serving": "serving",
    "strategies": "strategies",
    "telemetry": "telemetry",
    "testing": "testing",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'kdist' has no attribute {name!r}; it has {sorted(_PUBLIC)}")
    module = importlib.import_module(f"kdist.{_PUBLIC[name]}")
    return module if _PUBLIC[name] == name else getattr(module, name)


def __dir__():
    return sorted(__all__)
