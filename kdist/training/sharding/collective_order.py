"""Order of the collectives of a step, for those that TensorFlow would run in the wrong one.

    order = CollectiveOrder(graph)                  # before the operations of a step are created
    order.add(collective, after=312)                # created last, and needed by operation 313
    order.establish()                               # when all have been created

On GPUs, all processes have to start collectives in the same order. TensorFlow orders those of a
function as they were created. Others are created without this order (`is_ordered=False` of
`kdist.compat.tensorflow.all_gather`), and wait here for the one before them.
"""

import itertools

import tensorflow as tf

from kdist.compat.tensorflow import wait_for


class CollectiveOrder:
    """Order of all collectives of a step, among which are some that TensorFlow does not order.

    Each has a place between the operations of the graph, in the order in which these were created:
    after all on which it depends, and before all that depend on it. So no two wait for each other.

    Args:
        graph: the graph, before the operations of the step are created.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._first = 0 if tf.executing_eagerly() else len(graph.get_operations())
        self._places: dict[tf.Operation, float] = {}

    def __contains__(self, operation):
        return operation in self._places

    def add(self, collective: tf.Operation, after: int):
        """Adds a collective that was created without an order.

        Args:
            collective: the collective.
            after: number of the last operation of the graph on which it depends. All that depend
                on it have higher numbers.
        """
        self._places[collective] = after + 0.5

    def establish(self):
        """Lets each collective wait for the one before it, unless TensorFlow does."""
        if not self._places:
            return
        operations = self._graph.get_operations()
        number_of = {each: number for number, each in enumerate(operations)}
        places = {
            each: number_of[each] for each in collectives_since(self._graph, self._first)
        } | self._places
        # Of the micro-step before.
        last = getattr(self._graph, "_kdist_last_collective", None)
        if last is not None:
            places[last] = -1
        sequence = sorted(places, key=lambda each: (places[each], number_of[each]))
        for before, after in itertools.pairwise(sequence):
            if before in self or after in self or before is last:
                wait_for(after, before)
        self._graph._kdist_last_collective = sequence[-1]


def is_collective(operation: tf.Operation) -> bool:
    """Returns True if processes exchange tensors in an operation."""
    return operation.type.startswith("Collective")


def collectives_since(graph: tf.Graph, first: int) -> list[tf.Operation]:
    """Returns the collectives among the operations of a graph from number `first`."""
    return [each for each in graph.get_operations()[first:] if is_collective(each)]
