"""Bytes that stages hold for the backward pass, compared with counts by hand."""

import keras
import numpy as np
import pytest

import kdist
from kdist.parallel import device, split, stage
from kdist.parallel.inspect.operation_devices import Activations, profile_devices
from kdist.parallel.pipeline import step
from kdist.parallel.pipeline.schedule import StageWork, merged_order

FLOAT, ROWS, MICRO_BATCHES, UNITS = 4, 48, 4, 8
PLACEMENT = {"high": stage(1), "top": stage(2)}
# Bytes for a micro-batch of 12 rows: inputs of a stage, and inputs of tanh in its three layers.
INPUTS = 12 * 6 * FLOAT
TAKEN = 12 * UNITS * FLOAT
COMPUTED = 3 * 12 * UNITS * FLOAT


def three_stages():
    """Returns a model with three layers on each of two stages, and one more on the last."""
    layers = keras.layers
    x = inputs = keras.Input((6,))
    for number in range(3):
        x = layers.Dense(UNITS, "tanh", name=f"low{number}")(x)
    for name in ("high", "higher", "highest"):
        x = layers.Dense(UNITS, "tanh", name=name)(x)
    return keras.Model(inputs, layers.Dense(4, "softmax", name="top")(x))


def found(layout, placement=PLACEMENT, plain=None, x=None):
    """Returns the device profiles of a model trained under the layout."""
    with kdist.create_strategy(kdist.Layout.parse(layout)).scope():
        model = split(plain or three_stages(), placement)
        model.compile("sgd", "sparse_categorical_crossentropy")
    x = np.ones((ROWS, 6), "float32") if x is None else x
    return profile_devices(model, x, np.zeros(len(x), "int32"))


def live(rows):
    return [row.live_micro_batches for row in rows]


def held(rows):
    return [row.activation_bytes for row in rows]


def assert_is_one_forward_one_backward(rows):
    """The last stage holds its inputs and the gradient of the loss over 4 classes."""
    assert live(rows) == [3, 2, 1]
    last = TAKEN + 12 * 4 * FLOAT
    assert held(rows) == [3 * (INPUTS + COMPUTED), 2 * (TAKEN + COMPUTED), last]
    assert all(row.forward and row.backward for row in rows)


@pytest.mark.slow
def test_1f1b_holds_as_many_micro_batches_as_there_are_stages_to_come(monkeypatch):
    assert_is_one_forward_one_backward(found("pipeline=3,micro_batches=4"))

    def gpipe(schedule, *sizes):
        return merged_order("gpipe", *sizes)

    monkeypatch.setattr(step, "merged_order", gpipe)
    with pytest.raises(AssertionError):  # the order is measured, not taken from the layout
        assert_is_one_forward_one_backward(found("pipeline=3,micro_batches=4"))


def test_gpipe_holds_all_micro_batches():
    rows = found("pipeline=3,micro_batches=4,schedule=gpipe")
    assert live(rows) == [4, 4, 4]
    last = 4 * (TAKEN + 12 * 4 * FLOAT)
    assert held(rows) == [4 * (INPUTS + COMPUTED), 4 * (TAKEN + COMPUTED), last]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("schedule", "taken"), [("1f1b", (3, 2)), ("gpipe", (4, 4))])
def test_who_recomputes_holds_what_was_taken_and_one_micro_batch(schedule, taken):
    rows = found(f"pipeline=3,micro_batches=4,schedule={schedule},recompute")
    assert live(rows) == [1, 1, 1]
    assert held(rows)[:2] == [taken[0] * INPUTS + COMPUTED, taken[1] * TAKEN + COMPUTED]


@pytest.mark.slow
def test_of_dropout_its_outputs_are_kept_and_computed_again():
    """The mask does not depend on the inputs; TensorFlow must not merge both passes."""
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(UNITS, "tanh", name="low"),
            layers.Dropout(0.5, seed=1, name="drop"),
            layers.Dense(UNITS, "tanh", name="lower"),
            layers.Dense(4, activation="softmax", name="high"),
        ]
    )
    placement = {"high": stage(1)}
    kept = found("pipeline=2,micro_batches=4,schedule=gpipe", placement, plain)[0]
    again = found("pipeline=2,micro_batches=4,schedule=gpipe,recompute", placement, plain)[0]
    of_one = (kept.activation_bytes - 4 * INPUTS) / 4
    assert of_one >= 3 * TAKEN
    assert again.activation_bytes == 4 * INPUTS + of_one


@pytest.mark.slow
def test_replicas_hold_alike():
    rows = found("data=2,pipeline=2,micro_batches=4", {"high": stage(1)})
    assert live(rows) == [2, 1, 2, 1]
    assert held(rows)[:2] == held(rows)[2:]
    assert held(rows)[0] == (2 * (INPUTS + COMPUTED)) // 2


def test_branches_hold_their_own():
    """Without micro-batches: all rows. The batch counts on devices that received a copy."""
    layers = keras.layers
    inputs = keras.Input((6,))
    left = layers.Dense(UNITS, "tanh", name="left")(inputs)
    right = layers.Dense(2 * UNITS, "tanh", name="right")(inputs)
    join = layers.Concatenate(name="join")([left, right])
    plain = keras.Model(inputs, layers.Dense(4, activation="softmax", name="top")(join))
    placement = {"right": device(1), "join|top": device(0)}
    rows = found("branch=2", placement, plain)
    assert live(rows) == [1, 1]
    assert held(rows)[1] == ROWS * (2 * UNITS + 6) * FLOAT
    assert held(rows)[0] >= ROWS * (UNITS + 3 * UNITS + 4) * FLOAT


@pytest.mark.slow
def test_of_loops_it_is_not_known():
    layers = keras.layers
    plain = keras.Sequential(
        [
            keras.Input((5, 6)),
            layers.LSTM(UNITS, name="low"),
            layers.Dense(4, activation="softmax", name="high"),
        ]
    )
    x = np.ones((8, 5, 6), "float32")
    rows = found("pipeline=2,micro_batches=2", {"high": stage(1)}, plain, x)
    assert rows[0].activation_bytes is None
    assert rows[1].activation_bytes == 4 * (UNITS + 4) * FLOAT


def test_the_peak_is_that_of_the_order():
    activations = Activations()
    activations.kept.update({("CPU:0", 0): 5, ("CPU:0", 1): 7})
    activations.computed_again["CPU:0", 0] = 100
    forward, back = (
        [StageWork(0, n, False) for n in (0, 1)],
        [StageWork(0, n, True) for n in (0, 1)],
    )
    again = StageWork(0, 0, False, is_again=True)
    assert activations.peak_bytes("CPU:0", [*forward, again, *back]) == 112
    assert activations.peak_bytes("CPU:0", [forward[0], again, back[0], forward[1]]) == 105
    assert activations.peak_bytes("CPU:1", forward) == 0


@pytest.mark.slow
def test_of_images_it_is_known():
    """Inputs of bytes, whose casts TensorFlow moves, and workspaces of BatchNormalization."""
    layers = keras.layers
    x = inputs = keras.Input((8, 8, 1))
    for name in [f"{half}{number}" for half in ("low", "high") for number in range(4)]:
        x = layers.Conv2D(8, 3, padding="same", name=name)(x)
        x = layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(name=f"{name}_norm")(x))
    top = layers.Dense(4, "softmax", name="high_top")(layers.GlobalAveragePooling2D()(x))
    plain, placement = keras.Model(inputs, top), {"high0": stage(1)}
    x = np.zeros((16, 8, 8, 1), "uint8")
    layout = "pipeline=2,micro_batches=4,schedule=gpipe"
    kept, again = (found(each, placement, plain, x) for each in (layout, f"{layout},recompute"))
    for before, after in zip(held(kept), held(again), strict=True):
        assert after < before / 2


def test_sums_that_tensorflow_makes_at_once():
    """It renames them, for example in LayerNormalization; their sizes stay the same."""
    layers = keras.layers
    inputs = keras.Input((3, 6))
    x = layers.LayerNormalization(name="norm")(layers.Dense(UNITS, name="low")(inputs))
    top = layers.Dense(4, activation="softmax", name="top")(layers.Flatten(name="flat")(x))
    x = np.random.default_rng(0).normal(size=(ROWS, 3, 6)).astype("float32")
    rows = found("branch=2", {"flat|top": device(1)}, keras.Model(inputs, top), x)
    assert held(rows)[0] > ROWS * 3 * UNITS * FLOAT
    assert held(rows)[1] == ROWS * (3 * UNITS + 4) * FLOAT
