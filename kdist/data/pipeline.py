"""From a source to batches on their way to the devices.

    train = Pipeline(source, batch, seed=0, operations=parse("random_flip()"))
    test = Pipeline(test_source, batch, training=False)

Training goes on epoch after epoch. Batch number s, counted over all epochs, is a function of the
seed and s alone: an epoch's order is a permutation of the examples that the seed and the epoch's
number give, of which as many as fill whole batches are taken. So any position is reached without
reading what came before, and the order depends neither on the number of replicas nor on how many
threads work.

In evaluation each example comes once; rows that fill up the last batch are marked as not valid.

Where several workers train, each asks for its part of every batch and reads no more than that. As
every example is known by its number, it does not matter how they lie in files: nothing has to be
sharded by file, and the same examples make up a batch whatever the number of workers.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence

import numpy as np
import psutil
import tensorflow as tf

from kdist.batch import Batch
from kdist.data.arrays import ArraySource, from_arrays
from kdist.data.operations import Operation, check
from kdist.data.source import Source, check_seed

# A cache may take this share of the memory that is free when it is decided on.
CACHE_SHARE = 0.5


class Pipeline:
    """Batches of a source, in the order and the shape that training or evaluation needs.

    Args:
        source: the examples.
        batch: a batch of the pipeline is one global batch.
        training: endless and shuffled, or each example once, in order. Defaults to True.
        seed: of the order and of random operations. Defaults to 0.
        operations: what is done to each image, as operations or as a text such as
            `"resize(160, 160)|random_flip()"`. In evaluation, random ones are left out.
        cache: whether the images are decoded and resized once and kept in memory: True, False,
            or `"auto"`, the default: if they take no more than half of the free memory.

    Attributes:
        num_examples: examples in the source.
        num_classes, class_names: those of the source.
        image_shape: (H, W, C) of what comes out.
        steps_per_epoch: full batches in training, batches with all examples in evaluation.

    Raises:
        TypeError: an operation that is none.
        ValueError: the batch is larger than the training data, images differ in size and no
            operation brings them to one, images smaller than an operation needs, or a seed or
            cache that cannot be.
    """

    def __init__(
        self,
        source: Source,
        batch: Batch,
        *,
        training: bool = True,
        seed: int = 0,
        operations: str | Sequence[Operation] = (),
        cache: bool | str = "auto",
    ):
        if cache not in (True, False, "auto"):
            raise ValueError(f"cache={cache!r}: give True, False or 'auto'")
        # Evaluation has nothing to accumulate: it takes what fits at once.
        self.batch = batch if training else dataclasses.replace(batch, accumulate=1)
        self.training, self.seed = training, check_seed(seed)
        self.num_examples, self.num_classes = source.num_examples, source.num_classes
        self.class_names = source.class_names
        self.steps_per_epoch = (
            self.batch.steps_per_epoch(self.num_examples)
            if training
            else self.batch.steps_to_see_all(self.num_examples)
        )
        self._operations = tuple(op for op in check(operations) if training or not op.is_random)
        self.image_shape = _shape_after(self._operations, source.image_shape)
        self._source, self._operations = _cached(source, self._operations, cache)

    def dataset(self, start_step: int = 0, part: tuple[int, int] = (0, 1)) -> tf.data.Dataset:
        """The batches from number `start_step` on: (x, y), or (x, y, valid) in evaluation.

        x is (B, H, W, C), uint8 if the source is; y int32 (B,); valid bool (B,), False for
        padding. B is the global batch G, or what belongs to `part`.

        Args:
            start_step: counted over all epochs. Defaults to 0.
            part: (i, n) for rows G·i // n up to G·(i + 1) // n of each batch, which alone are
                read: those of worker i of n. Defaults to all rows.

        Raises:
            ValueError: `start_step` is negative, or there is no such part, or it has no rows.
        """
        if start_step < 0:
            raise ValueError(f"start_step={start_step}: batches are counted from 0")
        rows = self._rows_of(*part)
        if self.training:
            steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
        else:
            steps = tf.data.Dataset.range(start_step, self.steps_per_epoch)
        if self._takes_batches:
            gather = functools.partial(self._gather, rows=rows)
            dataset = steps.map(_as_is(gather), num_parallel_calls=tf.data.AUTOTUNE)
        else:
            dataset = self._examples(steps, rows)
        return dataset.prefetch(tf.data.AUTOTUNE).with_options(_options())

    def arrays(self) -> tuple[np.ndarray, ...] | None:
        """What holds all examples, if they are in memory; None if they are read from disk."""
        return self._source.arrays()

    def batch_of(self, step: tf.Tensor, tensors: Sequence[tf.Tensor]):
        """Batch number `step` as `dataset` gives it, in graph code, drawn from `tensors`.

        For a process that has a copy of `arrays` and is told the numbers of its batches.

        Args:
            step: int64 scalar.
            tensors: `arrays`, as tensors.
        """
        with self._source.held_in(tensors):
            if self._takes_batches:
                return self._gather(step)
            example, signature = _as_is(self._example), self.element_spec
            return tf.map_fn(
                lambda number: example(number, step),
                self._numbers(step),
                fn_output_signature=tf.nest.map_structure(
                    lambda spec: tf.TensorSpec(spec.shape[1:], spec.dtype), signature
                ),
            )

    @property
    def _takes_batches(self):
        """Nothing is to be done to single images, so that a batch is drawn at once."""
        return not self._operations and isinstance(self._source, ArraySource)

    @property
    def element_spec(self):
        """The specification of a batch."""
        return self.dataset().element_spec

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

    # Which examples make up a batch.

    def _rows_of(self, index, count):
        """The rows of a batch that make up a part."""
        size = self.batch.global_size
        if not 0 <= index < count <= size:
            raise ValueError(
                f"part=({index}, {count}): give (i, n) with i from 0 to n - 1, and n no "
                f"larger than the global batch of {size}"
            )
        return range(size * index // count, size * (index + 1) // count)

    def _numbers(self, step, rows=None):
        """int64: the numbers of the examples in `rows` of a batch, by default all; -1: padding."""
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
        # A permutation that needs no table: the cipher Simon on the numbers up to `last`.
        return tf.random.experimental.index_shuffle(position, seed, last)

    # A batch at once, where nothing is to be done to single images.

    def _gather(self, step, rows=None):
        numbers = self._numbers(step, rows)
        if self.training:
            return self._source.batch(numbers)
        valid = numbers >= 0
        images, labels = self._source.batch(tf.maximum(numbers, 0))
        return _blank(images, valid), _blank(labels, valid), valid

    # Image by image.

    def _examples(self, steps, rows):
        numbered = steps.map(_as_is(functools.partial(self._numbered, rows=rows))).unbatch()
        examples = numbered.map(
            _as_is(self._example), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
        )
        return examples.batch(len(rows), drop_remainder=True)

    def _numbered(self, step, rows):
        return self._numbers(step, rows), tf.fill([len(rows)], step)

    def _example(self, number, step):
        valid = number >= 0
        image, label = self._source.example(tf.maximum(number, 0))
        image = tf.ensure_shape(self._operate(image, number, step), self.image_shape)
        if self.training:
            return image, label
        return _blank(image, valid), _blank(label, valid), valid

    def _operate(self, image, number, step):
        epoch = step // self.steps_per_epoch
        for place, operation in enumerate(self._operations):
            if operation.is_random:
                seed = _seed(self.seed, epoch, number, place)
                image = operation.apply(image, seed)
            else:
                image = operation.apply(image)
        return image


def _as_is(function):
    """The function without AutoGraph, which would read its source again while a run goes on."""
    return tf.autograph.experimental.do_not_convert(function)


def _seed(seed, epoch, number, place):
    """int32 (2,): one seed for each operation on each example in each epoch."""
    base = tf.constant([seed & 0x7FFFFFFF, place], tf.int32)
    folded = tf.random.experimental.stateless_fold_in(base, tf.cast(epoch, tf.int32))
    return tf.random.experimental.stateless_fold_in(folded, tf.cast(number, tf.int32))


def _blank(values, valid):
    """`values` with zeros where they are not valid."""
    valid = tf.reshape(
        valid, tf.concat([tf.shape(valid), [1] * (values.shape.rank - len(valid.shape))], 0)
    )
    return tf.where(valid, values, tf.zeros_like(values))


def _shape_after(operations, image_shape):
    height, width, channels = image_shape
    for operation in operations:
        if any(
            has is not None and has < need
            for has, need in zip((height, width), operation.smallest, strict=True)
        ):
            raise ValueError(
                f"{operation.name} needs images of {operation.smallest} pixels or more, and they "
                f"are {(height, width)} there; put a resize before it, or change its arguments"
            )
        height, width = operation.size or (height, width)
    if None in (height, width):
        raise ValueError(
            "the images differ in size, and a batch needs one; add an operation such as "
            "--operations='resize(160, 160)'"
        )
    return height, width, channels


def _cached(source, operations, cache):
    """The source with its images decoded and resized in memory, and what is left to do to them."""
    count = 0
    while count < len(operations) and not operations[count].is_random:
        count += 1
    fixed, left = operations[:count], operations[count:]
    if cache is False or (isinstance(source, ArraySource) and not fixed):
        return source, operations
    try:
        shape = _shape_after(fixed, source.image_shape)
    except ValueError:  # only a random operation brings the images to one size
        return source, operations
    gigabytes = source.num_examples * int(np.prod(shape)) * _bytes_per_value(source) / 1e9
    free = psutil.virtual_memory().available / 1e9
    fits = cache is True or gigabytes <= CACHE_SHARE * free
    print(
        f"kdist: {source.num_examples:,} images of {shape} take {gigabytes:.2f} GB of {free:.1f} "
        f"GB free: {'kept in memory' if fits else 'decoded in each epoch'}",
        file=sys.stderr,
    )
    return (_in_memory(source, fixed), left) if fits else (source, operations)


def _bytes_per_value(source):
    return source.images.itemsize if isinstance(source, ArraySource) else 1


def _in_memory(source, operations):
    def prepared(number):
        image, label = source.example(number)
        return functools.reduce(lambda image, op: op.apply(image), operations, image), label

    dataset = tf.data.Dataset.range(source.num_examples)
    dataset = dataset.map(_as_is(prepared), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    images, labels = None, np.empty(source.num_examples, "int32")
    for number, (image, label) in enumerate(dataset.as_numpy_iterator()):
        if images is None:  # filled in place: two copies need not fit
            images = np.empty((source.num_examples, *image.shape), image.dtype)
        images[number], labels[number] = image, label
    return from_arrays(images, labels, source.num_classes, source.class_names)


def _options():
    options = tf.data.Options()
    # Each example goes to exactly one worker; by file would fail, for there are no files here.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    options.deterministic = True
    return options
