"""Collectives of replicas: all-reduce with few messages, reduce-scatter, and all-gather."""

import contextlib
import functools
import math
import threading
from collections import defaultdict

import tensorflow as tf

from kdist.compat.tensorflow import (
    all_gather,
    all_reduce_between_workers,
    all_to_all,
    run_once,
)
from kdist.training.replica.colocation import device_of
from kdist.training.scopes import (
    is_multi_worker,
    num_local_replicas,
    this_local_replica,
    this_replica,
)

_this_thread = threading.local()

# Name scope of the reduction, by which profiles separate its time from computation.
SCOPE = "all_reduce_sum"
# Name scope of the gathering of weights from their parts.
GATHER = "gather_weights"

# Packing a tensor costs a copy; sending it alone costs a fixed time, about that of copying this
# many bytes.
_PACK_BELOW_BYTES = 256 * 1024
# Between processes, a message costs more: parts of this size are sent together. Larger ones would
# wait for more gradients. (`benchmarks/sharding.py`)
_BUCKET_BYTES = 4 * 1024 * 1024


def all_reduce_sum(tensors, call=None):
    """Returns the sum of each tensor over all replicas, in replica context.

    Small tensors of the same type are sent as one vector. All replicas receive the same bits.

    Args:
        tensors: list of tensors or `tf.IndexedSlices`, with the same shapes on all replicas.
        call: function that calls a function of a list of tensors, such as `SharedTrace.map`, to
            pack and unpack. Its arguments are the function, the tensors, and a key of what the
            function depends on besides them. By default, it is called here.
    """
    with tf.name_scope(SCOPE):
        return _all_reduced(tensors, call or _called)


def reduce_scatter_sum(tensors, divisions, is_ordered=True):
    """Returns this replica's part of the sum over replicas of each tensor, in replica context.

    Unlike `all_reduce_sum`, a device receives only its own part of each tensor from each of the
    others.

    Args:
        tensors: list of tensors, with the same shapes on all replicas.
        divisions: their divisions, `EqualParts`, into one part per replica of the job. With one
            part per replica of this process, the sums are those over its replicas.
        is_ordered: as in `gather_own_parts`.
    """
    strategy = tf.distribute.get_strategy()
    pairs = list(zip(tensors, divisions, strict=True))
    with tf.name_scope(SCOPE):
        if pairs and pairs[0][1].count > num_local_replicas(strategy):
            return _reduce_scatter_between_workers(
                [division.stacked(tensor) for tensor, division in pairs], is_ordered
            )
        parts = [[d.part(tensor, number) for number in range(d.count)] for tensor, d in pairs]
        sent = iter(of_all_replicas([part for tensor in parts for part in tensor]))
        received = [[next(sent) for _ in tensor] for tensor in parts]
        here = this_local_replica()
        return [tf.add_n(tensor[here]) for tensor in received]


def _reduce_scatter_between_workers(parts, is_ordered):
    """Returns this replica's part of sums over the replicas of the job.

    Args:
        parts: tensors of shape (N, …), a part for each of N replicas.
    """
    buckets = buckets_of(parts)
    # TensorFlow has no reduce-scatter for CPUs.
    sums = [tf.reduce_sum(each, 0) for each in _exchanged_rows(buckets, is_ordered)]
    return _taken_apart(sums, [[each.shape[1:] for each in bucket] for bucket in buckets])


def _exchanged_rows(buckets, is_ordered=True):
    """Returns the rows that each replica of the job has sent to this one, of each bucket.

    Args:
        buckets: lists of tensors of shape (N, …), with a row for each of N replicas.
        is_ordered: as in `gather_own_parts`.

    Returns:
        A matrix for each bucket, whose rows are in the order of the replicas' ranks.
    """
    ranks = _replicas_by_rank(tf.distribute.get_strategy())
    sent = [tf.concat([tf.reshape(each, (len(ranks), -1)) for each in b], 1) for b in buckets]
    if not _are_in_order(ranks):
        sent = [tf.gather(each, ranks) for each in sent]
    return _exchanged(functools.partial(all_to_all, is_ordered=is_ordered), sent)


def exchange_rows(tensors):
    """Returns the rows that replicas have sent to this one, in replica context.

    Args:
        tensors: matrices, with the same shapes on all replicas. Row n is sent to replica n of the
            job, or of this process if there are as many rows.

    Returns:
        A matrix of the same shape for each one. Its row n is from replica n.
    """
    if not tensors:
        return []
    if tensors[0].shape[0] > num_local_replicas(tf.distribute.get_strategy()):
        buckets = buckets_of(tensors)
        pairs = zip(_in_order(_exchanged_rows(buckets)), buckets, strict=True)
        return [rows for whole, b in pairs for rows in tf.split(whole, [t.shape[1] for t in b], 1)]
    here, sent = this_local_replica(), [tf.unstack(each) for each in tensors]
    received = iter(of_all_replicas([row for rows in sent for row in rows]))
    return [tf.stack([next(received) for _ in rows][here]) for rows in sent]


def sum_over_workers(tensors):
    """Returns the sum of each tensor over the replicas of the same place on all workers.

    Called in replica context, by all replicas. All of these receive the same bits.
    """
    with tf.name_scope(SCOPE):
        buckets = buckets_of(tensors)
        sent = [_concatenated(bucket) for bucket in buckets]
        sums = _exchanged(all_reduce_between_workers, sent)
        return _taken_apart(sums, [[each.shape for each in bucket] for bucket in buckets])


def of_all_replicas(tensors):
    """Returns the values that each tensor has on the replicas of this process, in their order.

    Nothing is copied before another device reads it. Called in replica context, by all replicas.
    """
    return _merged(lambda strategy, values: values, tensors)


def gather_parts(tensors):
    """Returns the values that each tensor has on the replicas of the job, in their order.

    Called in replica context, by all replicas. With several workers, the values of a tensor may be
    one tensor, their concatenation.
    """
    strategy = tf.distribute.get_strategy()
    if not is_multi_worker(strategy):
        return of_all_replicas(tensors)
    buckets = buckets_of(tensors)
    gathered = _exchanged(all_gather, [_concatenated(bucket) for bucket in buckets])
    pairs = zip(buckets, gathered, strict=True)
    return [[whole] for bucket, vector in pairs for whole in _wholes(bucket, vector)]


def gather_own_parts(tensors, is_ordered):
    """Returns the values that each tensor has on the replicas of the job, as one concatenation.

    All are sent together. Each process has one replica. Called in replica context, also where
    replicas cannot meet.

    Args:
        tensors: this replica's tensors, of one type, and of the same shapes on all replicas.
        is_ordered: whether TensorFlow runs this after the collectives that were created before it.
            Otherwise the caller makes sure that all processes run them in the same order.
    """
    sent = _concatenated(tensors)
    (vector,) = all_gather(tf.distribute.get_strategy(), [sent], is_ordered)
    return _wholes(tensors, vector)


def _wholes(tensors, vector):
    """Returns the concatenation of the values of each tensor on all replicas.

    Args:
        tensors: this replica's values.
        vector: the values of all tensors on the first rank, on the second one, and so on.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    sizes = [math.prod(tensor.shape) for tensor in tensors]
    # Telemetry reads the shapes of the graph that TensorFlow has optimized.
    vector = tf.ensure_shape(vector, [replicas * sum(sizes)])
    (by_replica,) = _in_order([tf.reshape(vector, (replicas, -1))])
    parts = tf.split(by_replica, sizes, 1) if len(sizes) > 1 else [by_replica]
    return [
        tf.reshape(part, (replicas * tensor.shape[0], *tensor.shape[1:]))
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def find_ranks(strategy):
    """Finds the ranks of replicas in collectives, which `gather_parts` and others need.

    TensorFlow orders tasks by name, such as task 10 before task 2, and GPUs by their links.

    Args:
        strategy: a strategy of several workers, all of which must call this.
    """

    def replicas_by_rank():
        return _exchanged(all_gather, [tf.constant([this_replica()], tf.int32)])

    (found,) = run_once(strategy, replicas_by_rank)
    (ranks, *_) = strategy.experimental_local_results(found)
    strategy.extended._kdist_replicas_by_rank = tuple(ranks.numpy().tolist())


def _replicas_by_rank(strategy):
    return strategy.extended._kdist_replicas_by_rank


def _are_in_order(ranks):
    return list(ranks) == sorted(ranks)


def _in_order(matrices):
    """Returns matrices with a row for each rank, with the rows in the order of the replicas."""
    ranks = _replicas_by_rank(tf.distribute.get_strategy())
    if _are_in_order(ranks):
        return matrices
    places = [ranks.index(number) for number in range(len(ranks))]
    return [tf.gather(each, places) for each in matrices]


def _exchanged(exchange, tensors):
    """Returns this replica's results of a collective for each tensor."""
    here = this_local_replica()
    return [results[here] for results in _merged(exchange, tensors)]


def _merged(function, tensors):
    """Returns `function(strategy, values)` of the values of each tensor on this worker's replicas.

    Called in replica context, by all replicas.
    """
    if not tensors:
        return []

    def merged(strategy, *values):
        return [function(strategy, strategy.experimental_local_results(each)) for each in values]

    with _kept_attributes():
        return tf.distribute.get_replica_context().merge_call(
            tf.autograph.experimental.do_not_convert(merged), args=tuple(tensors)
        )


def gather_rows(tensors, share=None):
    """Returns the rows of all replicas of each tensor, and where this replica's rows begin.

    The result is a sum over replicas of each one's rows, padded with zeros to the size of all. Its
    gradient is therefore the sum of the gradients, also if replicas have different numbers of rows.

    Args:
        tensors: list of tensors of shape (b, …), for b rows on this replica.
        share: the `RowShare` of this replica, which may tell that all have the same number of rows.

    Returns:
        A pair of lists: tensors of shape (B, …), and indices of first rows.
    """
    if not tensors:
        return [], []
    if share is not None:
        tensors = [share.own_rows(tensor) for tensor in tensors]
    replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    replica = this_replica()
    parts, starts = [], []
    around = _rows_around(tensors, replica, replicas, share)
    for tensor, (before, after) in zip(tensors, around, strict=True):
        # Collectives on GPUs support few integer types.
        sent = tensor if tensor.dtype.is_floating else tf.cast(tensor, tf.int64)
        parts.append(tf.pad(sent, [[before, after], *[[0, 0]] * (tensor.shape.rank - 1)]))
        starts.append(before)
    gathered = [
        tf.ensure_shape(tf.cast(whole, tensor.dtype), [None, *tensor.shape[1:]])
        for tensor, whole in zip(tensors, all_reduce_sum(parts), strict=True)
    ]
    return gathered, starts


def _rows_around(tensors, replica, replicas, share):
    """Returns (rows of replicas before this one, rows of those after it) for each tensor."""
    if share is not None and share.is_same_on_all(replicas):
        sizes = [tensor.shape[0] for tensor in tensors]
        if None not in sizes:
            return [(replica * size, (replicas - 1 - replica) * size) for size in sizes]
    own = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
    rows = tf.pad(own[None], [[replica, replicas - 1 - replica], [0, 0]])
    (rows,) = all_reduce_sum([rows])
    before, after = (
        tf.unstack(tf.reduce_sum(part, 0)) for part in (rows[:replica], rows[replica + 1 :])
    )
    return list(zip(before, after, strict=True))


def sums_over_replicas(strategy, parts):
    """Returns NumPy arrays with the sums over replicas of the tensors that `parts` returns on each.

    Args:
        strategy: the strategy. All its workers must call this, between two steps.
        parts: function that returns a list of tensors, called in replica context.
    """
    sums = run_once(strategy, lambda: all_reduce_sum(parts()))
    return [strategy.experimental_local_results(total)[0].numpy() for total in sums]


def gathered_on_workers(strategy, copies):
    """Returns the tensors of all replicas, or concatenations of some, in the order of replicas.

    Args:
        strategy: a strategy of several workers, all of which must call this, between two steps.
        copies: an array or a tensor of each replica of this worker, of one shape everywhere.
    """

    def parts():
        own = copies[this_local_replica()]
        return gather_parts([tf.convert_to_tensor(own)])[0]

    return [strategy.experimental_local_results(each)[0] for each in run_once(strategy, parts)]


def _called(function, tensors, _):
    return function(tensors)


def buckets_of(tensors, most_bytes=math.inf):
    """Returns lists of successive tensors of one type that are sent together.

    Args:
        tensors: tensors or variables.
        most_bytes: bytes that a list of several tensors may have, if less than 4 MiB.
    """
    buckets, size = [], 0
    for tensor in tensors:
        own = tensor.shape.num_elements() * tensor.dtype.size
        is_alike = buckets and buckets[-1][-1].dtype == tensor.dtype
        if is_alike and size + own <= min(most_bytes, _BUCKET_BYTES):
            buckets[-1].append(tensor)
            size += own
        else:
            buckets.append([tensor])
            size = own
    return buckets


def _taken_apart(vectors, shapes):
    """Returns the tensors of which each bucket is one vector, given the shapes in each bucket."""
    pairs = zip(vectors, shapes, strict=True)
    return [part for vector, of_bucket in pairs for part in _split(of_bucket, [vector])]


def _all_reduced(tensors, call):
    packs = defaultdict(list)
    for number, tensor in enumerate(tensors):
        packs[_kind(tensor) if _is_small(tensor) else number].append(number)
    groups = list(packs.values())
    sent = [_packed([tensors[number] for number in group], call) for group in groups]
    results = [None] * len(tensors)
    for group, total in zip(groups, _sums(sent), strict=True):
        parts = _unpacked(total, [tensors[number] for number in group], call)
        for number, part in zip(group, parts, strict=True):
            results[number] = part
    return results


def _sums(tensors):
    """Returns the sums, one call per kind: TensorFlow's collectives do not accept mixed lists."""
    context = tf.distribute.get_replica_context()
    sums = [None] * len(tensors)
    kinds = [_kind(tensor) for tensor in tensors]
    for kind in dict.fromkeys(kinds):
        numbers = [number for number, other in enumerate(kinds) if other == kind]
        with _kept_attributes():
            totals = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[n] for n in numbers])
        for number, total in zip(numbers, totals, strict=True):
            sums[number] = total
    return sums


@contextlib.contextmanager
def attributes_of_replica(objects):
    """Returns a context manager in which each replica has its own tensors in attributes of objects.

    Replicas are traced in turns, in threads that change where they meet. What one of them has
    stored, such as `self.batch_size = tf.shape(x)[0]`, would be another one's after that.
    """
    before, _this_thread.objects = getattr(_this_thread, "objects", ()), tuple(objects)
    try:
        yield
    finally:
        _this_thread.objects = before


@contextlib.contextmanager
def _kept_attributes():
    kept = [
        (vars(one), name, value)
        for one in getattr(_this_thread, "objects", ())
        for name, value in vars(one).items()
        if isinstance(value, tf.Tensor) and hasattr(value, "graph")
    ]
    yield
    for attributes, name, value in kept:
        attributes[name] = value


def _kind(tensor):
    """Returns the type and, in a device group, the device, which packed tensors share."""
    in_groups = hasattr(tf.distribute.get_strategy(), "groups")
    return tensor.dtype.name, device_of(tensor) if in_groups else ""


def _is_small(tensor):
    known = isinstance(tensor, tf.Tensor) and tensor.shape.is_fully_defined()
    return known and tensor.shape.num_elements() * tensor.dtype.size < _PACK_BELOW_BYTES


def _packed(tensors, call):
    return tensors[0] if len(tensors) == 1 else call(_concatenated, tensors, None)


def _concatenated(tensors):
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpacked(total, like, call):
    if len(like) == 1:
        return [total]
    shapes = tuple(tuple(tensor.shape) for tensor in like)
    return call(functools.partial(_split, shapes), [total], shapes)


def _split(shapes, totals):
    parts = tf.split(totals[0], [math.prod(shape) for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
