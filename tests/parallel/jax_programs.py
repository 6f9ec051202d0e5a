"""Programs of the mesh tests, which run in a separate process with Keras on JAX.

python jax_programs.py DIRECTORY mlp misuse           # a saved model, or a function of this file
"""

import functools
import json
import pathlib
import sys

import keras
import numpy as np

import kdist
from kdist.parallel import Mesh, column, heads, read_placement, row
from kdist.parallel.jax_mesh import bytes_per_device

LAYOUTS = ("data=2", "tensor=2", "data=2,tensor=2")
BATCH, STEPS = 16, 10


def fit(model, x, y):
    """Trains one step per batch."""
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


def train(directory, name):
    """Continues training a TensorFlow model in each layout; returns the parts on each device."""
    data, placement = np.load(directory / f"{name}.npz"), read_placement(directory / f"{name}.json")
    found = {}
    for said in LAYOUTS:
        layout = kdist.Layout.parse(said)
        mesh = Mesh(layout, [f"cpu:{n}" for n in range(layout.devices)])
        with mesh.scope():
            model = keras.saving.load_model(directory / f"{name}.keras")
            mesh.place(model, placement if layout.tensor > 1 else None)
            fit(model, data["x"], data["y"])
            found[said] = profile_devices(model)
            model.save(directory / f"{name} {said}.keras")
    return found


def profile_devices(model):
    """Returns the shapes of the parts of weights and slots, and bytes, on each device."""
    parts = {
        variable.path: [
            list(variable.shape),
            [list(shard.data.shape) for shard in variable.value.addressable_shards],
            len({str(shard.index) for shard in variable.value.addressable_shards}),
        ]
        for variable in (*model.weights, *model.optimizer.variables)
    }
    return {"parts": parts, "bytes": bytes_per_device(model.weights)}


def misuse():
    """Returns the messages of all errors."""
    inputs = keras.Input((6,), name="inputs")
    hidden = keras.layers.Dense(6, name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))
    synchronized = keras.Sequential([inputs, keras.layers.BatchNormalization()])
    synchronized.layers[-1].synchronized = True
    two = Mesh(kdist.Layout(tensor=2))

    def divided(**options):
        return lambda: two.place(model, options)

    def uneven_batch():
        mesh = Mesh(kdist.Layout(data=2))
        with mesh.scope():
            mesh.place(model)
            model.compile("sgd", "mse")
            model.fit(np.zeros((3, 6)), np.zeros((3, 3)), verbose=0)

    wrong = {
        "pipeline": lambda: Mesh(kdist.Layout(pipeline=2, micro_batches=2)),
        "branch": lambda: Mesh(kdist.Layout(branch=2)),
        "too many": lambda: Mesh(kdist.Layout(data=5)),
        "too few named": lambda: Mesh(kdist.Layout(data=2), ["cpu:0"]),
        "no match": divided(middle=column()),
        "two match": lambda: two.place(model, {"up": column(), "u.": row()}),
        "device": divided(up=kdist.parallel.device(1)),
        "stage": divided(up=column(stage=1)),
        "uneven": divided(down=column()),
        "kind": divided(up=heads()),
        "nothing divided": divided(),
        "no tensor": lambda: Mesh(kdist.Layout(data=2)).place(model, {"up": column()}),
        "synchronized": lambda: Mesh(kdist.Layout(data=2)).place(synchronized),
        "not built": lambda: two.place(keras.Sequential([keras.layers.Dense(2)])),
        "uneven batch": uneven_batch,
        "kdist.Model": lambda: kdist.Model(inputs, hidden),
        "Model.of": lambda: kdist.Model.of(model),
        "strategy": lambda: kdist.create_strategy("one_device"),
    }
    return {name: message(action) for name, action in wrong.items()}


def message(action):
    try:
        action()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def suggested():
    """Returns the divisions of a model without a placement file."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu", name="up")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="down")(hidden))
    placement = kdist.parallel.resolve_placement(model, kdist.Layout(tensor=2))
    return {name: where.how for name, where in placement.items()}


def builders():
    """Trains a step of each builder's model on two replicas."""
    mesh = Mesh(kdist.Layout(data=2))
    found = {}
    for name in kdist.models.BUILDERS:
        shape = (8,) if name == "transformer" else (32, 32, 3)
        with mesh.scope():
            model = kdist.models.create(
                name, input_shape=shape, num_classes=3, sync_batch_norm=True
            )
            mesh.place(model)
            model.compile("sgd", "sparse_categorical_crossentropy")
            history = model.fit(np.ones((4, *shape)), np.arange(4) % 3, batch_size=4, verbose=0)
        found[name] = [isinstance(model, kdist.Model), history.history["loss"][0]]
    return found


if __name__ == "__main__":
    directory, *names = sys.argv[1:]
    functions = {"misuse": misuse, "builders": builders, "suggested": suggested}
    Mesh(kdist.Layout(data=2, tensor=2))  # JAX starts with four devices
    train_on = functools.partial(train, pathlib.Path(directory))
    print(json.dumps({n: functions.get(n, functools.partial(train_on, n))() for n in names}))
