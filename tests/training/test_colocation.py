"""Operations are placed on the devices of their inputs."""

import pytest
import tensorflow as tf

from kdist.training.replica.colocation import colocate_with_inputs, device_of


def devices_in(function, *arguments):
    """Returns the requested devices of a function's operations, by type."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph
    return {op.type: op.device.rpartition("device:")[2] for op in graph.get_operations()}


def test_the_largest_input_determines_the_device():
    def compute():
        with tf.device("CPU:1"):
            large = tf.ones([4, 4])
        with tf.device("CPU:2"):
            small, one = tf.ones([4]), tf.constant(2.0)
        with tf.device("CPU:0"), colocate_with_inputs():
            return tf.sqrt(small * (one * large))

    found = devices_in(compute)
    assert found["Mul"] == found["Sqrt"] == "CPU:1"


def test_operations_on_scalars_are_not_moved():
    def compute():
        with tf.device("CPU:2"):
            one = tf.constant(2.0)
        with tf.device("CPU:3"), colocate_with_inputs():
            return one * one

    assert devices_in(compute)["Mul"] == "CPU:3"


def test_an_inner_device_takes_precedence():
    def compute():
        with tf.device("CPU:1"):
            large = tf.ones([4, 4])
        with colocate_with_inputs(), tf.device("CPU:2"):
            return tf.sqrt(large)

    assert devices_in(compute)["Sqrt"] == "CPU:2"


@pytest.mark.parametrize("nested", [False, True])
def test_captured_variables_determine_the_device(nested):
    with tf.device("CPU:1"):
        variable = tf.Variable([1.0, 2.0])
    found = {}

    def compute():
        with tf.device("CPU:0"), colocate_with_inputs():
            doubled = variable + variable
            found["sum"] = device_of(doubled)
            found["read"] = device_of(variable.read_value().op.inputs[0])
            variable.assign(doubled)
            return doubled

    if nested:

        def looped():
            return tf.while_loop(lambda n: n < 2, lambda n: (compute(), n + 1)[1:], [0])

        devices_in(looped)
    else:
        devices_in(compute)
    assert found["sum"].endswith("CPU:1")
    assert found["read"].endswith("CPU:1")
