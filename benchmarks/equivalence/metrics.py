"""Metrics in training, validation, and evaluation, and predictions: every example counts once."""

import keras

from benchmarks.equivalence.examples import (
    GLOBAL_BATCH,
    NUM_CLASSES,
    STEPS,
    batched,
    classifier,
    compiled,
    digits,
    uneven,
    whole,
)
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}
ODD = 3 * GLOBAL_BATCH + 5


def _yes_or_no(model_class):
    """Builds a classifier of digits above 4 with binary metrics."""
    inputs = keras.Input((64,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.BinaryIoU(name="iou"),
    ]
    model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    return compiled(model, loss="binary_crossentropy", metrics=metrics)


def _large_or_small(number=STEPS * GLOBAL_BATCH):
    images, labels = digits(number)
    return batched(images, (labels >= 5).astype("float32")[:, None])


def _of_classes(model_class):
    metrics = [
        keras.metrics.MeanIoU(NUM_CLASSES, sparse_y_pred=False, name="mean_iou"),
        keras.metrics.SparseTopKCategoricalAccuracy(3, name="top3"),
        "accuracy",
    ]
    return classifier(metrics=metrics)(model_class)


def _unseen(number=ODD):
    """Digits that were not trained on."""
    images, labels = digits(STEPS * GLOBAL_BATCH + number)
    return images[-number:], labels[-number:]


def _evaluated(number):
    """Loss, metrics and predictions on a number of digits that replicas cannot share."""
    x, y = _unseen(number)

    def results(model):
        logs = model.evaluate(x, y, batch_size=GLOBAL_BATCH, verbose=0, return_dict=True)
        predictions = model.predict(x, batch_size=GLOBAL_BATCH, verbose=0)
        return {**{f"evaluated {name}": logs[name] for name in logs}, "predictions": predictions}

    return results


def _stop_early():
    """The validation loss has to fall by more each epoch than it does after a few."""
    return [keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0.1, patience=1)]


_VALIDATION = {"validation_data": _unseen(), "validation_batch_size": GLOBAL_BATCH}

FEATURES = {
    "metrics: AUC, precision, recall, IoU": Feature(
        "metrics that are no means", _yes_or_no, _large_or_small, TWO_EPOCHS
    ),
    "metrics: MeanIoU, top-k": Feature(
        "confusion matrix and ranks", _of_classes, whole, TWO_EPOCHS
    ),
    "metrics: MeanIoU, top-k, uneven batch": Feature(
        "the same while training with a last batch of 5", _of_classes, uneven(5), TWO_EPOCHS
    ),
    "validation, uneven": Feature(
        "validation_data that replicas cannot share",
        _of_classes,
        whole,
        {**TWO_EPOCHS, **_VALIDATION},
    ),
    "evaluate and predict, uneven": Feature(
        "a last batch of 5: loss, metrics and predictions",
        _of_classes,
        whole,
        results=_evaluated(ODD),
    ),
    "evaluate and predict, remainder of 1": Feature(
        "a last batch of 1", _of_classes, whole, results=_evaluated(ODD - 4)
    ),
    "evaluate and predict, one example": Feature(
        "fewer examples than replicas", _of_classes, whole, results=_evaluated(1)
    ),
    "early stopping": Feature(
        "stops after the same epoch",
        classifier(),
        whole,
        {"epochs": 12, **_VALIDATION},
        callbacks=_stop_early,
    ),
}
