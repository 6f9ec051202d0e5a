"""Training loops of programs: `strategy.run`, gradient tapes, and their own strategies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.launch.local_engine import reserve_ports
from tests.forked import python, python_tasks
from tests.tiers import seldom

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


@pytest.mark.exhaustive
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
@pytest.mark.parametrize("parts", [2, *seldom([1])])
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


# A program that knows nothing of strategies, in the scope of one.
OWN_LOOP = """
import contextlib, json, sys, warnings
import keras
import numpy as np
import tensorflow as tf

policy, replicas = sys.argv[1], int(sys.argv[3])
wrap = {"eager": lambda f: f, "function": tf.function}[sys.argv[2]]
scope = contextlib.nullcontext()
if replicas:
    import kdist
    kdist.patch_keras()
    strategy = kdist.create_strategy("mirrored", replicas)
    scope = strategy.scope()

rng = np.random.default_rng(0)
x = rng.normal(size=(22, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def main():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    offset = tf.Variable(0.5)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
    if policy != "float32":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    loss_function, mean = keras.losses.MeanSquaredError(), keras.metrics.Mean()

    @wrap
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_function(y, model(x, training=True) + offset) + tf.add_n(model.losses)
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(scaled, weights), weights))
        offset.assign_sub(0.1 * tape.gradient(loss, offset))
        mean.update_state(loss)

    losses = []
    for _ in range(2):
        mean.reset_state()
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
            step(*batch)
        losses.append(float(mean.result()))
    weights = [*model.get_weights(), offset.numpy(), np.array(losses)]
    if replicas:  # all copies have been updated
        for variable in [*model.weights, *optimizer.variables]:
            copies = strategy.experimental_local_results(variable.value)
            assert len(copies) == replicas
            for copy in copies:
                np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())
    return [w.tolist() for w in weights]


with warnings.catch_warnings(record=True) as caught, scope:
    warnings.simplefilter("always")
    found = main()
told = [str(w.message) for w in caught if "strategy.run" in str(w.message)]
print(json.dumps([found, told]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "wrap"),
    [("float32", "function"), *seldom([("float32", "eager"), ("mixed_bfloat16", "function")])],
)
def test_a_loop_in_a_scope_is_that_of_one_device(policy, wrap):
    (expected, nothing), (found, told) = (python(OWN_LOOP, [policy, wrap, n]) for n in (0, 2))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert not nothing
    (message,) = told
    assert "one device" in message
    assert "<string>:" in message


@pytest.mark.parametrize("variable", ["keras", "tensorflow", "watched"])
def test_gradients_between_replicas(variable, mirrored):
    with mirrored.scope():
        dense = keras.layers.Dense(1)
        dense.build((None, 2))
        kdist.Model(*[keras.Input((1,))] * 2)  # its module replaces functions of tapes
        kernel = dense.kernel if variable == "keras" else tf.Variable(dense.kernel)
        for device in ("CPU:0", "CPU:1"):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    if variable == "watched":
                        tape.watch(kernel)
                    loss = tf.reduce_sum(tf.ones((2, 2)) @ kernel)
                (gradient,) = tape.gradient(loss, [kernel])
            np.testing.assert_array_equal(gradient, [[2], [2]])


def test_a_gradient_between_replicas_of_several_workers_says_what_to_do():
    for (message,) in python_tasks(LONE_GRADIENT, {"worker": 2}):
        assert "strategy.run" in message
        assert "differ" in message


LONE_GRADIENT = """
import json
import kdist
strategy = kdist.create_strategy("multi_worker", cluster_timeout_seconds=60)
import keras
import tensorflow as tf
kdist.patch_keras()
with strategy.scope():
    dense = keras.layers.Dense(1)
    dense.build((None, 2))
    try:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(dense(tf.ones((2, 2))))
        tape.gradient(loss, dense.trainable_variables)
        message = "no error"
    except ValueError as error:
        message = str(error)
    # Ends with a step of both tasks.
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(tf.ones((2, 2)), tf.ones((2, 1)), verbose=0)
print(json.dumps([message]))
"""
