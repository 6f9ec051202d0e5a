"""Evaluation on plain Keras models, where the last batch is filled up with padding."""

import tensorflow as tf

from kdist.data.pipeline import Pipeline


def weighed(pipeline: Pipeline) -> tf.data.Dataset:
    """The batches of a pipeline for evaluation, in which padding weighs nothing.

    A `kdist.Model` leaves padding out by itself. Keras divides a batch's sum of losses by its rows,
    whatever they weigh, and takes the mean of that over batches by their rows; so N examples in S
    batches of B rows weigh S * B / N each, for `loss` to be the mean over the examples. Metrics
    have to be `weighted_metrics`.

    Returns:
        (x, y, weights): weights are float32 (B,).

    Raises:
        ValueError: the pipeline is one for training, which has no padding.
    """
    if pipeline.training:
        raise ValueError("a pipeline for training has no padding: take pipeline.dataset()")
    rows = pipeline.steps_per_epoch * pipeline.batch.global_size
    weight = rows / pipeline.num_examples
    return pipeline.dataset().map(
        lambda x, y, valid: (x, y, weight * tf.cast(valid, tf.float32)), tf.data.AUTOTUNE
    )
