"""Suggested layouts: the fastest by computed cost among those that fit."""

import keras
import pytest

import kdist
from kdist import Layout
from kdist.parallel import split, suggest
from kdist.parallel.pipeline.schedule import bubble_share
from kdist.parallel.search import balance_stages
from kdist.parallel.search.costs import ModelWork, OperationCost, device_bytes, step_seconds

layers = keras.layers


def wide(width=1024, depth=8):
    """Nearly all bytes are weights: 4 bytes each, 16 with gradient and two slots."""
    return keras.Sequential(
        [
            keras.Input((width,)),
            *(layers.Dense(width, activation="relu", name=f"d{n}") for n in range(depth)),
        ]
    )


# GB of the whole model on one device, activations left out.
WHOLE_GB = 16 * 8 * 1024 * 1025 / 1e9


def all_layouts(model, **arguments):
    """Returns the suggestion for each layout of four devices."""
    texts = ("pipeline=4", "pipeline=4,micro_batches=8", "tensor=4", "pipeline=2,tensor=2")
    return [suggest(model, Layout.parse(text), **arguments) for text in texts]


def test_what_fits_everywhere_and_computes_much_is_replicated():
    """Few weights and much arithmetic: replicas exchange little."""
    convolutions = (layers.Conv2D(32, 3, padding="same", name=f"c{n}") for n in range(4))
    model = keras.Sequential([keras.Input((64, 64, 8)), *convolutions])
    found = suggest(model, devices=4, memory_gb=32, batch_size=256)
    assert found.layout == Layout(data=4)
    assert found == {}
    with kdist.create_strategy(found.layout).scope():
        assert split(model, found).places


@pytest.mark.parametrize("share", [0.6, 0.35])
def test_what_fits_no_single_device_is_divided(share):
    model = wide()
    memory_gb = share * WHOLE_GB
    found = suggest(model, devices=4, memory_gb=memory_gb, batch_size=32)
    assert found.layout.devices == 4
    assert found.layout.group_size >= (2 if share > 0.5 else 4)
    assert found.device_gb <= memory_gb
    fitting = [each for each in all_layouts(model) if each.device_gb <= memory_gb]
    assert fitting
    assert found.step_seconds <= 1.1 * min(each.step_seconds for each in fitting)
    with kdist.create_strategy(found.layout).scope():
        split_model = split(model, found)
    weights = {
        device: sum(v.shape.num_elements() * 4 for v in split_model.variables if device in of(v))
        for device in {name for variable in split_model.variables for name in of(variable)}
    }
    assert max(weights.values()) * 4 / 1e9 <= memory_gb


def of(variable):
    return [copy.device for copy in getattr(variable.value, "values", [variable.value])]


def test_nothing_fits_and_by_how_much():
    model = wide()
    least = min(each.device_gb for each in all_layouts(model, batch_size=32))
    memory_gb = 0.1 * WHOLE_GB
    with pytest.raises(ValueError, match="no layout of 4 devices fits. ") as raised:
        suggest(model, devices=4, memory_gb=memory_gb, batch_size=32)
    over = float(str(raised.value).partition(" GB more than")[0].rpartition(" ")[2])
    assert 0 < over <= least - memory_gb + 1e-3


def test_of_placements_that_are_about_equally_fast_the_one_with_the_most_replicas(monkeypatch):
    seconds = {Layout(data=4): 1.09, Layout(data=2, tensor=2): 1.0, Layout(pipeline=4): 1.05}
    monkeypatch.setattr(
        "kdist.parallel.search.step_seconds",
        lambda pieces, numbers, layout, rows: seconds.get(layout, 2.0),
    )
    assert suggest(wide(8), devices=4).layout == Layout(data=4)
    seconds[Layout(data=4)] = 1.11
    assert suggest(wide(8), devices=4).layout == Layout(data=2, tensor=2)


def test_a_layout_or_devices():
    model = wide(8, 2)
    for arguments in ({}, {"layout": Layout(pipeline=2), "devices": 2}):
        with pytest.raises(ValueError, match="either a layout"):
            suggest(model, **arguments)
    with pytest.raises(ValueError, match="devices=0"):
        suggest(model, devices=0)


def test_there_is_no_placement():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="one")])
    with pytest.raises(ValueError, match="no placement for devices=2; .*: 1 layers for 2"):
        suggest(model, devices=2, batch_size=1)


def test_micro_batches_are_refused_where_replicas_synchronize(monkeypatch):
    """Even if they would be the fastest."""
    monkeypatch.setattr(
        "kdist.parallel.search.step_seconds",
        lambda pieces, numbers, layout, rows: 1 / (layout.data**2 * layout.micro_batches),
    )
    found = {}
    for synchronized in (False, True):
        x = inputs = keras.Input((64,))
        for _ in range(4):
            x = layers.BatchNormalization(synchronized=synchronized)(layers.Dense(64)(x))
        found[synchronized] = suggest(keras.Model(inputs, x), devices=4, batch_size=64).layout
    assert found[False] == Layout(data=2, pipeline=2, micro_batches=16)
    assert found[True] == Layout(pipeline=4, micro_batches=32)


# What it is chosen by.


def equal_pieces(count, seconds=1.0, state=0.0, kept=0.0):
    return [
        OperationCost(f"p{n}", seconds, state, kept, 0.0, (n - 1,) if n else ())
        for n in range(count)
    ]


@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_a_pipeline_waits_as_long_as_its_bubble(micro_batches):
    pieces = equal_pieces(4)
    layout = Layout(pipeline=4, micro_batches=micro_batches)
    seconds = step_seconds(pieces, balance_stages(pieces, 4), layout, rows=8)
    share = bubble_share(4, micro_batches)
    assert seconds == pytest.approx(8 / (1 - share), rel=1e-3)


def test_replicas_compute_their_rows_and_exchange_all_gradients():
    pieces = equal_pieces(2, state=16e9)  # 8 GB of gradients
    alone = step_seconds(pieces, [0, 0], Layout(), rows=4)
    beside = step_seconds(pieces, [0, 0], Layout(data=4), rows=1)
    # 2 x 3/4 x 8 GB at 25 GB/s, and three of four rows less.
    assert beside - alone == pytest.approx(2 * 3 / 4 * 8 / 25 - 2 * 3, abs=1e-3)


def test_branches_run_side_by_side():
    pieces = [
        OperationCost("stem", 1.0, 0, 0, 0, ()),
        OperationCost("a", 3.0, 0, 0, 0, (0,)),
        OperationCost("b", 2.0, 0, 0, 0, (0,)),
        OperationCost("join", 1.0, 0, 0, 0, (1, 2)),
    ]
    seconds = step_seconds(pieces, [0, 0, 1, 0], Layout(branch=2), rows=2)
    assert seconds == pytest.approx(2 * 5, rel=1e-3)


def test_memory_of_stages():
    """1F1B: the last stage holds one micro-batch's activations, the first one per stage."""
    pieces = equal_pieces(2, state=16.0, kept=1.0)
    held = device_bytes(pieces, [0, 1], Layout(pipeline=2), rows=64)
    assert held == [16 + 64, 16 + 64]
    layout = Layout(pipeline=2, micro_batches=8)
    # The sum of the micro-batches' gradients is held in addition to those of one.
    assert device_bytes(pieces, [0, 1], layout, rows=64) == [20 + 2 * 8, 20 + 8]
    layout = Layout(pipeline=2, micro_batches=8, schedule="gpipe")
    assert device_bytes(pieces, [0, 1], layout, rows=64) == [20 + 64, 20 + 64]


def test_the_model_s_own_bytes():
    (total,) = device_bytes(ModelWork(wide()).operation_costs(), [0] * 8, Layout(), rows=0)
    assert total == pytest.approx(WHOLE_GB * 1e9)
