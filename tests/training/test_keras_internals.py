"""Fails when Keras changes what kdist leans on; kdist/training/keras_internals.py lists it."""

import inspect

import keras
import numpy as np
import pytest
from keras.src import api_export

from kdist.training import keras_internals
from kdist.training.replicated import ReplicatedTrainer


@pytest.mark.parametrize("name", keras_internals.TRAINER_MEMBERS)
def test_trainer_members(name):
    assert hasattr(keras_internals.TensorFlowTrainer(), name)


@pytest.mark.parametrize("name", keras_internals.LAYER_MEMBERS)
def test_layer_members(name):
    assert hasattr(keras.layers.Layer(), name)


@pytest.mark.parametrize("name", keras_internals.EPOCH_ITERATOR_MEMBERS)
def test_epoch_iterator_members(name):
    assert hasattr(keras_internals.TFEpochIterator, name)


def test_epoch_iterator_state():
    iterator = keras_internals.TFEpochIterator(
        distribute_strategy=ReplicatedTrainer().distribute_strategy,
        x=np.ones((1, 1)),
        steps_per_execution=2,
    )
    assert {
        "steps_per_epoch",
        "steps_per_execution",
        "_current_iterator",
        "_steps_seen",
        "_num_batches",
        "data_adapter",
    } <= set(vars(iterator))


@pytest.mark.parametrize("name", ["fit", "evaluate", "predict"])
def test_signatures_are_those_of_keras(name):
    ours = inspect.signature(getattr(ReplicatedTrainer, name))
    assert ours == inspect.signature(getattr(keras_internals.TensorFlowTrainer, name))


def test_files_name_a_class_by_the_export_table():
    assert api_export.REGISTERED_OBJS_TO_NAMES[keras.Sequential] == "keras.Sequential"
    assert type(keras.Model(x := keras.Input((1,)), x)) is keras_internals.Functional


def test_reduce_per_replica_takes_a_strategy_and_a_reduction():
    parameters = inspect.signature(keras_internals.reduce_per_replica).parameters
    assert list(parameters) == ["values", "strategy", "reduction"]
