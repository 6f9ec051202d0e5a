import inspect

from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)

from kdist.strategies import create_strategy
from kdist.tensorflow_internals import each_worker_has, first_replica, has_started
from kdist.testing import python


def test_tensorflow_has_started_after_the_first_operation():
    code = """
import json, tensorflow as tf
from kdist.tensorflow_internals import has_started
before = has_started()
tf.constant(0)
print(json.dumps([before, has_started()]))
"""
    assert python(code) == [False, True]
    import tensorflow as tf

    tf.constant(0)
    assert has_started()


def test_the_devices_of_a_worker():
    """TensorFlow asks in the same way as ever, and gets its own answer afterwards."""
    own = CollectiveAllReduceExtended._initialize_local_devices
    assert list(inspect.signature(own).parameters) == ["self", "cluster_resolver", "worker_device"]
    with each_worker_has(["CPU:0", "CPU:1"]):
        names, kind = CollectiveAllReduceExtended._initialize_local_devices(None, None, "/job:w")
    assert names == ("/job:w/device:CPU:0", "/job:w/device:CPU:1")
    assert kind == "CPU"
    assert CollectiveAllReduceExtended._initialize_local_devices is own


def test_the_first_replica_of_one_process_is_the_jobs():
    assert first_replica(create_strategy("mirrored", 2)) == 0
