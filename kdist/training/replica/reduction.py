"""All-reduce over replicas that packs many small tensors into one message."""

from collections import defaultdict

import tensorflow as tf

from kdist.compat.tensorflow import run_once
from kdist.training.replica.colocation import device_of

# Name scope of the reduction, by which profiles separate its time from computation.
SCOPE = "all_reduce_sum"

# Packing a tensor costs a copy; sending it alone costs a fixed time, about that of copying this
# many bytes.
_PACK_BELOW_BYTES = 256 * 1024


def all_reduce_sum(tensors):
    """Returns the sum of each tensor over all replicas, in replica context.

    Small tensors of the same type are sent as one vector. All replicas receive the same bits.

    Args:
        tensors: list of tensors or `tf.IndexedSlices`, with the same shapes on all replicas.
    """
    with tf.name_scope(SCOPE):
        return _all_reduced(tensors)


def sums_over_replicas(strategy, parts):
    """Returns NumPy arrays with the sums over replicas of the tensors that `parts` returns on each.

    Args:
        strategy: the strategy. All its workers must call this, between two steps.
        parts: function that returns a list of tensors, called in replica context.
    """
    sums = run_once(strategy, lambda: all_reduce_sum(parts()))
    return [strategy.experimental_local_results(total)[0].numpy() for total in sums]


def _all_reduced(tensors):
    packs = defaultdict(list)
    for number, tensor in enumerate(tensors):
        packs[_kind(tensor) if _is_small(tensor) else number].append(number)
    groups = list(packs.values())
    sent = [_packed([tensors[number] for number in group]) for group in groups]
    results = [None] * len(tensors)
    for group, total in zip(groups, _sums(sent), strict=True):
        parts = _unpacked(total, [tensors[number] for number in group])
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
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, [tensors[n] for n in numbers])
        for number, total in zip(numbers, totals, strict=True):
            sums[number] = total
    return sums


def _kind(tensor):
    """Returns the type and, in a device group, the device, which packed tensors share."""
    in_groups = hasattr(tf.distribute.get_strategy(), "groups")
    return tensor.dtype.name, device_of(tensor) if in_groups else ""


def _is_small(tensor):
    known = isinstance(tensor, tf.Tensor) and tensor.shape.is_fully_defined()
    return known and tensor.shape.num_elements() * tensor.dtype.size < _PACK_BELOW_BYTES


def _packed(tensors):
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def _unpacked(total, like):
    if len(like) == 1:
        return [total]
    sizes = [tensor.shape.num_elements() for tensor in like]
    parts = tf.split(total, sizes)
    return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, like, strict=True)]
