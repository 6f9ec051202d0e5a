"""Names that were renamed work for one release, with a warning."""

import keras
import pytest

import kdist
from kdist.parallel import merged, read_placement, resolve_placement, stage, write_placement

LAYOUT = kdist.Layout(pipeline=2)
PLACEMENT = {"head": stage(1)}


def model():
    layers = [keras.layers.Dense(4, name="stem"), keras.layers.Dense(2, name="head")]
    return keras.Sequential([keras.Input((3,)), *layers])


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("joined", merged),
        ("plan_as_said", resolve_placement),
        ("read_plan", read_placement),
        ("write_plan", write_placement),
    ],
)
def test_functions(name, new):
    with pytest.warns(DeprecationWarning, match=new.__name__):
        assert getattr(kdist.parallel, name) is new


def test_arguments(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.warns(DeprecationWarning, match="placement"):
        write_placement(plan=PLACEMENT, path=path)
    with pytest.warns(DeprecationWarning, match="source"):
        assert resolve_placement(model(), LAYOUT, said=path) == PLACEMENT
    with (
        kdist.create_strategy(LAYOUT).scope(),
        pytest.warns(DeprecationWarning, match="placement"),
    ):
        assert kdist.parallel.split(model(), plan=PLACEMENT).places == {"stem": 0, "head": 1}


def test_split_as():
    with (
        kdist.create_strategy(LAYOUT).scope(),
        pytest.warns(DeprecationWarning, match="resolve_placement"),
    ):
        assert kdist.parallel.split_as(model(), LAYOUT).places == {"stem": 0, "head": 1}


def test_unknown_names():
    with pytest.raises(AttributeError, match="joint"):
        kdist.parallel.joint  # noqa: B018
