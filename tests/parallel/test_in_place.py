"""`assert_in_place` detects every kind of misplacement."""

import dataclasses
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.parallel import column, device, row, split, split_model
from kdist.parallel.inspect.operation_devices import operations_that_run
from tests.parallel.in_place import assert_in_place, parts_of, slots_of


@pytest.fixture(scope="module")
def trained():
    """A model on two replicas of two devices, and the operations of its first step."""
    layers = keras.layers
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="up")(inputs)
    x = layers.Dense(6, activation="tanh", name="down")(x)
    x = layers.LayerNormalization(name="norm")(x)
    plain = keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x))
    with kdist.create_strategy(kdist.Layout(data=2, tensor=2)).scope():
        model = split(plain, {"up": column(), "down": row()})
        model.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    x, y = np.ones((8, 8), "float32"), np.arange(8) % 4
    with operations_that_run() as operations:
        model.fit(x, y, batch_size=8, verbose=0)
    return model, operations


def test_parts_and_slots(trained):
    model, operations = trained
    places = [(part.name, part.place, len(part.variables)) for part in parts_of(model)]
    assert places == [
        *[("up/shard_0", 0, 2), ("up/shard_1", 1, 2)],
        *[("down/shard_0", 0, 1), ("down/shard_1", 1, 1), ("down", 0, 1)],
        *[("norm", 0, 2), ("head", 0, 2)],
    ]
    slots = slots_of(model)
    assert {len(slots[id(variable)]) for variable in model.trainable_variables} == {2}
    assert_in_place(model, operations)


ELSEWHERE = {
    "forward": lambda o: "MatMul" in o.type and "up_1/shard_1" in o.name and not o.is_backward,
    "forward of the second replica": lambda o: (
        "replica_1/" in o.name and "norm" in o.name and not o.is_backward and o.computes
    ),
    "backward": lambda o: o.is_backward and "head" in o.name and "MatMul" in o.type,
    "writing": lambda o: o.type == "AssignSubVariableOp" and o.device == "CPU:1",
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_operations_elsewhere(trained, what):
    model, operations = trained
    found = [o for o in operations if ELSEWHERE[what](o)]
    assert found
    others = [o for o in operations if o is not found[0]]
    moved = dataclasses.replace(found[0], device="CPU:3" if "1" in found[0].device else "CPU:1")
    with pytest.raises(AssertionError):
        assert_in_place(model, [*others, moved])
    if what in ("forward", "writing"):
        with pytest.raises(AssertionError):
            assert_in_place(model, [o for o in operations if not ELSEWHERE[what](o)])


def trained_in_two_places():
    """Returns a model on two devices, not divided, and the operations of its first step."""
    layers = keras.layers
    inputs = keras.Input((8,))
    x = layers.Dense(8, name="low")(inputs)
    plain = keras.Model(inputs, layers.Dense(4, activation="softmax", name="high")(x))
    with kdist.create_strategy(kdist.Layout(branch=2)).scope():
        model = split(plain, {"high": device(1)})
        model.compile(keras.optimizers.SGD(momentum=0.9), "sparse_categorical_crossentropy")
    with operations_that_run() as operations:
        model.fit(np.ones((8, 8), "float32"), np.arange(8) % 4, batch_size=8, verbose=0)
    return model, operations


def test_a_model_that_does_its_work_elsewhere(monkeypatch):
    """Calls or gradients on the step's device, which is TensorFlow's default."""
    assert_in_place(*trained_in_two_places())
    call = lambda strategy, here, stay, name, operation, *args, **kwargs: operation(*args, **kwargs)  # noqa: E731
    by_itself = functools.partial(tf.compat.v1.gradients, colocate_gradients_with_ops=False)
    for where, name, other in (
        (split_model, "_call_on", call),
        (tf, "gradients", by_itself),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, other)
            model, operations = trained_in_two_places()
        with pytest.raises(AssertionError, match="high"):
            assert_in_place(model, operations)


def test_variables_elsewhere(monkeypatch):
    model, operations = trained_in_two_places()
    monkeypatch.setitem(model.places, "high", 0)
    with pytest.raises(AssertionError, match="high/kernel"):
        assert_in_place(model, operations)


def test_slots_elsewhere(monkeypatch):
    model, operations = trained_in_two_places()
    first, *_, last = (slot for slots in slots_of(model).values() for slot in slots)
    monkeypatch.setattr(last, "_value", first._value)
    with pytest.raises(AssertionError, match="momentum"):
        assert_in_place(model, operations)
