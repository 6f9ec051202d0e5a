"""The input pipeline: from a source to batches on the devices.

    train = Pipeline(source, batch, seed=0, operations="random_flip()")
    test = Pipeline(test_source, batch, training=False)

Training data is endless. Batch number s, counted over all epochs, is a function of the seed and s
alone: each epoch has its own permutation of the examples, and the remainder that does not fill a
global batch is dropped. The pipeline therefore starts at any step without reading earlier data, and
the order depends neither on the number of replicas nor on the number of threads.

Evaluation visits each example exactly once; padding of the last batch is marked as invalid.

With several workers, each worker reads only its rows of every global batch. Files need not be
sharded, and a batch holds the same examples for any number of workers.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Iterable, Sequence

import numpy as np
import psutil
import tensorflow as tf

from kdist.batch import Batch, check_batch
from kdist.data.arrays import ArraySource, Source, check_seed, from_arrays
from kdist.data.operations import ImageOperation, as_operations
from kdist.data.worker_addresses import parse_data_workers
from kdist.data.workers import divided

_logger = logging.getLogger(__name__)

# Fraction of the free memory that a cache may take.
MAX_CACHE_FRACTION = 0.5
# First fraction of the batches, in which buffers fill and tf.data tunes its threads.
_WARM_UP_FRACTION = 0.3


class Pipeline:
    """Batches of a source for training or evaluation.

    `model.fit` of a `kdist.Model` accepts a pipeline as it is. A plain Keras model needs
    `pipeline.dataset()` and `steps_per_epoch=pipeline.steps_per_epoch`.

    Args:
        source: the examples.
        batch: sizes of a batch. One element of the pipeline is one global batch.
        training: True for endless, shuffled batches; False for each example once, in order.
            Defaults to True.
        seed: seed of the order and of random operations. Defaults to 0.
        operations: operations on each image, as text (`"resize(160, 160)|random_flip()"`) or as
            operations of `kdist.data.operations`. Evaluation skips random ones. Defaults to none.
        cache: whether to keep images in memory after decoding and resizing them once: True,
            False, or `"auto"` (if they take at most half of the free memory, and there are no data
            workers). Defaults to `"auto"`.
        data_workers: addresses of processes that prepare the batches, see `kdist.data.workers`.
            They read the same files. Defaults to none: this process does.
        parallel_calls: number of examples that are prepared at the same time, or of batches if
            they are gathered from memory at once. Defaults to None: tf.data tunes it. It does not
            change the batches.

    Attributes:
        num_examples: number of examples of the source.
        num_classes: number of classes of the source.
        class_names: names of the classes, or None.
        image_shape: (H, W, C) of the images after all operations; (T,) of sequences of tokens.
        steps_per_epoch: full batches per epoch in training; batches that hold all examples in
            evaluation.

    Raises:
        TypeError: an item of `operations` is not an operation.
        ValueError: the batch is larger than the training data, the images differ in size after
            all operations or are too small for one, or `seed`, `cache`, or `parallel_calls` is
            invalid; or there are data workers, and the examples are in the memory of this process.

    Example:

        source = kdist.data.from_arrays(images, labels)
        train = kdist.data.Pipeline(source, kdist.Batch(local=32, replicas=2))
        model.fit(train, epochs=2)
    """

    def __init__(
        self,
        source: Source,
        batch: Batch,
        *,
        training: bool = True,
        seed: int = 0,
        operations: str | Sequence[ImageOperation] = (),
        cache: bool | str = "auto",
        data_workers: str | Sequence[str] = (),
        parallel_calls: int | None = None,
    ):
        check_batch(batch)
        if parallel_calls is not None and parallel_calls < 1:
            raise ValueError(f"parallel_calls={parallel_calls} is not a positive number or None")
        if cache not in (True, False, "auto"):
            raise ValueError(f"cache={cache!r} is not True, False, or 'auto'")
        self._data_workers = parse_data_workers(data_workers)
        if self._data_workers and (cache is True or source.arrays() is not None):
            raise ValueError(
                "data workers read files, and these examples are in the memory of this process. "
                "Leave out data_workers and cache=True, or use a folder of images or TFRecord files"
            )
        # Evaluation computes no gradients to accumulate.
        self.batch = batch if training else Batch(batch.local, batch.replicas)
        self.training, self.seed = training, check_seed(seed)
        self.num_examples, self.num_classes = source.num_examples, source.num_classes
        self.class_names = source.class_names
        count_steps = self.batch.steps_per_epoch if training else self.batch.steps_to_see_all
        self.steps_per_epoch = count_steps(self.num_examples)
        self._operations = tuple(
            op for op in as_operations(operations) if training or not op.is_random
        )
        self.image_shape = _shape_after(self._operations, source.image_shape)
        self._source, self._cache, self._parallel_calls = source, cache, parallel_calls
        if not self._data_workers:
            self._source, self._operations = _cached(source, self._operations, cache)

    def dataset(self, start_step: int = 0, part: tuple[int, int] = (0, 1)) -> tf.data.Dataset:
        """Returns the batches from number `start_step` on as a `tf.data.Dataset`.

        Args:
            start_step: number of the first batch, counted over all epochs. Defaults to 0.
            part: (i, n) to read only the rows of worker i of n, which are rows G·i // n to
                G·(i + 1) // n - 1 of each global batch of G. Defaults to all rows.

        Returns:
            Batches (x, y) in training and (x, y, valid) in evaluation. x is (B, H, W, C) with the
            source's dtype, y is int32 (B,), and valid is bool (B,), False for padding. B is the
            number of rows of `part`.

        Raises:
            ValueError: `start_step` is negative, `part` is invalid, or it has no rows.
            ConnectionError: a data worker does not answer.
        """
        if start_step < 0:
            raise ValueError(f"start_step={start_step} is negative; batches are counted from 0")
        batches = functools.partial(self._batches, rows=self._rows_of(*part))
        last = np.iinfo(np.int64).max if self.training else self.steps_per_epoch
        if not self._data_workers:
            return batches(tf.data.Dataset.range(start_step, last))
        dataset = divided(batches, start_step, last, self._data_workers)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options())

    def _batches(self, steps, rows):
        """Returns some rows of the batches of a dataset of step numbers, as a dataset."""
        if self.is_vectorized:
            gather = functools.partial(self._gather, rows=rows)
            dataset = steps.map(_without_autograph(gather), self._calls)
        else:
            dataset = self._examples(steps, rows)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options())

    def arrays(self) -> tuple[np.ndarray, ...] | None:
        """Returns the arrays that hold all examples, or None if they are read from disk."""
        return self._source.arrays()

    def subset(self, number: int) -> "Pipeline":
        """Returns a pipeline of `number` of its examples, sampled with its seed.

        Raises:
            ValueError: there are fewer examples, or `number` is less than 1.
        """
        return Pipeline(
            self._source.subset(number, self.seed),
            self.batch,
            training=self.training,
            seed=self.seed,
            operations=self._operations,
            cache=self._cache,
            data_workers=self._data_workers,
            parallel_calls=self._parallel_calls,
        )

    def sample(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns random examples, the same in each call and process, such as for a table.

        Args:
            count: number of examples; all of them if there are fewer.

        Returns:
            Images (N, H, W, C) after all operations that are not random, and labels (N,).
        """
        source = self._source.subset(min(count, self.num_examples), self.seed)
        batch, operations = Batch(source.num_examples), self._operations
        few = Pipeline(source, batch, training=False, operations=operations, cache=False)
        images, labels, _ = next(iter(few.dataset().as_numpy_iterator()))
        return images, labels

    def batch_at(self, step: tf.Tensor, tensors: Sequence[tf.Tensor]):
        """Returns batch number `step` of `dataset` in graph code, read from `tensors`.

        For a parameter-server worker, which holds a copy of `arrays` and receives step numbers.

        Args:
            step: int64 scalar.
            tensors: the arrays of `arrays`, as tensors.
        """
        with self._source.using_tensors(tensors):
            if self.is_vectorized:
                return self._gather(step)
            example, signature = _without_autograph(self._example), self.element_spec
            return tf.map_fn(
                lambda number: example(number, step),
                self._numbers(step),
                fn_output_signature=tf.nest.map_structure(
                    lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), signature
                ),
            )

    @property
    def is_vectorized(self) -> bool:
        """True if batches are gathered from memory, since single images need no operation."""
        return not self._operations and isinstance(self._source, ArraySource)

    @property
    def _calls(self):
        return self._parallel_calls or tf.data.AUTOTUNE

    @property
    def element_spec(self):
        """Type specification of one batch: nested `tf.TensorSpec`s."""
        return self._batches(tf.data.Dataset.range(1), self._rows_of(0, 1)).element_spec

    def __iter__(self):
        return iter(self.dataset())

    def __repr__(self):
        what = "training" if self.training else "evaluation"
        steps = [op.name for op in self._operations]
        return (
            f"<{what} pipeline: {self.num_examples:,} examples of {self.image_shape}, "
            f"{self.num_classes} classes, {self.steps_per_epoch} batches of "
            f"{self.batch.global_size}{', ' if steps else ''}{' | '.join(steps)}>"
        )

    # Numbers of the examples in a batch.

    def _rows_of(self, index, count):
        """Returns the range of rows of a global batch that belong to one part."""
        size = self.batch.global_size
        if not 0 <= index < count <= size:
            raise ValueError(
                f"part=({index}, {count}) is invalid; pass (i, n) with i from 0 to n - 1 and n "
                f"up to the global batch of {size}"
            )
        return range(size * index // count, size * (index + 1) // count)

    def _numbers(self, step, rows=None):
        """Returns the example numbers of `rows` of a batch, int64; -1 for padding."""
        rows = range(self.batch.global_size) if rows is None else rows
        position = tf.range(rows.start, rows.stop, dtype=tf.int64)
        if not self.training:
            numbers = step * self.batch.global_size + position
            return tf.where(numbers < self.num_examples, numbers, -1)
        epoch, step = step // self.steps_per_epoch, step % self.steps_per_epoch
        return self._shuffled(step * self.batch.global_size + position, epoch)

    def _shuffled(self, position, epoch):
        seed = tf.stack([tf.constant(self.seed, tf.int64), epoch])
        last = tf.constant(self.num_examples - 1, tf.int64)
        # Computes the permutation per index (cipher Simon), without a table in memory.
        return tf.random.experimental.index_shuffle(position, seed, last)

    # Whole batches.

    def _gather(self, step, rows=None):
        numbers = self._numbers(step, rows)
        if self.training:
            return self._source.batch(numbers)
        valid = numbers >= 0
        images, labels = self._source.batch(tf.maximum(numbers, 0))
        return _zero_invalid(images, valid), _zero_invalid(labels, valid), valid

    # Single images.

    def _examples(self, steps, rows):
        number = _without_autograph(functools.partial(self._numbered, rows=rows))
        example = _without_autograph(self._example)
        examples = steps.map(number).unbatch().map(example, self._calls, deterministic=True)
        return examples.batch(len(rows), drop_remainder=True)

    def _numbered(self, step, rows):
        return self._numbers(step, rows), tf.fill([len(rows)], step)

    def _example(self, number, step):
        valid = number >= 0
        image, label = self._source.example(tf.maximum(number, 0))
        image = tf.ensure_shape(self._operate(image, number, step), self.image_shape)
        if self.training:
            return image, label
        return _zero_invalid(image, valid), _zero_invalid(label, valid), valid

    def _operate(self, image, number, step):
        epoch = step // self.steps_per_epoch
        for place, operation in enumerate(self._operations):
            if operation.is_random:
                seed = _seed(self.seed, epoch, number, place)
                image = operation.apply(image, seed)
            else:
                image = operation.apply(image)
        return image


def _without_autograph(function):
    """Returns the function without AutoGraph, which would read its source code during the run."""
    return tf.autograph.experimental.do_not_convert(function)


def _seed(seed, epoch, number, place):
    """Returns one seed per operation, example, and epoch: int32 (2,)."""
    base = tf.constant([seed & 0x7FFFFFFF, place], tf.int32)
    folded = tf.random.experimental.stateless_fold_in(base, tf.cast(epoch, tf.int32))
    return tf.random.experimental.stateless_fold_in(folded, tf.cast(number, tf.int32))


def _zero_invalid(values, valid):
    """Returns `values` with zeros in invalid rows."""
    valid = tf.reshape(
        valid, tf.concat([tf.shape(valid), [1] * (values.shape.rank - len(valid.shape))], 0)
    )
    return tf.where(valid, values, tf.zeros_like(values))


def _shape_after(operations, image_shape):
    if len(image_shape) != 3:  # tokens
        if operations:
            raise ValueError(f"{operations[0].name} is for images; text has no operations")
        return image_shape
    height, width, channels = image_shape
    for operation in operations:
        if any(
            size is not None and size < least
            for size, least in zip((height, width), operation.min_size, strict=True)
        ):
            raise ValueError(
                f"{operation.name} needs images of at least {operation.min_size} pixels, but they "
                f"have {(height, width)}; insert a resize before it, or change its arguments"
            )
        height, width = operation.size or (height, width)
    if None in (height, width):
        raise ValueError(
            "the images differ in size and cannot form a batch; add an operation such as "
            "--operations='resize(160, 160)'"
        )
    return height, width, channels


def _cached(source, operations, cache):
    """Returns a source with decoded and resized images in memory, and the remaining operations."""
    count = 0
    while count < len(operations) and not operations[count].is_random:
        count += 1
    fixed, rest = operations[:count], operations[count:]
    if cache is False or (isinstance(source, ArraySource) and not fixed):
        return source, operations
    try:
        shape = _shape_after(fixed, source.image_shape)
    except ValueError:  # only a random operation makes the sizes equal
        return source, operations
    value_bytes = source.images.itemsize if isinstance(source, ArraySource) else 1
    gigabytes = source.num_examples * int(np.prod(shape)) * value_bytes / 1e9
    free = psutil.virtual_memory().available / 1e9
    fits = cache is True or gigabytes <= MAX_CACHE_FRACTION * free
    _logger.info(
        "%s images of %s take %.2f of %.1f GB free memory: %s",
        f"{source.num_examples:,}",
        shape,
        gigabytes,
        free,
        "cached in memory" if fits else "decoded in each epoch",
    )
    return (_in_memory(source, fixed), rest) if fits else (source, operations)


def _in_memory(source, operations):
    def prepared(number):
        image, label = source.example(number)
        return functools.reduce(lambda image, op: op.apply(image), operations, image), label

    dataset = tf.data.Dataset.range(source.num_examples)
    dataset = dataset.map(
        _without_autograph(prepared), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    images, labels = None, np.empty(source.num_examples, "int32")
    for number, (image, label) in enumerate(dataset.as_numpy_iterator()):
        if images is None:  # filled in place, so that memory holds one copy
            images = np.empty((source.num_examples, *image.shape), image.dtype)
        images[number], labels[number] = image, label
    return from_arrays(images, labels, source.num_classes, source.class_names)


def _options():
    options = tf.data.Options()
    # Sharding by file would fail, since the dataset has no files.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.deterministic = True
    return options


def weighted(pipeline: Pipeline) -> tf.data.Dataset:
    """Adds sample weights to an evaluation pipeline, so that padding has no effect.

    For `evaluate` of a plain Keras model; a `kdist.Model` ignores padding by itself. Keras divides
    the loss of a batch by its number of rows and then averages over batches. With N examples in S
    batches of B rows, each example therefore gets the weight S · B / N, so that the loss is the
    mean over the examples. Pass metrics as `weighted_metrics`.

    Args:
        pipeline: a `Pipeline` with `training=False`.

    Returns:
        A `tf.data.Dataset` of (x, y, weights); weights are float32 (B,).

    Raises:
        ValueError: the pipeline is for training, which has no padding.

    Example:

        train, test = kdist.data.load("digits", batch=kdist.Batch(64))
        plain_keras_model.evaluate(kdist.data.weighted(test))
    """
    if pipeline.training:
        raise ValueError("a training pipeline has no padding; use pipeline.dataset()")
    rows = pipeline.steps_per_epoch * pipeline.batch.global_size
    weight = rows / pipeline.num_examples
    return pipeline.dataset().map(
        lambda x, y, valid: (x, y, weight * tf.cast(valid, tf.float32)), tf.data.AUTOTUNE
    )


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Measured throughput of a pipeline; returned by `measure`.

    Attributes:
        examples_per_second: examples per second after the warm-up batches.
        batches: number of batches of the measurement, without warm-up.
        first_batch_seconds: seconds until the first batch, including opening files.
        batch_bytes: size of one batch, in bytes.

    Example:

        found = kdist.data.measure(train)
        print(f"{found.examples_per_second:,.0f} examples/s")
    """

    examples_per_second: float
    batches: int
    first_batch_seconds: float
    batch_bytes: int


def measure(dataset: Iterable, seconds: float = 5.0) -> Throughput:
    """Measures how fast a pipeline produces batches.

    No training on the pipeline can be faster than this.

    Args:
        dataset: a `kdist.data.Pipeline`, or a batched `tf.data.Dataset`. A finite dataset is read
            once at most.
        seconds: duration of the measurement. Defaults to 5.

    Returns:
        A `Throughput`.

    Raises:
        ValueError: the dataset has fewer than two batches.

    Example:

        train, test = kdist.data.load("digits", batch=kdist.Batch(64))
        kdist.data.measure(train, seconds=2).examples_per_second
    """
    began = time.perf_counter()
    batches = iter(dataset)
    first = next(batches, None)
    first_batch_seconds = time.perf_counter() - began
    times, rows = [time.perf_counter()], [0]
    for batch in batches:
        times.append(time.perf_counter())
        rows.append(int(tf.nest.flatten(batch)[0].shape[0]))
        if times[-1] - times[0] >= seconds:
            break
    if first is None or len(times) < 2:
        raise ValueError("measuring a pipeline needs two batches or more; use a smaller batch size")
    begin = min(int(len(times) * _WARM_UP_FRACTION), len(times) - 2)
    duration = times[-1] - times[begin]
    parts = tf.nest.flatten(first, expand_composites=True)
    return Throughput(
        sum(rows[begin + 1 :]) / max(duration, 1e-9),
        len(times) - 1 - begin,
        first_batch_seconds,
        sum(part.numpy().nbytes for part in parts),
    )
