"""Functions of users that flags name, found without importing them."""

import contextlib

import pytest

from kdist.commands.training_run.applications import APPLICATIONS, application
from kdist.commands.training_run.user_code import (
    call,
    check_arguments,
    check_reference,
    is_reference,
    parse_arguments,
)
from kdist.planner import known_workloads


@pytest.mark.parametrize("text", ["a:b", "a.b:c", "dir/a.py:build", "../a.py:_build"])
def test_references(text):
    assert is_reference(text)


@pytest.mark.parametrize("text", ["resnet18", "mnist:3.0.1", "a:", ":b", "gs://a"])
def test_names_of_models_and_datasets_are_no_references(text):
    assert not is_reference(text)


def test_values_of_arguments_are_literals():
    assert parse_arguments("") == {}
    text = "width=8, rate=-0.5, names=['a', 'b'], act='relu'"
    expected = {"width": 8, "rate": -0.5, "names": ["a", "b"], "act": "relu"}
    assert parse_arguments(text) == expected
    for wrong in ("8", "a=b", "**{'a': 1}", "a=1)+f(", "a=__import__('os')"):
        with pytest.raises(ValueError, match="--model_args"):
            parse_arguments(wrong)


def test_a_function_receives_the_parameters_that_it_has(tmp_path):
    path = tmp_path / "some_models.py"
    path.write_text("def build(num_classes, width=1):\n    return num_classes, width\n")
    data = {"num_classes": 3, "input_shape": (8, 8, 1)}
    check_reference("model", f"{path}:build")
    assert call(f"{path}:build", data) == (3, 1)
    assert call(f"{path}:build", data, num_classes=5, width=2) == (5, 2)
    with pytest.raises(ValueError, match=r"argument 'depth'.*build\(num_classes, width=1\)"):
        call(f"{path}:build", data, depth=2)


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("def build(num_classes, /, width=2**3): ...", {}, "positional"),
        ("def build(a, b=1): ...", {"b": 2}, "missing a required argument: 'a'"),
        (
            "def build(width=2**3, *, act='a b'): ...",
            {"w": 1},
            r"build\(width=2 \*\* 3, \*, act='a b'\)",
        ),
        ("def build(num_classes, *rest, width=1, **more): ...", {"w": 1}, None),
        ("def build(num_classes: int, width: int = 1) -> 'Model': ...", {"width": 1}, None),
        ("@decorated\ndef build(): ...", {"w": 1}, None),
        ("def build(): ...\ndef build(w): ...", {"w": 1}, None),
        ("def build(): ...\nbuild = wrapped(build)", {"w": 1}, None),
        ("class build:\n    def __init__(self, w): ...", {"w": 1}, None),
        ("from other import build", {"w": 1}, None),
    ],
)
def test_arguments_are_checked_in_the_source(tmp_path, source, arguments, message):
    path = tmp_path / "models.py"
    path.write_text(source)
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        check_arguments(f"{path}:build", ["num_classes"], arguments)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ('"""Models."""\nimport keras\nimport no_such_package.layers as own', "line 3"),
        ("import os, no_such_package", "no_such_package"),
        ("from no_such_package.layers import Own", "no_such_package"),
        ("from __future__ import annotations\nimport sys, keras.layers", None),
        ("import neighbor\nimport no_such_package", None),
        ("import sys\nsys.path.append('elsewhere')\nimport no_such_package", None),
        ("try:\n    import no_such_package\nexcept ImportError: ...", None),
        ("from . import no_such_package", None),
    ],
)
def test_packages_that_a_module_imports_are_looked_for(tmp_path, source, missing):
    path = tmp_path / "models.py"
    (tmp_path / "neighbor.py").write_text("raise AssertionError")
    path.write_text(f"{source}\n\ndef build(): ...\n")
    refused = pytest.raises(ValueError, match=missing) if missing else contextlib.nullcontext()
    with refused:
        check_reference("model", f"{path}:build")


def test_a_module_is_checked_without_running_it(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise AssertionError\n")
    module = tmp_path / "package" / "models.py"
    (tmp_path / "other.py").write_text("raise AssertionError\n")
    module.write_text("from other import small\ndef large(): ...\n")
    monkeypatch.chdir(tmp_path)
    check_reference("model", "package.models:small")
    with pytest.raises(ValueError, match="did you mean 'large'"):
        check_reference("model", "package.models:lagre")
    with pytest.raises(ValueError, match=r"no module package\.nothing"):
        check_reference("model", "package.nothing:small")
    module.write_text("globals().update(x=1)\n")  # its names are not known
    check_reference("model", "package.models:anything")


def test_applications_are_those_that_the_planner_knows():
    assert {name.lower() for name in APPLICATIONS} < set(known_workloads())
    assert application("keras.applications.ResNet50") == application("resnet50") == "ResNet50"
    assert application("resnet18") is None
