"""Adding up what the replicas have: many small tensors travel as one."""

from collections import defaultdict

import tensorflow as tf

from kdist.training.beside import device_of

# The name scope of what is done to add up: profiles tell its time from that of computing by it.
SCOPE = "all_reduce_sum"

# Copying a tensor into a packed one costs its bytes; sending it alone costs a fixed time, about
# that of copying this many.
_PACK_BELOW_BYTES = 256 * 1024


def all_reduce_sum(tensors):
    """The sums of each tensor over all replicas; to be called in replica context.

    Small tensors of one type are sent as one vector. Every replica gets the same bits.

    Args:
        tensors: a list of tensors or `tf.IndexedSlices`; on all replicas the same shapes.
    """
    with tf.name_scope(SCOPE):
        return _all_reduced(tensors)


def sums_over_replicas(strategy, parts):
    """NumPy arrays: the sums over all replicas of the tensors that `parts` gives on each.

    Args:
        strategy: all of its workers have to call this, between two steps.
        parts: a function that is called in replica context, and gives a list.
    """
    on_replica = tf.autograph.experimental.do_not_convert(lambda: all_reduce_sum(parts()))
    sums = strategy.run(on_replica)
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
    """The sums, asked for by kind: TensorFlow's collectives take no mixed list."""
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
    """What tensors that travel together have alike: their type and, in a group, their device."""
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
