import pytest

import kdist
from kdist.testing import python


def test_importing_kdist_imports_neither_tensorflow_nor_keras():
    loaded = python(
        "import json, sys, kdist; kdist.Batch(2); print(json.dumps(sorted(sys.modules)))"
    )
    assert not {"tensorflow", "keras", "tensorflow_datasets", "wandb"} & set(loaded)


def test_importing_telemetry_imports_neither_tensorflow_nor_wandb():
    loaded = python("import json, sys, kdist.telemetry; print(json.dumps(sorted(sys.modules)))")
    assert not {"tensorflow", "keras", "wandb"} & set(loaded)


def test_planning_imports_neither_tensorflow_nor_keras():
    loaded = python(
        "import json, sys, kdist; kdist.plan('resnet50', examples=10_000, measurements=None);"
        "print(json.dumps(sorted(sys.modules)))"
    )
    assert "kdist.planner.selection.candidates" in loaded
    assert not {"tensorflow", "keras", "plotly"} & set(loaded)


@pytest.mark.parametrize(
    ("code", "packages"),
    [
        ("import kdist.planner; kdist.planner.Workload", "tensorflow keras"),
        (
            "import kdist.planner; from kdist.planner.workload.layers import known_workload;"
            "known_workload('resnet50')",
            "tensorflow keras",
        ),
        ("import kdist.planner.cost.compute", "tensorflow scipy numpy"),
        ("import kdist; kdist.report.write", "tensorflow keras"),
        ("import kdist.serving.exporting.kubernetes", "tensorflow keras"),
        ("import kdist.serving.policy.selection", "tensorflow keras"),
        (
            "import kdist.serving.tune.page, kdist.serving.policy.adaptation",
            "tensorflow plotly",
        ),
    ],
)
def test_heavy_packages_are_not_imported(code, packages):
    loaded = python(f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))")
    assert not set(packages.split()) & set(loaded)


def test_every_public_name_is_there():
    for name in kdist.__all__:
        assert getattr(kdist, name) is not None
    assert set(dir(kdist)) == set(kdist.__all__)


def test_unknown_name_lists_public_names():
    with pytest.raises(AttributeError, match="no attribute 'fit'.*create_strategy"):
        kdist.fit  # noqa: B018


@pytest.mark.slow
def test_import_leaves_tensorflows_choice_of_kernels(monkeypatch):
    monkeypatch.delenv("TF_ENABLE_ONEDNN_OPTS", raising=False)
    assert not python(
        "import json, os, kdist, tensorflow\n"
        "print(json.dumps('TF_ENABLE_ONEDNN_OPTS' in os.environ))"
    )
