"""Dependence of the tensors of one replica's step on the batch: what is recorded, and questions.

`BatchDependence` follows the operations of a graph. Some of them hide what they compute, such as
loops, and others are computed by kdist, such as the rows of all replicas: their tensors are
recorded here, by the hooks and by the `ReplicaStep`.
"""

import dataclasses
import functools

import keras
import tensorflow as tf

from kdist.compat.tensorflow import is_recorded
from kdist.training.replica.dependence.values import FIXED, ROWS, SOME_AXIS, Dependence
from kdist.training.replica.dependence.walk import BatchDependence
from kdist.training.replica.gradients import values_of
from kdist.training.replica.row_shares import RowShare, tensors_of


class KnownRowsError(Exception):
    """The step has to be traced again, with a number of rows that is unknown until it runs.

    A loss is computed from the rows of all replicas, and constants in its graph may have been
    computed from the number of this replica's rows.
    """


class StepDependence:
    """Dependence of the tensors of one replica's step on the rows of the batch.

    Args:
        share: the replica's `RowShare`.

    Attributes:
        hides_rows: the tensors of the step have an unknown number of rows. None if they have a
            known one, and the step may raise `KnownRowsError`.
        holds_all_rows: tensors with rows may be those of all replicas, which the step has gathered.
    """

    def __init__(self, share: RowShare):
        self._share = share
        self.hides_rows: bool | None = False
        self.holds_all_rows = False

    @functools.cached_property
    def values(self) -> BatchDependence:
        """The dependence of all values, which `find_function` reads."""
        return BatchDependence(self._share.tensors, self.static_rows, self._static_batch_rows)

    @functools.cached_property
    def _gradients(self):
        """Follows what a program does to the gradients of its tapes, and no other values."""
        numbers = self.static_rows, self._static_batch_rows
        return BatchDependence(self._share.tensors, *numbers, rows_are_known=False)

    @property
    def static_rows(self) -> int | None:
        """The number of the replica's rows, if it is known before the step runs."""
        share = self._share
        return self._known(share.batch_rows if share.is_repeated else share.rows)

    @property
    def _static_batch_rows(self):
        return self._known(self._share.batch_rows)

    def _known(self, rows):
        return rows if isinstance(rows, int) and not self.hides_rows else None

    @property
    def is_divided(self) -> bool:
        """False if the replica is known to have all rows of the batch."""
        return self.static_rows is None or self.static_rows != self._static_batch_rows

    def check_rows_are_unknown(self):
        """Raises a `KnownRowsError` if a constant may have been computed from their number."""
        if self.hides_rows is None and self.static_rows is not None and self.is_divided:
            raise KnownRowsError from None

    # Functions that several replicas call.

    def in_function(self, share: RowShare, replica) -> "StepDependence":
        """Returns the dependence within such a function: `share` and `replica` are arguments."""
        inner = StepDependence(share)
        inner.hides_rows, inner.holds_all_rows = self.hides_rows, self.holds_all_rows
        inner.note(replica, FIXED)
        return inner

    def found(self, outputs):
        """Returns how each tensor in a structure depends on the batch, for `take_over`."""
        return [(self.values.of(t), self._gradients.of(t)) for t in tensors_of(outputs)]

    def take_over(self, found, outputs):
        """Records the result of `found` for what a call of the function returns."""
        for tensor, (dependence, of_gradient) in zip(tensors_of(outputs), found, strict=True):
            self.values.note(tensor, dependence)
            self._gradients.note(tensor, of_gradient)

    # Values.

    def of(self, tensor) -> Dependence:
        """Returns the dependence of a tensor of a graph."""
        return self.values.of(tensor)

    def noted(self, tensor) -> Dependence | None:
        """Returns the dependence of a tensor that has been recorded, or None."""
        return self.values.noted(tensor)

    def note(self, tensor, dependence: Dependence):
        """Records how a tensor depends on the batch, and returns it."""
        self.values.note(tensor, dependence)
        return tensor

    def terms(self, value):
        """Returns [(factor, term, degree)] whose sum is `value`.

        The degree is 0 for a mean over rows, 1 for a sum over rows, and None for what is unknown.
        """
        noted = self.noted(value)
        if noted is not None:
            terms = [(1.0, value, noted)]
        elif is_eager(value):
            terms = [(1.0, value, Dependence(degree=None))]
        else:
            terms = self.values.terms(value)
        return [(f, term, self._degree(term, dependence)) for f, term, dependence in terms]

    def _degree(self, value, dependence):
        degree = dependence.summed_degree
        if degree == 0 or (degree == 1 and not dependence.may_be_divided):
            return int(degree)
        rows = value.shape[0] if value.shape.rank else 0
        is_per_row = rows is None or (rows == self.static_rows and bool(rows))
        return 1 if degree is None and is_per_row else None

    def is_mean_or_sum(self, value) -> bool:
        """Returns whether it is known how a value, such as a loss, depends on the rows."""
        dependence = self.of(value)
        return dependence.is_fixed or dependence.degree is not None

    def has_rows(self, tensor) -> bool:
        """Returns False for a tensor that is known to have no axis of rows."""
        return self.holds_all_rows or is_eager(tensor) or self.of(tensor).axis is not None

    def begins_with_rows(self, tensor) -> bool:
        """Returns False for a tensor whose first axis is known not to be that of rows."""
        if self.holds_all_rows or is_eager(tensor):
            return True
        axis = self.of(tensor).axis
        return axis is not None and axis < 1

    def is_in_order(self, tensor) -> bool:
        """Returns False if tensors of all replicas, joined along axis 0, differ from one device's.

        An unknown position of the axis of rows counts as 0. Ragged rows that are padded to the
        longest one have another length on each replica.
        """
        found = self.of(tensor)
        if found.axis not in (0, SOME_AXIS) or found.is_permuted or found.has_rows_again:
            return False
        return not (found.is_sized_by_values and tensor.shape.rank and None in tensor.shape[1:])

    def are_fixed(self, indices) -> bool:
        """Returns True if the indices of a lookup do not depend on the batch."""
        if not self.of(indices).is_fixed:
            return False
        # Indices that repeat for each row are constants, too, if the number of rows is.
        looked_up = indices.op.inputs[0] if indices.op.type == "Reshape" else indices
        rows = (looked_up.shape[0] or 0) if looked_up.shape.rank else 0
        if rows < 2 or rows not in {self.static_rows, *self.values.rows_of_parts}:
            return True
        values = tf.get_static_value(looked_up) if looked_up.shape.rank == 1 else None
        return values is not None and len(set(values.tolist())) == rows

    def check_counts_no_rows(self, value):
        """Raises a `KnownRowsError` if a constant in a value may be the number of rows."""
        if self.may_count_rows(value):
            self.check_rows_are_unknown()

    def may_count_rows(self, value) -> bool:
        """Returns True if a constant in a value may be the number of rows."""
        return is_in_graph(value) and self.of(value).may_count_rows

    def note_layer(self, inputs, outputs, is_of_keras, step_axis):
        """Records that a layer computes each row of its outputs from the same row of its inputs.

        BatchNormalization combines rows with their means, on purpose. Loops hide what they compute.

        Args:
            inputs: structure of tensors.
            outputs: structure of tensors.
            is_of_keras: whether the layer and its parts, such as a cell, are Keras's own. Others
                may combine rows.
            step_axis: axis along which the layer passes a state from one step to the next, or None.
        """
        results = list(filter(is_in_graph, keras.tree.flatten(outputs)))
        if not is_of_keras and any(self.of(tensor).mixes_rows for tensor in results):
            return
        sources = list(filter(is_in_graph, keras.tree.flatten(inputs)))
        found = [self.of(source) for source in sources]
        is_by_row = all(f.is_fixed or (f.is_by_row and f.degree == 0) for f in found)
        mixes_rows = step_axis is not None and any(f.axis == step_axis for f in found)
        sizes = {source.shape[0] for source in sources if source.shape.rank}
        for tensor in results:
            if is_by_row and tensor.shape.rank and tensor.shape[0] in sizes:
                self.note(tensor, ROWS)
            else:
                as_found = self.of(tensor)
                self.note(tensor, dataclasses.replace(as_found, mixes_rows=mixes_rows))

    def note_value_of_each_row(self, source, values):
        """Records that `values` has one element for each row of `source`, and returns it.

        Args:
            source: a tensor, any axis of which is that of rows.
            values: a vector, each element of which is computed from one row of `source`.
        """
        if is_in_graph(source):
            found = self.of(source)
            if found.axis is not None and found.degree == 0 and not found.mixes_rows:
                self.note(values, ROWS)
        return values

    def note_in_order(self, tensor):
        """Records that parts of the rows were joined in the order of the batch; returns them."""
        if is_eager(tensor):
            return tensor
        found = dataclasses.replace(self.of(tensor), is_permuted=False, has_rows_again=False)
        return self.note(tensor, found)

    def note_parts(self, parts, wholes):
        """Records that tensors are parts of the rows of others, such as micro-batches, in order."""
        for part, whole in zip(tensors_of(parts), tensors_of(wholes), strict=True):
            if is_in_graph(part) and is_in_graph(whole):
                self.note(part, self.of(whole))

    def note_sizes_of_parts(self, sizes):
        """Records the numbers of rows of such parts: integers, or tensors."""
        self.values.rows_of_parts = {size for size in sizes if isinstance(size, int)}

    # Gradients.

    def of_gradient(self, gradient) -> Dependence:
        """Returns what a program has done to gradients of its tapes to compute a tensor."""
        return self._gradients.of(gradient)

    def noted_gradient(self, gradient) -> Dependence | None:
        """Returns what has been recorded for a gradient, or None."""
        return self._gradients.noted(gradient)

    def is_changed_gradient(self, tensor) -> bool:
        """Returns True if a tensor is no linear function of gradients of a mean or a sum."""
        if not is_in_graph(tensor):
            return False
        found = self.of_gradient(tensor)
        return found.is_of_weights and (found.is_nonlinear or found.degree not in (0, 1))

    def is_weight(self, source) -> bool:
        """Returns True for a variable, and for a tensor without rows, such as a copy of one."""
        if isinstance(source, tf.Variable | keras.Variable):
            return True
        return is_in_graph(source) and self.of(source).axis is None

    def note_gradients(self, sources, gradients, degree, mixes_rows=False):
        """Records gradients of a tape.

        Args:
            sources: the list of variables or tensors with respect to which they were computed.
            gradients: structure of tensors, `tf.IndexedSlices`, and None, in the same order.
            degree: the degree of what was differentiated; None if it is unknown.
            mixes_rows: whether that has rows that were combined with others. Defaults to False.
        """
        for source, one in zip(sources, keras.tree.flatten(values_of(gradients)), strict=True):
            if one is not None:
                self._note_gradient(source, one, degree, mixes_rows)

    def _note_gradient(self, source, gradient, degree, mixes_rows):
        axis = None
        if is_in_graph(source):
            found = self.of(source)
            axis, mixes_rows = found.axis, mixes_rows or found.mixes_rows
        if degree is not None and axis is not None:
            degree -= 1
        dependence = Dependence(
            None if degree is None else float(degree),
            axis,
            mixes_rows=mixes_rows and axis is not None,
            # What another tape differentiates may be computed from it, such as a changed weight.
            is_over_rows=axis is None and is_recorded(),
        )
        self.note(gradient, dependence)
        of_gradient = dataclasses.replace(
            dependence, is_of_gradient=True, is_of_weights=self.is_weight(source)
        )
        self._gradients.note(gradient, of_gradient)

    def note_reduced_gradients(self, gradients):
        """Records gradients with respect to variables, or None, that are of the global batch."""
        of_batch = Dependence(is_of_gradient=True, is_of_weights=True, is_reduced=True)
        for gradient in filter(lambda g: g is not None, gradients):
            self._gradients.note(values_of(gradient), of_batch)
            self.note(values_of(gradient), FIXED)

    def note_product_gradients(self, sources, gradients, targets, output_gradients):
        """Records gradients of a tape, given those of the targets.

        Args:
            sources: as in `note_gradients`.
            gradients: as in `note_gradients`.
            targets: structure of tensors that were differentiated.
            output_gradients: the gradient of each target, or None.
        """
        degrees = set()
        pairs = zip(*map(keras.tree.flatten, (targets, output_gradients)), strict=True)
        for one, factor in pairs:
            if factor is None or is_eager(one) or is_eager(factor):
                return
            a, b = self.of(one), self.of(factor)
            is_per_row = a.axis is not None or b.axis is not None
            is_known = a.degree is not None and b.degree is not None
            degrees.add(a.degree + b.degree + is_per_row if is_known else None)
        self.note_gradients(sources, gradients, degrees.pop() if len(degrees) == 1 else None)


def is_eager(tensor) -> bool:
    """Returns True for what belongs to no graph."""
    return not hasattr(tensor, "graph")


def is_in_graph(tensor) -> bool:
    """Returns True for a tensor of a graph."""
    return isinstance(tensor, tf.Tensor) and not is_eager(tensor)
