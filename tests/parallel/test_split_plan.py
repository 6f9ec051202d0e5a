"""What a plan says goes where, and what is no plan."""

import keras
import pytest

from kdist import Layout
from kdist.parallel import column, device, heads, read_plan, row, stage, write_plan
from kdist.parallel.split_plan import places_by_name

TWO_STAGES, TWO_BRANCHES = Layout(pipeline=2), Layout(branch=2)


def model():
    """A stem, a nested model beside a layer, a head."""
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
    ("layout", "plan", "message"),
    [
        (TWO_STAGES, {"heads": stage(1)}, "'heads' matches no layer; there are stem, block"),
        (TWO_STAGES, {"head": stage(1), "h.*": stage(1)}, "both match 'head': make one"),
        (TWO_STAGES, {"head(": stage(1)}, "is no regular expression"),
        (TWO_STAGES, {"head": stage(2)}, "stage 2, and pipeline=2 has 2, from 0 on"),
        (TWO_STAGES, {"head": stage(-1)}, "stage -1"),
        (TWO_BRANCHES, {"head": stage(1)}, "stage 1, and branch=2 has 1"),
        (TWO_BRANCHES, {"head": device(2)}, "device 2, and branch=2 has 2"),
        (TWO_STAGES, {}, "no layer is on stage 1 of pipeline=2"),
        (TWO_BRANCHES, {}, "no layer is on device 1 of branch=2"),
        (TWO_STAGES, {".*": stage(1)}, "no layer is on stage 0"),
        (TWO_STAGES, {"stem": stage(1), "head": stage(0)}, "'head' on stage 0: stages hand on"),
        (
            TWO_STAGES,
            {"block": stage(1), "block/second": stage(0)},
            "'block/first' on stage 1 is taken by 'block/second' on stage 0",
        ),
    ],
)
def test_what_is_refused(layout, plan, message):
    with pytest.raises(ValueError, match=message):
        places_by_name(model(), plan, layout)


def test_something_else_than_a_place():
    with pytest.raises(TypeError, match=r"say kdist.parallel.stage\(n\)"):
        places_by_name(model(), {"head": 1}, TWO_STAGES)


def test_files(tmp_path):
    plan = {"stem.*": stage(0), "head": stage(1), "side": device(1)}
    plan |= {"a": column(), "b": row(stage=1), "c": heads(0)}
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "holds no plan"),
        ("{}", "holds no plan"),
        ('{"head": "level(1)"}', "'head' goes to 'level\\(1\\)'; say one of stage, device, column"),
        ('{"head": "stage(1"}', "say one of"),
        ('{"head": 1}', "say one of"),
        ('{"head": "stage(__import__(\'os\').getpid())"}', "say one of"),
        ('{"head": "stage()"}', "say one of"),
    ],
)
def test_files_that_hold_no_plan(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_plan(path)
