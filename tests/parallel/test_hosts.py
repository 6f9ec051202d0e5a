"""Models split over hosts (processes here) train to the weights of one device."""

import re

import pytest

from kdist.layout import Layout
from tests.forked import python_tasks

TRAINING = """
import collections, json, re, sys
import kdist
layout = kdist.Layout.parse(sys.argv[1])
strategy = kdist.create_strategy(layout)
import keras
import numpy as np
import tensorflow as tf
from kdist.parallel import column, row, split, stage
from kdist.parallel.inspect.operation_devices import devices_of, groups_of, operations_that_run
from kdist.testing import largest_difference

def build():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "relu", name="first")(inputs)
    x = keras.layers.Dense(16, "relu", name="second")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="third")(x))

if layout.tensor > 1:
    placement = {"first": column(), "second": row()}
else:
    placement = {"first": stage(0), "second|third": stage(1)}
plain = build()
plain.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
with strategy.scope():
    model = split(plain, placement)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(86, 8)).astype("float32")
y = x[:, :4] ** 2
with operations_that_run() as operations:
    losses = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
expected = plain.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
of_layer = {}
for layer in ("first", "second"):
    scope = re.compile(rf"/{layer}(_\\d+)?/")  # Keras numbers its calls
    mine = [o for o in operations if "MatMul" in o.type and scope.search(o.name)]
    ran = [[o.device for o in mine if o.is_backward == back] for back in (False, True)]
    of_layer[layer] = [sorted(set(devices)) for devices in ran]
# Adam squares each gradient once; the last batch is smaller, and has a function of its own.
squares = collections.defaultdict(collections.Counter)
for o in operations:
    if o.type == "Square" and "adam" in o.name:
        squares[o.function][o.device] += 1
variables = [*model.variables, *model.optimizer.variables]
print(json.dumps({
    "difference": largest_difference(model.get_weights(), plain.get_weights()),
    "losses": [losses, expected],
    "evaluated": [model.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0)],
    "predicted": float(np.abs(model.predict(x, verbose=0) - plain.predict(x, verbose=0)).max()),
    "groups": groups_of(strategy),
    "variables": {variable.path: devices_of(strategy, variable) for variable in variables},
    "operations": of_layer,
    "squares": list(squares.values()),
    "devices": kdist.strategies.device_names(strategy),
    "workers": kdist.strategies.num_workers(strategy),
}))
"""


# Layout, tasks, and the devices of each replica: data or model within hosts or between them.
A, B = ("worker:0", "worker:1")
CASES = {
    "data between, model within": (
        "data=2,pipeline=2,micro_batches=2",
        2,
        [[f"{A}/CPU:0", f"{A}/CPU:1"], [f"{B}/CPU:0", f"{B}/CPU:1"]],
    ),
    "data within, model between": (
        "data=2,pipeline=2,micro_batches=2,between=model",
        2,
        [[f"{A}/CPU:0", f"{B}/CPU:0"], [f"{A}/CPU:1", f"{B}/CPU:1"]],
    ),
    "model between": ("pipeline=2,micro_batches=2", 2, [[f"{A}/CPU:0", f"{B}/CPU:0"]]),
    "divided weights between": ("tensor=2", 2, [[f"{A}/CPU:0", f"{B}/CPU:0"]]),
    "data between, model between": (
        "data=2,pipeline=2",
        4,
        [[f"{A}/CPU:0", f"{B}/CPU:0"], ["worker:2/CPU:0", "worker:3/CPU:0"]],
    ),
}
MAIN = "data between, model within"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [MAIN, *(pytest.param(c, marks=pytest.mark.exhaustive) for c in CASES if c != MAIN)]
)
def test_weights_are_those_of_one_device(case):
    layout, tasks, groups = CASES[case]
    result, *others = python_tasks(TRAINING, {"worker": tasks}, [layout])
    assert others == [None] * (tasks - 1)  # they served, and ended when the first had ended
    assert result["groups"] == groups
    assert result["devices"] == [device for group in groups for device in group]
    assert result["workers"] == tasks
    assert result["difference"] < 1e-6
    assert result["predicted"] < 1e-6
    for got, expected in (result["losses"], result["evaluated"]):
        assert got == pytest.approx(expected, rel=1e-5)
    check_placement(result, groups, Layout.parse(layout))


def check_placement(result, groups, layout):
    """Checks the devices of variables, slots, forward and backward operations, and updates."""
    places = {"first": {0}, "second": {1}}
    if layout.tensor > 1:
        places = {layer: {0, 1} for layer in places}
    for layer, numbers in places.items():
        expected = sorted(group[number] for group in groups for number in numbers)
        assert result["operations"][layer] == [expected, expected], layer
        of_kernel = re.compile(rf"{layer}[/_](shard_\d[/_])?kernel")
        held = [on for path, on in result["variables"].items() if of_kernel.search(path)]
        assert len(held) == 3 * len(numbers), result["variables"]  # and two slots each
        for number in numbers:
            assert held.count([group[number] for group in groups]) == 3, layer
    # Variables that are trained on each device: two in the first stage and four in the second; of
    # divided ones a part of the first's two and of the second's kernel, the rest on the first.
    squares = (3 + 3, 3) if layout.tensor > 1 else (2, 4)
    assert result["squares"] == 2 * [{group[n]: squares[n] for group in groups for n in range(2)}]
