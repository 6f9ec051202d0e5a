"""Training loops of programs: `strategy.run`, gradient tapes, and their own strategies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.launch.local_engine import reserve_ports
from tests.forked import python, python_tasks

PROGRAM = """
import contextlib, json, sys
import keras, kdist
import numpy as np
import tensorflow as tf

rng = np.random.default_rng(0)
x = rng.normal(size=(16, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def new_model(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), keras.optimizers.Adam()


def step_of(model, optimizer, replicas):
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs) - targets)) / replicas
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    return step


def run(strategy, is_compiled=True):
    model, optimizer = new_model(strategy)
    step = step_of(model, optimizer, strategy.num_replicas_in_sync)
    run_step = lambda *batch: strategy.run(step, batch)
    if is_compiled:
        run_step = tf.function(run_step)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    for batch in strategy.experimental_distribute_dataset(data):
        run_step(*batch)
    return model.get_weights()[0].ravel().tolist()


def fitted(strategy):
    model, optimizer = new_model(strategy)
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return model.get_weights()[0].ravel().tolist()


"""

IN_ONE_PROCESS = """
kdist.patch_keras()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
strategies = {
    "none": tf.distribute.get_strategy(),
    "one device": tf.distribute.OneDeviceStrategy("CPU:1"),
    "mirrored": tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "one worker": tf.distribute.MultiWorkerMirroredStrategy(),
    "central storage": tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0"),
}
results = {}
for name, strategy in strategies.items():
    results[name] = [run(strategy), run(strategy, False), fitted(strategy)]
# Outside of the scope a loop runs on the first device, and updates all copies.
model, optimizer = new_model(strategies["mirrored"])
for step in (step_of(model, optimizer, 1), tf.function(step_of(model, optimizer, 1))):
    step(x[:8], y[:8]) if not optimizer.built else step(x[8:], y[8:])
results["outside"] = [v.numpy().ravel().tolist() for v in model.weights[0].value.values]
print(json.dumps(results))
"""


@pytest.mark.slow
def test_strategies_of_the_program_train_as_those_of_kdist():
    results = python(PROGRAM + IN_ONE_PROCESS)
    (expected, *_) = results["none"]
    for name, found in results.items():
        for weights in found:
            np.testing.assert_allclose(weights, expected, atol=1e-6, err_msg=name)


def test_the_optimizer_is_built_outside_of_the_replicas():
    code = """
kdist.patch_keras()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
own = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
print(json.dumps([run(strategy) for strategy in (tf.distribute.get_strategy(), own)]))
"""
    expected, found = python(PROGRAM + code)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_multi_worker_strategies_of_the_program():
    code = """
import random
kdist.patch_keras()
# A second strategy would restart TensorFlow's collectives while the other task may wait in one.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
model, optimizer = new_model(strategy)
keras.utils.set_random_seed(strategy.cluster_resolver.task_id)
model.compile(optimizer, "mse")
common = random.random()
results = [run(strategy), fitted(strategy), common]
print(json.dumps(results))
"""
    alone = python(PROGRAM + "print(json.dumps(run(tf.distribute.get_strategy())))")
    first, second = python_tasks(PROGRAM + code, {"worker": 2}, timeout_seconds=120)
    assert first[2] == second[2]
    for weights in (*first[:2], *second[:2]):
        np.testing.assert_allclose(weights, alone, atol=1e-6)


SERVERS = """
kdist.patch_keras()
parts, *ports = map(int, sys.argv[1:])
cluster = tf.train.ClusterSpec(
    {"worker": [f"localhost:{ports[0]}"], "ps": [f"localhost:{port}" for port in ports[1:]]}
)
servers = [
    tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc")
    for role in cluster.jobs
    for index in range(cluster.num_tasks(role))
]
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc"),
    variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(parts)
    if parts > 1
    else None,
)
"""


@pytest.mark.slow
def test_a_loop_of_the_program_on_parameter_servers():
    code = """
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
model, optimizer = new_model(strategy)
step = step_of(model, optimizer, 1)
train = tf.function(lambda inputs, targets: strategy.run(step, (inputs, targets)))
for rows in (slice(8), slice(8, 16)):
    coordinator.schedule(train, args=(tf.constant(x[rows]), tf.constant(y[rows])))
    coordinator.join()
print(json.dumps([run(tf.distribute.get_strategy()), model.get_weights()[0].ravel().tolist()]))
"""
    with reserve_ports(3) as ports:
        expected, found = python(PROGRAM + SERVERS + code, [1, *ports])
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_parameter_server_strategies_of_the_program(parts):
    code = """
tokens = rng.integers(0, 6, (16, 3))
results = []
for each in (tf.distribute.get_strategy(), strategy):
    keras.utils.set_random_seed(0)
    with each.scope():
        layers = [keras.layers.Embedding(6, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    model.fit(tokens, y, batch_size=8, shuffle=False, verbose=0)
    table = keras.ops.convert_to_numpy(model.layers[0].embeddings)
    results.append(table.ravel().tolist())
    variables = len(model.layers[0].trainable_variables)
print(json.dumps([*results, variables]))
"""
    with reserve_ports(3) as ports:
        expected, found, variables = python(PROGRAM + SERVERS + code, [parts, *ports])
    assert variables == parts
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("variable", ["keras", "tensorflow", "watched"])
@pytest.mark.parametrize("wrap", [lambda step: step, tf.function])
def test_a_gradient_between_replicas_says_what_to_do(wrap, variable, mirrored):
    with mirrored.scope():
        dense = keras.layers.Dense(1)
        dense.build((None, 2))
        kdist.Model(*[keras.Input((1,))] * 2)  # its module replaces functions of tapes
        kernel = dense.kernel if variable == "keras" else tf.Variable(dense.kernel)

        @wrap
        def step(x):
            with tf.GradientTape() as tape:
                if variable == "watched":
                    tape.watch(kernel)
                loss = tf.reduce_sum(x @ kernel)
            return tape.gradient(loss, [kernel])

        with pytest.raises(ValueError, match=r"(?s)test_own_loops\.py.*strategy\.run"):
            step(tf.ones((2, 2)))
