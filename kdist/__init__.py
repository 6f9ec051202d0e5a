"""Distributed training of Keras models, by `model.fit`.

    import keras, kdist

    strategy = kdist.create_strategy("mirrored")
    batch = kdist.Batch(local=16, replicas=strategy.num_replicas_in_sync)
    train, test = kdist.data.load("fashion_mnist", batch=batch)

    with strategy.scope():
        model = kdist.models.resnet18(input_shape=(28, 28, 1), num_classes=10)
        rate = kdist.schedules.Ramp(peak=0.1, batch=batch, ramp_examples=5 * train.num_examples)
        optimizer = keras.optimizers.SGD(rate)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    model.fit(train, validation_data=test, epochs=10)

Public names are imported on first use; `import kdist` alone imports neither TensorFlow nor Keras.
Import kdist before them, since it hides messages that TensorFlow logs on import.
"""

from kdist import log
from kdist.public_names import import_on_demand

log.configure()
log.hide_start_up_messages()

__version__ = "0.1.0"

# Public name -> its module. A name that equals its module is the module itself.
_PUBLIC = {
    "Batch": "batch",
    "Layout": "layout",
    "Model": "model",
    "create_strategy": "strategies",
    "callbacks": "callbacks",
    "checkpoint": "checkpoint",
    "Cluster": "cluster",
    "apply": "loops",
    "mean": "loops",
    "session": "loops",
    "step": "loops",
    "devices": "devices",
    "launch": "launch",
    "data": "data",
    "gather_batch": "training.replica.batch_gather",
    "mirror": "mirror",
    "models": "models",
    "parallel": "parallel",
    "patch_keras": "model",
    "report": "report",
    "run_directory": "run_directory",
    "plan": "planner.planning",
    "planner": "planner",
    "schedules": "schedules",
    "serving": "serving",
    "strategies": "strategies",
    "telemetry": "telemetry",
    "testing": "testing",
    "tuning": "tuning",
}

__all__ = ["__version__", *_PUBLIC]


__getattr__ = import_on_demand(__name__, _PUBLIC)


def __dir__():
    return sorted(__all__)
