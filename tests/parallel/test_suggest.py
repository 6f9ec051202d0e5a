"""Suggested placements are balanced, cut where few bytes cross, and valid for `split`."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest

import kdist
from kdist import Layout
from kdist.parallel import device, split, stage, suggest
from kdist.parallel.search import assign_branches, balance_stages
from kdist.parallel.search.costs import ModelWork, OperationCost
from tests.tiers import seldom


def chain(seconds, out_bytes=None):
    """Returns a chain of operations."""
    out_bytes = out_bytes or [1.0] * len(seconds)
    return [
        OperationCost(f"p{n}", s, 0.0, 0.0, size, (n - 1,) if n else ())
        for n, (s, size) in enumerate(zip(seconds, out_bytes, strict=True))
    ]


def longest(seconds, cuts):
    places = [0, *cuts, len(seconds)]
    return max(sum(seconds[first:end]) for first, end in itertools.pairwise(places))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_no_other_cuts_are_a_tenth_better(seed, stages):
    seconds = np.random.default_rng(seed).exponential(size=9).tolist()
    numbers = balance_stages(chain(seconds), stages)
    cuts = [n for n in range(1, 9) if numbers[n] != numbers[n - 1]]
    best = min(longest(seconds, c) for c in itertools.combinations(range(1, 9), stages - 1))
    assert sorted(set(numbers)) == list(range(stages))
    assert longest(seconds, cuts) <= 1.1 * best * (1 + 1e-9)


def test_of_cuts_that_are_about_equal_the_one_with_fewer_bytes():
    seconds, sizes = [1.0] * 40, [100.0] * 40
    sizes[20] = 1.0  # a cut after 21 pieces is 5 % worse than after 20
    numbers = balance_stages(chain(seconds, sizes), 2)
    assert numbers.count(0) == 21


def test_a_tensor_that_is_taken_later_crosses_all_cuts_before():
    pieces = chain([1.0] * 20)
    # The first output is large, and the eleventh operation needs it too.
    pieces[0] = OperationCost("p0", 1.0, 0.0, 0.0, 1000.0, ())
    pieces[10] = OperationCost("p10", 1.0, 0.0, 0.0, 1.0, (0, 9))
    assert balance_stages(pieces, 2).count(0) == 11


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="2 layers for 3 stages"):
        balance_stages(chain([1.0, 1.0]), 3)


def test_branches_are_side_by_side_and_balanced():
    # stem -> four branches of two pieces each, of 4, 3, 2 and 1 s -> join
    pieces = [OperationCost("stem", 0.1, 0, 0, 1.0, ())]
    for seconds in (4.0, 3.0, 2.0, 1.0):
        pieces.append(OperationCost(f"in{seconds}", seconds / 2, 0, 0, 1.0, (0,)))
        pieces.append(OperationCost(f"out{seconds}", seconds / 2, 0, 0, 1.0, (len(pieces) - 1,)))
    pieces.append(OperationCost("join", 0.1, 0, 0, 1.0, (2, 4, 6, 8)))
    where = assign_branches(pieces, 2)
    for first in (1, 3, 5, 7):
        assert where[first] == where[first + 1]
    busy = [sum(p.seconds for p, w in zip(pieces, where, strict=True) if w == d) for d in (0, 1)]
    assert max(busy) <= 5.2


def test_branches_that_are_not_worth_it():
    with pytest.raises(ValueError, match="nothing is gained by more than 1 device: "):
        assign_branches(chain([1.0] * 6), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(pipeline=4), *seldom([Layout(pipeline=2), Layout(branch=2)])], ids=str
)
def test_a_model_is_split_as_suggested(layout):
    model = kdist.models.inception(input_shape=(28, 28, 1), num_classes=10)
    placement = suggest(model, layout)
    seconds = {piece.name: piece.seconds for piece in ModelWork(model).operation_costs()}
    with kdist.create_strategy(layout).scope():
        places = split(model, placement).places
    busy = [sum(seconds[n] for n in places if places[n] == k) for k in range(layout.group_size)]
    # Branches have a stem and joins that stand alone.
    assert max(busy) / sum(busy) < (0.7 if layout.branch > 1 else 1.35 / layout.pipeline)


def test_memory_is_looked_at():
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((1000,)), *(layers.Dense(1000, name=f"d{n}") for n in range(4))]
    )
    # Each of two stages: 2 layers of 1e6 weights, with gradient and two slots 16 bytes each.
    assert suggest(model, Layout(pipeline=2), memory_gb=0.034) == {
        "d0": stage(0),
        "d1": stage(0),
        "d2": stage(1),
        "d3": stage(1),
    }
    with pytest.raises(
        ValueError, match=r"would need 0.032 GB .* 0.002 GB more than memory_gb=0.03"
    ):
        suggest(model, Layout(pipeline=2), memory_gb=0.03)


def test_neither_stages_nor_branches():
    with pytest.raises(ValueError, match="pipeline, branch or tensor"):
        suggest(kdist.models.lenet(input_shape=(28, 28, 1), num_classes=10), Layout(data=2))


def test_a_placement_names_layers_exactly():
    """A dot in a name is not a pattern."""
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(8, name="a.b"), layers.Dense(8, name="axb")]
    )
    assert suggest(model, Layout(pipeline=2)) == {r"a\.b": stage(0), "axb": stage(1)}
    assert device(0) != stage(0)


def calls_again():
    """A chain in which one layer is called twice."""
    layers = keras.layers
    shared = layers.Dense(64, activation="tanh", name="shared")
    inputs = keras.Input((64,))
    x = layers.Dense(64, activation="tanh", name="before")(inputs)
    x = layers.Dense(64, activation="tanh", name="between")(shared(x))
    x = layers.Dense(64, activation="tanh", name="after")(shared(x))
    return keras.Model(inputs, layers.Dense(4, name="head")(x))


def test_what_is_between_two_calls_of_a_layer_is_on_its_stage():
    model = calls_again()
    placement = suggest(model, Layout(pipeline=2))
    assert placement["shared"] == placement["between"]
    with kdist.create_strategy(Layout(pipeline=2, micro_batches=2)).scope():
        assert set(split(model, placement).places.values()) == {0, 1}
    assert suggest(model, devices=2).layout.branch == 1
    with pytest.raises(ValueError, match="'shared' is called more than once"):
        suggest(model, Layout(branch=2))
    with pytest.raises(ValueError, match="4 parts for 5 stages"):
        suggest(model, Layout(pipeline=5))


@pytest.mark.slow
def test_who_recomputes_needs_less_memory_and_more_time():
    model = kdist.models.inception(input_shape=(28, 28, 1), num_classes=10)
    layout = Layout(pipeline=2, micro_batches=4, schedule="gpipe")
    kept = suggest(model, layout, batch_size=512)
    again = suggest(model, dataclasses.replace(layout, recompute=True), batch_size=512)
    assert again.device_gb < 0.7 * kept.device_gb
    assert kept.step_seconds < again.step_seconds < 1.4 * kept.step_seconds
    suggest(model, again.layout, memory_gb=again.device_gb * 1.01, batch_size=512)
