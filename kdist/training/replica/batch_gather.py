"""`kdist.gather_batch`: the rows of all replicas, for losses and layers that compute across rows.

Each replica holds its own rows of a batch. The gathered tensor is a sum over replicas, whose
gradient is the sum of the gradients, and the gradient of padding is a slice. A replica's rows
therefore receive the gradients of the losses of all replicas, so that the total gradient is that of
one device.
"""

import keras
import tensorflow as tf

from kdist.compat.keras import attach, attached_to
from kdist.training.replica import step as steps
from kdist.training.replica.dependence.values import FIXED
from kdist.training.replica.reduction import gather_rows


@tf.autograph.experimental.do_not_convert
def gather_batch(tensors):
    """Returns the rows that all replicas hold of each tensor, in the order of the batch.

    For computations that mix the rows of a batch: contrastive losses, negatives within the batch,
    statistics of a layer of your own. Under several replicas they see one replica's rows only, and
    train to other numbers than on one device. Call this in a loss, in a layer's `call`, or in a
    `train_step`. Values and gradients are then those of one device. On one device, and outside of
    replicas, the result is `tensors`.

    If a compiled loss mixes rows, `compile(..., gather_batch=True)` needs no other change.

    In each step, the gathered tensors are added up over replicas, and their gradients as well: two
    reductions of (B, …) values, for B rows of the global batch. Each replica holds them in memory,
    and computes on them what follows. Gather embeddings rather than images.

    A loss over gathered rows must be a mean, as in most losses, or a scalar. A sum that Keras
    reduces, or a vector that is differentiated, is refused.

    Args:
        tensors: a dense tensor of shape (b, …), for b rows on this replica, or a structure of such.
            Numbers or booleans. b may be a multiple of the replica's rows, for several views of
            each. One call with all tensors is cheaper than one call for each.

    Returns:
        The same structure of tensors of shape (B, …). Keras's masks, and the logits of outputs of
        activations, are gathered likewise.

    Raises:
        TypeError: a tensor is sparse or ragged, has another type, or is symbolic.
        ValueError: a tensor is a scalar; or the model trains with `accumulate` or `local_steps`,
            which do not have the whole batch at once.

    Example:

        class InBatchSoftmax(keras.losses.Loss):
            # y_pred: embeddings of queries and of their candidates, side by side.
            def call(self, y_true, y_pred):
                queries, candidates = keras.ops.split(kdist.gather_batch(y_pred), 2, axis=-1)
                scores = keras.ops.matmul(queries, keras.ops.transpose(candidates))
                labels = keras.ops.arange(keras.ops.shape(scores)[0])
                return keras.losses.sparse_categorical_crossentropy(
                    labels, scores, from_logits=True
                )
    """
    return _gathered(tensors, is_whole_loss=False)


def over_whole_batch(loss):
    """Returns a loss function that computes on the rows of all replicas, as on one device.

    Args:
        loss: function of targets, predictions, and sample weights (or None).
    """

    def whole_loss(y_true, y_pred, sample_weight=None):
        step = steps.current()
        gathered = _gathered((y_true, y_pred, sample_weight), is_whole_loss=True)
        if step is None:
            return loss(*gathered)
        with step.whole_loss():
            value = loss(*gathered)
        if value is not None and value.shape.rank:
            raise ValueError(
                'gather_batch=True needs losses that are reduced, not reduction="none"'
            )
        return value

    return whole_loss


def _gathered(tensors, is_whole_loss):
    leaves = tf.nest.flatten(tensors)
    for leaf in leaves:
        _check(leaf)
    step = steps.current()
    if step is not None:
        step.note_gather(is_whole_loss)
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tensors
    attached = [attached_to(leaf) for leaf in leaves]
    values = [*leaves, *(value for each in attached for value in each.values())]
    present = [tf.convert_to_tensor(value) for value in values if value is not None]
    rows = iter(_rows_of_all_replicas(present, step))
    leaves = [None if leaf is None else next(rows) for leaf in leaves]
    for leaf, each in zip(leaves, attached, strict=True):
        attach(leaf, **{name: next(rows) for name in each})
    return tf.nest.pack_sequence_as(tensors, leaves)


def _check(leaf):
    if leaf is None:
        return
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor) or not hasattr(leaf, "shape"):
        raise TypeError(f"gather_batch expects dense tensors, got {type(leaf).__name__}")
    if isinstance(leaf, keras.KerasTensor):
        raise TypeError(
            f"gather_batch cannot gather the symbolic tensor {leaf.name!r}. Call it in a layer's "
            "`call`, in a loss, or in `train_step`, where rows exist"
        )
    dtype = tf.as_dtype(leaf.dtype)
    if not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        raise TypeError(f"gather_batch: replicas cannot exchange values of type {dtype.name}")
    if len(leaf.shape) == 0:
        raise ValueError(
            f"gather_batch expects a tensor with rows, of shape (b, …), got a scalar ({leaf!r})"
        )


def _rows_of_all_replicas(tensors, step):
    if step is None:
        return gather_rows(tensors)[0]
    gathered = step.add_up(tensors, lambda parts: gather_rows(parts, step.share)[0])
    return [step.dependence.note(tensor, FIXED) for tensor in gathered]
