"""Placements: devices of layers, files, and refused placements."""

import keras
import pytest

from kdist import Layout
from kdist.parallel import column, device, heads, read_placement, row, stage, write_placement
from kdist.parallel.placement import places_by_name

TWO_STAGES, TWO_BRANCHES = Layout(pipeline=2), Layout(branch=2)


def model():
    """Returns a model of a stem, a nested model parallel to a layer, and a head."""
    layers = keras.layers
    inner = keras.Input((4,))
    nested = keras.Model(
        inner, layers.Dense(3, name="second")(layers.Dense(4, name="first")(inner)), name="block"
    )
    inputs = keras.Input((4,))
    stem = layers.Dense(4, name="stem")(inputs)
    joined = layers.Add(name="join")([nested(stem), layers.Dense(3, name="side")(stem)])
    return keras.Model(inputs, layers.Dense(2, name="head")(joined))


def test_what_no_pattern_matches_follows_its_inputs():
    places = places_by_name(model(), {"side": device(1)}, TWO_BRANCHES)
    assert places == {
        "stem": 0,
        "block": 0,
        "block/first": 0,
        "block/second": 0,
        "side": 1,
        "join": 1,
        "head": 1,
    }


def test_a_nested_model_is_placed_whole_or_by_layers():
    whole = places_by_name(model(), {"block": device(1), "join": device(0)}, TWO_BRANCHES)
    assert (whole["block/first"], whole["block/second"], whole["join"]) == (1, 1, 0)
    inside = places_by_name(model(), {"block/second": device(1)}, TWO_BRANCHES)
    assert (inside["block/first"], inside["block/second"], inside["join"]) == (0, 1, 1)
    both = places_by_name(model(), {"block": device(1), "block/first": device(0)}, TWO_BRANCHES)
    assert (both["block/first"], both["block/second"]) == (0, 1)


def test_stages_of_several_devices():
    places = places_by_name(model(), {"head": stage(1)}, Layout(pipeline=2, tensor=2))
    assert (places["stem"], places["head"]) == (0, 2)


@pytest.mark.parametrize(
    ("layout", "placement", "message"),
    [
        (TWO_STAGES, {"heads": stage(1)}, "'heads' matches no layer. The layers are stem, block"),
        (TWO_STAGES, {"head": stage(1), "h.*": stage(1)}, "both match 'head'"),
        (TWO_STAGES, {"head(": stage(1)}, "regular expression"),
        (TWO_STAGES, {"head": stage(2)}, "stage 2, and pipeline=2 has 2"),
        (TWO_STAGES, {"head": stage(-1)}, "stage -1"),
        (TWO_BRANCHES, {"head": stage(1)}, "stage 1, and branch=2 has 1"),
        (TWO_BRANCHES, {"head": device(2)}, "device 2, and branch=2 has 2"),
        (TWO_STAGES, {}, "no layer is on stage 1 of pipeline=2"),
        (TWO_BRANCHES, {}, "no layer is on device 1 of branch=2"),
        (TWO_STAGES, {".*": stage(1)}, "no layer is on stage 0"),
        (TWO_STAGES, {"stem": stage(1), "head": stage(0)}, "'head' on stage 0"),
        (
            TWO_STAGES,
            {"block": stage(1), "block/second": stage(0)},
            "'block/first' on stage 1 is an input of 'block/second' on stage 0",
        ),
    ],
)
def test_what_is_refused(layout, placement, message):
    with pytest.raises(ValueError, match=message):
        places_by_name(model(), placement, layout)


def test_something_else_than_a_place():
    with pytest.raises(TypeError, match=r"kdist.parallel.stage\(n\)"):
        places_by_name(model(), {"head": 1}, TWO_STAGES)


def test_files(tmp_path):
    placement = {"stem.*": stage(0), "head": stage(1), "side": device(1)}
    placement |= {"a": column(), "b": row(stage=1), "c": heads(0)}
    write_placement(placement, tmp_path / "placement.json")
    assert read_placement(tmp_path / "placement.json") == placement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no placement"),
        ("{}", "holds no placement"),
        (
            '{"head": "level(1)"}',
            "'level\\(1\\)'. Use one of stage, device, column",
        ),
        ('{"head": "stage(1"}', "Use one of"),
        ('{"head": 1}', "Use one of"),
        ('{"head": "stage(__import__(\'os\').getpid())"}', "Use one of"),
        ('{"head": "stage()"}', "Use one of"),
    ],
)
def test_files_that_hold_no_placement(tmp_path, text, message):
    path = tmp_path / "placement.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_placement(path)
