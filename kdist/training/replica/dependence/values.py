"""Describes how a tensor depends on the rows of the batch.

The degree of a tensor is the power by which it grows if every row of the batch is repeated: 0 for
means, weights, and the values of single rows, 1 for sums and for the number of rows, None if the
graph does not tell.
"""

import dataclasses

# The axis of rows exists, but its position is unknown.
SOME_AXIS = -1


@dataclasses.dataclass(frozen=True)
class Dependence:
    """Dependence of one tensor on the rows of the batch.

    Attributes:
        degree: the power by which it grows with repeated rows; None if that is unknown.
        axis: position of the axis of rows; None without one, -1 if its position is unknown.
        is_fixed: it does not depend on the batch, and is equal on all replicas.
        may_be_divided: a constant factor may have been computed from the number of rows.
        may_count_rows: it has no axis of rows, and a constant from which it was computed may be the
            number of this replica's rows.
        is_sized_by_values: its shape may depend on values of the batch.
        is_of_gradient: it was computed from the gradient of a tape.
        is_of_weights: it was computed from the gradient with respect to variables.
        is_nonlinear: it is not a linear function of gradients with respect to variables, except for
            reduced ones.
        is_reduced: it was computed from gradients of the whole batch.
        is_over_rows: it has no axis of rows, and was computed from a sum, mean, … over rows.
        mixes_rows: a row was combined with all other rows, or with such a sum or mean.
        is_permuted: its rows have other positions than in the batch.
        has_rows_again: its first axis has all rows of the batch, followed by all rows again.
        is_position: it consists of the positions of rows, or was computed from these: integers or
            truth values.
        is_random: it was computed from random numbers.
        counts_rows: it was computed from the number of rows alone.
        is_one_row: it was computed from one row, in a loop.
        is_chosen: its rows are some of the batch, whose number depends on values.
        has_other_rows: its axis of rows has others, too, such as padding, or is a part of such.
        is_by_row: its first axis is that of rows, and each is computed from the same row of the
            batch, so that the rows of all replicas together are those of one device.
        elements: the dependence of each element, if it is a vector such as a shape.
    """

    degree: float | None = 0.0
    axis: int | None = None
    is_fixed: bool = False
    may_be_divided: bool = False
    may_count_rows: bool = False
    is_sized_by_values: bool = False
    is_of_gradient: bool = False
    is_of_weights: bool = False
    is_nonlinear: bool = False
    is_reduced: bool = False
    is_over_rows: bool = False
    mixes_rows: bool = False
    is_permuted: bool = False
    has_rows_again: bool = False
    is_position: bool = False
    is_random: bool = False
    counts_rows: bool = False
    is_one_row: bool = False
    is_chosen: bool = False
    has_other_rows: bool = False
    is_by_row: bool = False
    elements: tuple["Dependence", ...] | None = None

    @property
    def has_scaled_rows(self) -> bool:
        """True for values of rows that were multiplied or divided by the number of rows."""
        return self.axis is not None and self.degree not in (0, None)

    @property
    def summed_degree(self) -> float | None:
        """Degree of the sum over all elements, which is what a gradient differentiates."""
        if self.degree is None or self.axis is None:
            return self.degree
        return self.degree + 1


FIXED = Dependence(is_fixed=True)
FIXED_OR_ROWS = Dependence(is_fixed=True, may_count_rows=True)
MEAN = Dependence()
SUM = Dependence(degree=1.0)
NUMBER_OF_ROWS = Dependence(degree=1.0, counts_rows=True)
UNKNOWN_OVER_ROWS = Dependence(degree=None, is_over_rows=True)
ROWS = Dependence(axis=0, is_by_row=True)
UNKNOWN = Dependence(degree=None)
ROWS_OF_UNKNOWN_DEGREE = Dependence(degree=None, axis=0, is_by_row=True)


def elements_of(dependence, operand):
    """Returns the dependence of each element of a vector."""
    return dependence.elements or [dependence] * operand.shape[0]


def vector_of(elements):
    """Returns the dependence of a vector, given those of its elements."""
    is_fixed = all(e.is_fixed for e in elements)
    return FIXED if is_fixed else Dependence(degree=None, elements=tuple(elements))
