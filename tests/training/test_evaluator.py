"""Evaluator task next to workers of a multi-worker strategy."""

import json

import pytest

from tests.forked import python_tasks

TRAINING = """
import json, sys
import kdist
strategy = kdist.create_strategy("multi_worker", cluster_timeout_seconds=60)
import keras
from sklearn.datasets import load_digits
x, y = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
keras.utils.set_random_seed(1)
with strategy.scope():
    inputs = keras.Input((64,))
    model = kdist.Model(inputs, keras.layers.Dense(10, activation="softmax")(inputs))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    x[:1500], y[:1500], batch_size=64, epochs=6, verbose=0, validation_data=(x[1500:], y[1500:]),
    callbacks=[kdist.callbacks.EpochCheckpoint(sys.argv[1])],
)
evaluates = "val_loss" in history.history
results = None if evaluates else model.evaluate(x[1500:], y[1500:], verbose=0)
print(json.dumps({"epochs": history.epoch, "logs": history.history, "evaluated": results}))
"""


@pytest.mark.slow
def test_an_evaluator_follows_the_chief_of_several_workers(tmp_path):
    chief, other, evaluator = python_tasks(TRAINING, {"worker": 2, "evaluator": 1}, [str(tmp_path)])
    assert chief["evaluated"] == pytest.approx(other["evaluated"])
    assert sorted(chief["logs"]) == ["accuracy", "loss"]  # the other task does the rest
    assert sorted(evaluator["logs"]) == ["val_accuracy", "val_loss"]
    assert evaluator["epochs"][-1] == 5
    last = [evaluator["logs"][name][-1] for name in ("val_loss", "val_accuracy")]
    assert last == pytest.approx(chief["evaluated"], abs=1e-6)
    lines = (tmp_path / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [n + 1 for n in evaluator["epochs"]]
