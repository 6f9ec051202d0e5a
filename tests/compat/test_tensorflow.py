import inspect

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute import parameter_server_strategy_v2
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended,
)
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager import context
from tensorflow.python.ops import collective_ops

import kdist.launch
from kdist.compat.tensorflow import (
    MirroredExtended,
    canonical_device,
    collect_function_graphs,
    current_device,
    first_replica,
    has_started,
    heartbeat_timeout,
    preferred_dtype,
    watch_on_tapes,
    with_copies,
    with_sizes,
    worker_devices,
)
from kdist.strategies import create_strategy
from tests.forked import python


@pytest.mark.slow
def test_tensorflow_has_started_after_the_first_operation():
    code = """
import json, tensorflow as tf
from kdist.compat.tensorflow import has_started
before = has_started()
tf.constant(0)
print(json.dumps([before, has_started()]))
"""
    assert python(code) == [False, True]
    tf.constant(0)
    assert has_started()


def test_worker_devices():
    """TensorFlow's own function is restored afterwards."""
    own = CollectiveAllReduceExtended._initialize_local_devices
    assert list(inspect.signature(own).parameters) == ["self", "cluster_resolver", "worker_device"]
    with worker_devices(["CPU:0", "CPU:1"]):
        names, kind = CollectiveAllReduceExtended._initialize_local_devices(None, None, "/job:w")
    assert names == ("/job:w/device:CPU:0", "/job:w/device:CPU:1")
    assert kind == "CPU"
    assert CollectiveAllReduceExtended._initialize_local_devices is own


def test_the_first_replica_of_one_process_is_the_jobs():
    assert first_replica(create_strategy("mirrored", 2)) == 0


def test_collected_graphs_are_partitioned_by_device():
    @tf.function
    def on_two(x):
        with tf.device("CPU:1"):
            y = tf.cumsum(x)
        with tf.device("CPU:2"):
            return tf.linalg.diag(y)

    with collect_function_graphs() as functions:
        on_two(tf.constant([1.0, 2.0]))
    ran = [
        {node.op: node.device[-5:] for graph in function.partition_graphs for node in graph.node}
        for function in functions
    ]
    expected = {"Cumsum": "CPU:1", "MatrixDiagV3": "CPU:2"}
    assert any(expected.items() <= nodes.items() for nodes in ran)
    whole = [{node.op for node in function.post_optimization_graph.node} for function in functions]
    assert any(expected.keys() <= kinds for kinds in whole)


def test_devices_of_mirrored_variables():
    """`kdist.parallel.device_groups` overrides the function that chooses their devices."""
    own = inspect.getsource(MirroredExtended._create_variable)
    assert "colocate_with._devices" in own
    assert canonical_device("CPU:1") == "/job:localhost/replica:0/task:0/device:CPU:1"


def test_the_device_of_eager_operations():
    with tf.device("CPU:1"):
        assert current_device().endswith("device:CPU:1")


def test_tapes_watch_a_tensor_as_a_variable():
    tensor = tf.constant(3.0)
    with tf.GradientTape() as tape:
        watch_on_tapes(tensor)
        result = tensor * tensor
    assert float(tape.gradient(result, tensor)) == 6.0


def test_the_coordinator_has_its_private_members():
    coordinator = tf.distribute.coordinator.ClusterCoordinator
    assert list(inspect.signature(cluster_coordinator.Cluster.schedule).parameters) == [
        "self",
        "function",
        "args",
        "kwargs",
    ]
    assert "self._cluster = " in inspect.getsource(coordinator.__init__)
    extended = inspect.getsource(parameter_server_strategy_v2.ParameterServerStrategyV2Extended)
    assert "self._num_workers = " in extended
    assert "self._being_scheduled = " in extended


def test_the_heartbeat_timeout():
    own = CollectiveAllReduceExtended._initialize_multi_worker
    assert "context.context().configure_coordination_service(" in inspect.getsource(own)
    with heartbeat_timeout(30):
        ours = context.context().configure_coordination_service
        assert ours.keywords == {"heartbeat_timeout_in_ms": 30000}
        assert "heartbeat_timeout_in_ms" in inspect.signature(ours.func).parameters
    assert context.context().configure_coordination_service == ours.func


def test_the_arguments_of_collectives():
    for function, first in {
        collective_ops.broadcast_send: ["t", "shape", "dtype"],
        collective_ops.broadcast_recv: ["shape", "dtype"],
        collective_ops.all_gather_v2: ["t"],
    }.items():
        assert list(inspect.signature(function).parameters)[: len(first)] == first


def test_the_arguments_of_published_values():
    for function, names in {
        context.Context.set_config_key_value: ["self", "key", "value"],
        context.Context.get_config_key_value: ["self", "key", "timeout_in_ms"],
        context.Context.delete_config_key_value: ["self", "key"],
    }.items():
        assert list(inspect.signature(function).parameters) == names


def test_collectives_can_be_aborted():
    parameters = inspect.signature(context.Context.abort_collective_ops).parameters
    assert list(parameters) == ["self", "code", "message"]


def sums_of_two_workers():
    """Worker 1 has traced another function before; its keys are still the same."""
    import tensorflow as tf

    import kdist
    from kdist.training.replica.reduction import all_reduce_sum

    strategy = kdist.create_strategy("multi_worker")
    worker = kdist.Cluster.resolve().index

    def on_replica(x):
        total = all_reduce_sum([1 * x, tf.cast(x[:1], tf.float64)])
        return all_reduce_sum([total[0]])[0] / 2

    @tf.function
    def sums(x):
        total = strategy.run(on_replica, args=(x,))
        for _ in tf.range(3):
            total = strategy.run(on_replica, args=(total / 2,))
        return total

    if worker == 1:
        sums.get_concrete_function(tf.ones([7]))
    right = all(
        (sums(tf.fill([5], float(n + worker))).numpy() == 2 * n + 1).all() for n in range(20)
    )
    operations = sums.get_concrete_function(tf.ones([5])).graph.get_operations()
    keys = [op.inputs[3] for op in operations if op.type == "CollectiveReduceV2"]
    return right, [int(tf.get_static_value(key)) for key in keys]


@pytest.mark.slow
def test_sums_over_workers_keep_their_keys():
    right, keys = kdist.launch.local(sums_of_two_workers, workers=2, timeout_seconds=120)
    assert right
    assert len(keys) == len(set(keys)) == 3  # those in the loop are in a graph of its own
    assert min(keys) >= 1 << 30


def test_variables_with_copies_are_converted_to_numbers(mirrored):
    with mirrored.scope():
        optimizer = keras.optimizers.SGD(0.5)
        mean = tf.Variable(
            2.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.MEAN,
        )
    assert int(optimizer.iterations) == 0
    assert float(optimizer.learning_rate) == float(optimizer.learning_rate.value) == 0.5
    assert float(mean) == 2.0


def test_variables_with_other_copies(mirrored):
    with mirrored.scope():
        variable = tf.Variable([1.0, 2.0])
    other = with_copies(variable, [tf.Variable([3.0]), variable.values[1]])
    assert type(other) is type(variable)
    found = mirrored.experimental_local_results(mirrored.run(lambda: tf.identity(other)))
    assert [copy.numpy().tolist() for copy in found] == [[3.0], [1.0, 2.0]]


def test_a_shape_keeps_the_class_of_its_sizes():
    class Size(int):
        pass

    static = tf.TensorShape([2, 3])
    shape = with_sizes(static, (Size(2), 3))
    assert all(isinstance(n, Size) for n in (shape[0], shape.as_list()[0], next(iter(shape))))
    assert shape == static
    assert type(static[0]) is int


def test_the_type_that_a_conversion_prefers():
    found = []

    class Number:
        def __tf_tensor__(self, dtype=None, name=None):
            found.append((dtype, preferred_dtype()))
            return tf.constant(1.0, tf.float64)

    with tf.Graph().as_default():
        _ = tf.zeros([], tf.float64) / Number()
        tf.convert_to_tensor(Number())
    assert found == [(None, tf.float64), (None, None)]
