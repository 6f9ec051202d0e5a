"""Gradient noise scale: the largest batch that is useful.

    scale = kdist.tuning.gradient_noise_scale(model, train)
    print(scale.batch, scale.interval)

Batches that are much smaller than the noise scale have mostly noise in their gradients, so that
twice the batch needs half the steps. Batches that are much larger need about the same steps. See
McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, of which
this is the simple noise scale, with the unbiased estimates of appendix A.1.
"""

import dataclasses
import itertools
import math

import numpy as np

_CONFIDENCE, _RESAMPLES = 0.95, 2000
_PARTS_PER_REPLICA = 2


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """Estimate of the gradient noise scale.

    Attributes:
        squared_norm: squared norm of the gradient of all examples; an estimate may be negative.
        trace: trace of the covariance of the gradients of single examples.
        interval: 95 % bootstrap interval of the noise scale, which may be infinite.

    Example:

        >>> NoiseScale(squared_norm=0.5, trace=200.0, interval=(350.0, 470.0)).batch
        400.0
    """

    squared_norm: float
    trace: float
    interval: tuple[float, float]

    @property
    def batch(self) -> float:
        """Noise scale in examples: `trace / squared_norm`, or infinity if the noise hides it."""
        return float(_ratio(self.trace, self.squared_norm))


def estimate(part_squares: np.ndarray, whole_squares: np.ndarray, part_examples: int) -> NoiseScale:
    """Returns the noise scale, given squared norms of gradients of parts and of whole batches.

    Args:
        part_squares: squared norms of the mean gradients of the parts, `(N, n)`, for N batches of
            n parts.
        whole_squares: squared norms of the mean gradients of the batches, `(N,)`.
        part_examples: number of examples of a part.

    Raises:
        ValueError: There are less than two batches or parts.

    Example:

        >>> parts = np.array([[3.0, 5.0], [4.0, 4.0]])
        >>> scale = estimate(parts, np.array([2.5, 2.5]), part_examples=8)
        >>> scale.squared_norm, scale.trace, scale.batch
        (1.0, 24.0, 24.0)
    """
    batches, parts = np.shape(part_squares)
    if batches < 2 or parts < 2:
        raise ValueError(f"{batches} batches of {parts} parts: the noise needs two of both")
    # E|g|² = |G|² + tr(Σ) / B for a batch of B examples, here of two sizes.
    small, large = part_examples, parts * part_examples
    means = np.mean(part_squares, axis=1)
    norms = (large * whole_squares - small * means) / (large - small)
    traces = (means - whole_squares) / (1 / small - 1 / large)
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, batches, (_RESAMPLES, batches))
    scales = _ratio(traces[chosen].mean(axis=1), norms[chosen].mean(axis=1))
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(scales, [tail, 100 - tail], method="nearest")
    return NoiseScale(float(norms.mean()), float(traces.mean()), (float(low), float(high)))


def _ratio(traces, norms):
    """Returns the noise scales; infinity where the estimated gradient is not above zero."""
    norms = np.asarray(norms)
    return np.where(norms > 0, traces / np.where(norms > 0, norms, 1.0), math.inf)


def gradient_noise_scale(model, data, batches: int = 32) -> NoiseScale:
    """Measures the gradient noise scale of a model with its present weights.

    Each replica computes the gradients of two halves of its rows of a batch. No state of the model
    changes. The noise scale grows while a model is trained, so measure it again after some epochs.

    Args:
        model: compiled `kdist.Model` whose step is that of Keras. Layers that depend on the batch,
            such as BatchNormalization, see the rows of a half.
        data: a `kdist.data.Pipeline`, or batches `(x, y)` or `(x, y, sample_weight)` of any
            iterable, such as a `tf.data.Dataset`.
        batches: number of batches to measure. Defaults to 32.

    Returns:
        The `NoiseScale`, whose `batch` is the largest useful global batch: training with it takes
        about twice the steps, and twice the examples, of what is possible at best.

    Raises:
        ValueError: The model is not compiled, is split, or has a loss scale (mixed_float16);
            parameter servers or several workers train it; or a batch has too few rows.

    Example:

        train, test = kdist.data.load("digits", batch=kdist.Batch(local=64))
        model.compile("sgd", "sparse_categorical_crossentropy")
        model.fit(train, epochs=1)
        print(f"useful up to {kdist.tuning.gradient_noise_scale(model, train).batch:,.0f} examples")
    """
    import keras

    squares = _squares_function(model)
    parts = _PARTS_PER_REPLICA * model.distribute_strategy.num_replicas_in_sync
    found = []
    for number, batch in enumerate(itertools.islice(data, batches)):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        rows = len(keras.tree.flatten(x)[0]) // parts
        if not rows:
            raise ValueError(f"a batch needs at least {parts} rows, for halves on every replica")
        found.append([rows, *(value.numpy() for value in squares(number, rows, x, y, weight))])
    sizes = [size for size, _, _ in found]
    whole = [each for each in found if each[0] == max(sizes)]  # the last batch may be smaller
    return estimate(
        np.array([p for _, p, _ in whole]), np.array([w for *_, w in whole]), max(sizes)
    )


def _squares_function(model):
    """Returns a function of a batch with the squared norms of its parts `(n,)`, and of the whole.

    Its arguments are the number of the batch, the rows of a part, x, y, and sample weights.
    """
    import keras
    import tensorflow as tf

    from kdist.compat.keras import loss_module
    from kdist.training.replica.reduction import all_reduce_sum
    from kdist.training.scopes import this_replica

    _check(model)
    strategy = model.distribute_strategy
    replicas = strategy.num_replicas_in_sync
    parts = _PARTS_PER_REPLICA * replicas
    seeds = [v for v in model.non_trainable_variables if v.name == "seed_generator_state"]

    def gradients_of(part, number, rows, *data):
        place = slice(part * rows, (part + 1) * rows)
        x, y, weight = keras.tree.map_structure(
            lambda array: None if array is None else array[place], data
        )
        # The scope keeps what layers write. Each part has its own dropout masks.
        shift = tf.stack([number * parts + part, 0])
        shifted = [(seed, seed.value + tf.cast(shift, seed.dtype)) for seed in seeds]
        variables = model.trainable_variables
        weights = [variable.value for variable in variables]
        # Keras looks for the values of regularized variables in the scope.
        trained = list(zip(variables, weights, strict=True))
        with (
            tf.GradientTape() as tape,
            keras.StatelessScope(state_mapping=[*shifted, *trained], collect_losses=True),
        ):
            # Those that replicas divide are gathered tensors, which a tape does not watch.
            tape.watch([weight for weight in weights if not isinstance(weight, tf.Variable)])
            loss = model.compute_loss(x, y, model(x, training=True), weight, training=True)
            loss = loss_module.unscale_loss_for_distribution(loss)
        found = tape.gradient(loss, weights, unconnected_gradients="zero")
        return [tf.cast(tf.convert_to_tensor(gradient), tf.float32) for gradient in found]

    def on_replica(number, rows, *data):
        own = range(_PARTS_PER_REPLICA)
        own = [_PARTS_PER_REPLICA * this_replica() + half for half in own]
        gradients = [gradients_of(part, number, rows, *data) for part in own]
        squares = [tf.square(tf.linalg.global_norm(each)) for each in gradients]
        # `scatter` and the sum over replicas put the norms of all parts into one vector.
        ours = tf.scatter_nd([[part] for part in own], squares, [parts])
        total = [tf.add_n(pieces) / parts for pieces in zip(*gradients, strict=True)]
        everywhere, *mean = all_reduce_sum([ours, *total])
        return everywhere, tf.square(tf.linalg.global_norm(mean))

    @tf.function(autograph=False, reduce_retracing=True)
    def squares(number, rows, x, y, weight):
        results = strategy.run(on_replica, (number, rows, x, y, weight))
        return [strategy.experimental_local_results(result)[0] for result in results]

    return lambda number, rows, *data: squares(tf.constant(number), tf.constant(rows), *data)


def _check(model):
    import keras

    from kdist.training.scopes import has_parameter_servers, is_multi_worker

    if not getattr(model, "compiled", False):
        raise ValueError("the model has no loss: call compile first")
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "gradients in float16 need a loss scale: measure with float32 or mixed_bfloat16"
        )
    strategy = model.distribute_strategy
    if has_parameter_servers(strategy) or is_multi_worker(strategy) or hasattr(strategy, "on"):
        raise ValueError(
            f"{type(strategy).__name__}: measure the noise scale with whole models in one process; "
            "use one_device or mirrored with the same batch"
        )
