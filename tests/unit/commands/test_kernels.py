"""Kernels and caches that `kdist train` chooses before TensorFlow is imported."""

import os
import pathlib
import types

import pytest

from kdist.commands.training_run import backend_and_plan

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("lenet", None, "1"),
        ("resnet18", None, "1"),
        ("resnet18", "0", "0"),  # as the user chose
        ("mobilenet_v2", None, None),
        ("own.py:model", None, None),
    ],
)
def test_onednn_is_enabled_for_models_that_it_speeds_up(model, before, after, monkeypatch):
    monkeypatch.setattr(backend_and_plan, "FLAGS", types.SimpleNamespace(model=model))
    environment = {} if before is None else {VARIABLE: before}
    monkeypatch.setattr(os, "environ", environment)
    backend_and_plan._choose_kernels()
    assert environment.get(VARIABLE) == after


@pytest.mark.parametrize(
    ("backend", "variable", "expected"),
    [
        (
            "tensorflow",
            "TF_XLA_FLAGS",
            "--tf_xla_auto_jit=2 --tf_xla_persistent_cache_directory={}",
        ),
        ("jax", "JAX_COMPILATION_CACHE_DIR", "{}"),
    ],
)
def test_each_kind_of_machine_has_its_own_compile_cache(
    backend, variable, expected, tmp_path, monkeypatch
):
    values = {"backend": backend, "jit_compile": True, "compile_cache": str(tmp_path)}
    monkeypatch.setattr(backend_and_plan, "FLAGS", types.SimpleNamespace(**values))
    folders = []
    for processors in ("a CPU with AVX2", "a CPU with AVX-512"):
        environment = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(backend_and_plan, "describe_processors", lambda text=processors: text)
        backend_and_plan._use_compile_cache()
        folders.append(pathlib.Path(environment[variable].rpartition("=")[2]))
        assert environment[variable] == expected.format(folders[-1])
    assert sorted(tmp_path.iterdir()) == sorted(folders)
    assert folders[0] != folders[1]
