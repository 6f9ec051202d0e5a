"""Kernels that `kdist train` chooses before TensorFlow is imported."""

import os
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
