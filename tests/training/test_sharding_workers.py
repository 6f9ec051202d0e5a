"""Training state that the replicas of several processes divide among themselves."""

import functools
import json
import sys
import types

import keras
import numpy as np
import pytest

import kdist
from kdist.checkpoint import CheckpointFiles
from kdist.run_directory import checkpoint_name
from kdist.testing import assert_same_weights
from kdist.training.groups.file_callbacks import with_whole_state
from kdist.training.replica import reduction
from kdist.training.sharding import gathers, whole_state
from tests.forked import python_tasks
from tests.tiers import seldom

# What each task does, and what plain Keras does on one device.
TRAINING = """
import keras
import numpy as np

ROWS, LENGTH, WORDS, CLASSES = 58, 6, 50, 5
STEPS_BEFORE, STEPS_BETWEEN = 7, 3  # an interruption, and two checkpoints
EPSILON = 1e-3
optimizers = keras.optimizers
OPTIMIZERS = {
    "moving average": lambda: optimizers.AdamW(
        0.01,
        weight_decay=0.2,
        epsilon=EPSILON,
        global_clipnorm=0.05,
        use_ema=True,
        ema_momentum=0.8,
    ),
    "clipped": lambda: optimizers.Adam(0.01, epsilon=EPSILON, global_clipnorm=0.05),
    "loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, momentum=0.9), dynamic_growth_steps=2
    ),
    "whole weights": lambda: optimizers.Muon(0.02, clipnorm=0.05),
}

def network(model_class):
    keras.utils.set_random_seed(5)
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Flatten()(layers.Embedding(WORDS, 7, name="words")(inputs))
    x = layers.Dense(9, activation="tanh", kernel_constraint="max_norm", name="middle")(x)
    return model_class(inputs, layers.Dense(CLASSES, activation="softmax", name="head")(x))

def compiled(model_class, optimizer, **options):
    model = network(model_class)
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy", **options)
    return model

def fit(model, callbacks=(), epochs=2):
    generator = np.random.default_rng(3)
    x, y = generator.integers(0, WORDS, (ROWS, LENGTH)), generator.integers(0, CLASSES, ROWS)
    model.fit(
        x, y, batch_size=12, shuffle=False, verbose=0, epochs=epochs, callbacks=list(callbacks)
    )
    return model

class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations.numpy()) == STEPS_BEFORE:
            raise InterruptedError

def interrupt(train):
    try:
        train()
    except InterruptedError:
        return
    raise AssertionError("the training has ended")
"""

TASK = f"""
import json, sys
shard, devices, directory, written, cases = json.loads(sys.argv.pop())
import kdist
from kdist.checkpoint.snapshot import capture
from kdist.testing import assert_same_weights
from kdist.training.broadcast import wait_for_workers
from kdist.training.sharding import readers
from kdist.training.sharding.memory import state_bytes
{TRAINING}
cluster = kdist.cluster.Cluster.resolve()
workers, number_of_task, divides_weights = cluster.num_workers, cluster.index, shard == "weights"
is_within_worker = divides_weights and devices > 1
layout = kdist.Layout(data=workers * devices, shard=shard, min_shard_bytes=64)
strategy = kdist.create_strategy(layout, cluster_timeout_seconds=60)
found = {{}}

def train(case, optimizer, callbacks=(), **options):
    with strategy.scope():
        model = compiled(kdist.Model, optimizer, **options)
    fit(model, callbacks)
    arrays = capture(model)
    found[case] = {{
        kind: [array.tolist() for name, array in arrays.items() if name.startswith(kind)]
        for kind in ("weights", "optimizer")
    }}
    return model

for case in cases:
    if case == "resumed":
        checkpoint = kdist.callbacks.Checkpoint(directory, STEPS_BETWEEN, keep=99)
        interrupt(lambda: train("", "clipped", [Stop(), checkpoint]))
        train(case, "clipped", [kdist.callbacks.Checkpoint(directory)])
    elif case == "from a backup":
        backup = lambda: keras.callbacks.BackupAndRestore(directory + "-4")
        interrupt(lambda: train("", "clipped", [Stop(), backup()]))
        train(case, "clipped", [backup()])
    elif case == "from one device":
        checkpoint = kdist.callbacks.Checkpoint(directory, resume=written)
        train(case, "clipped", [checkpoint])
    else:
        save = keras.callbacks.ModelCheckpoint(directory + ".keras")
        options = {{"accumulate": 2}} if case in ("moving average", "whole weights") else {{}}
        model = train(case, case, [save], **options)
save_often = keras.callbacks.ModelCheckpoint(directory + "-2.keras", save_freq=2)
with model.training_state.whole():
    with model.training_state.whole():
        pass
    if number_of_task == workers - 1:
        model.save(directory + "-whole.keras")
refused = {{}}
with strategy.scope():
    plain = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    with kdist.Model.of(plain).training_state.whole():
        plain.get_weights()

def save_alone():
    readers._WAIT_SECONDS = 1.0
    try:
        if number_of_task == 0:
            model.save(directory + "-alone.keras")
    finally:
        readers._WAIT_SECONDS = 60.0
        wait_for_workers(strategy, "saving alone")

model.save(directory + f"-by-{{number_of_task}}.keras")
stop = keras.callbacks.EarlyStopping("loss", mode="max", patience=9, restore_best_weights=True)
callbacks = [keras.callbacks.ModelCheckpoint(directory + "-2.keras"), stop]  # of the chief; of all
x, y = np.zeros((12, LENGTH)), np.zeros(12)
losses = model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
assert losses[0] > losses[1]
assert_same_weights(model.get_weights(), stop.best_weights, 0.0)
calls = {{
    "save alone": save_alone,
    "read others": lambda: [model.get_weights(), model.weights[number_of_task].numpy()],
    "save_freq": lambda: fit(model, [save_often]),
    "BackupAndRestore": lambda: fit(model, [keras.callbacks.BackupAndRestore(directory + "-3")]),
}}
for name, call in () if is_within_worker else calls.items():
    try:
        call()
    except ValueError as error:
        refused[name] = str(error)
held = [each.weights * divides_weights + each.optimizer for each in state_bytes(model).values()]

own_number = lambda shape, dtype=None: np.full(shape, number_of_task, dtype)
with strategy.scope():
    inputs = keras.Input((64,))
    first = keras.layers.Dense(64, kernel_initializer=own_number)
    dense = kdist.Model(inputs, keras.layers.Dense(64)(first(inputs)))
    with dense.training_state.whole():
        drawn = np.unique(first.kernel.numpy()).tolist()
    dense.compile("adam", "mse")
telemetry = kdist.callbacks.Telemetry(directory + "-run", device_seconds=None)
x = np.ones((12, 64), "float32")
dense.fit(x, x, batch_size=12, verbose=0, callbacks=[telemetry])
crossing = telemetry.summary()["crossing_bytes_per_step"]
print(json.dumps([found, held, refused, crossing, drawn, dense.count_params()]))
"""


@pytest.fixture(scope="module")
def program():
    names = {}
    exec(TRAINING, names)
    return types.SimpleNamespace(**names)


@pytest.fixture(scope="module")
def expected(program):
    """Returns a function that trains with an optimizer by plain Keras on one device."""
    return functools.cache(lambda name: program.fit(program.compiled(keras.Model, name)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "devices", "shard", "cases"),
    [
        (2, 2, "gradients", ["moving average"]),
        (2, 2, "weights", ["from a backup", "moving average"]),
        (2, 1, "weights", ["whole weights", "clipped", "resumed", "moving average"]),
        *seldom(
            [
                (3, 1, "optimizer", ["from one device", "whole weights", "loss scale"]),
                (2, 3, "weights", ["from one device", "loss scale"]),
            ]
        ),
    ],
)
def test_processes_divide_state_and_train_as_one_device(
    workers, devices, shard, cases, program, expected, tmp_path
):
    """Also if they resume from a checkpoint of one device, and one device from theirs."""
    one_device = program.compiled(kdist.Model, "clipped")
    alone = kdist.callbacks.Checkpoint(tmp_path / "alone", program.STEPS_BETWEEN)
    program.interrupt(lambda: program.fit(one_device, [program.Stop(), alone]))
    written = CheckpointFiles(tmp_path / "alone").newest()
    arguments = [shard, devices, str(tmp_path / "job"), str(written.path), cases]
    first, *rest = python_tasks(TASK, {"worker": workers}, [json.dumps(arguments)])
    found, on_devices, refused, crossing, drawn, parameters = first
    assert all(results == found for results, *_ in rest)
    assert all(each[4] == drawn == [0] for each in rest)  # by the first worker
    for case in cases:
        model = expected("clipped" if case == "resumed" or "from" in case else case)
        slots = [variable.numpy() for variable in model.optimizer.variables]
        tolerance = 1e-5 if case == "whole weights" else 1e-6  # Muon amplifies rounding
        assert_same_weights(found[case]["weights"], model.get_weights(), tolerance)
        assert_same_weights(found[case]["optimizer"], slots, tolerance)
    assert len(on_devices) == devices
    slots_and_shard = {"moving average": 4, "loss scale": 2}[cases[-1]]
    large = sum(weight.nbytes for weight in model.get_weights() if weight.nbytes >= 64)
    is_within_worker = shard == "weights" and devices > 1
    parts = devices if is_within_worker else workers * devices
    assert on_devices[0] == pytest.approx(slots_and_shard * large / parts, rel=0.15)
    refusing = {
        "save alone": "worker 1 has not read it within 1 s",
        "save_freq": "save_freq",
        "BackupAndRestore": "BackupAndRestore",
        **({"read others": "worker 1 reads"} if shard == "weights" else {}),
    }
    assert refused.keys() == (set() if is_within_worker else refusing.keys())
    for name, message in refused.items():
        assert refusing[name] in message
        assert "kdist.callbacks" in message
    files = ["whole", *(f"by-{number}" for number in range(workers))]
    for file in ("job.keras", *(f"job-{name}.keras" for name in files)):
        opened = keras.saving.load_model(tmp_path / file)
        slots = [variable.numpy() for variable in model.optimizer.variables]
        assert_same_weights([v.numpy() for v in opened.optimizer.variables], slots, 1e-6)
    # The last file alone: Keras assigns moving averages after ModelCheckpoint has saved.
    assert_same_weights(opened.get_weights(), model.get_weights(), 1e-6)
    size = 4 * parameters
    formulas = dict.fromkeys(("gathered", "scattered"), (workers * devices - 1) * size)
    if shard == "weights" and not is_within_worker:
        formulas["gathered"] += (workers - 1) * 2 * 4 * 64 * 64  # both kernels, in one message
    if is_within_worker:  # and an all-reduce of parts between them
        within, between = workers * (devices - 1), (workers - 1) * size
        read_again = 4 * 64 * 64  # the last kernel alone: the inputs have no gradient
        formulas = {
            "gathered": within * (size + read_again) + between,
            "scattered": within * size + between,
        }
    # ZeRO paper, section 7
    assert crossing == {name: pytest.approx(f, rel=0.05) for name, f in formulas.items()}
    if "resumed" not in cases:
        return
    assert found["resumed"] == found["clipped"]  # to the last bit
    of_job = tmp_path / "job" / checkpoint_name(2 * program.STEPS_BETWEEN)
    with kdist.create_strategy(kdist.Layout(data=2, shard="optimizer", min_shard_bytes=64)).scope():
        model = program.compiled(kdist.Model, "clipped")
    program.fit(model, [kdist.callbacks.Checkpoint(tmp_path / "later", resume=of_job)])
    assert_same_weights(model.get_weights(), expected("clipped").get_weights(), 1e-6)


def test_workers_that_divide_nothing_save_and_restore_as_keras_does(tmp_path):
    extended = types.SimpleNamespace(worker_devices=("CPU:0",))
    workers = types.SimpleNamespace(num_replicas_in_sync=2, extended=extended)
    callbacks = [
        keras.callbacks.BackupAndRestore(tmp_path),
        keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=2),
    ]
    assert with_whole_state(callbacks, workers) == callbacks


@pytest.mark.parametrize(
    ("options", "count"),
    [({"histogram_freq": 1}, 3), ({"embeddings_freq": 1}, 3), ({"write_images": True}, 1)],
)
def test_weights_are_gathered_before_tensorboard_writes_them(options, count, tmp_path):
    extended = types.SimpleNamespace(worker_devices=("CPU:0",))
    layout = kdist.Layout(data=2, shard="weights")
    workers = types.SimpleNamespace(num_replicas_in_sync=2, extended=extended, layout=layout)
    callback = keras.callbacks.TensorBoard(tmp_path, **options)
    assert len(with_whole_state([callback], workers)) == count


@pytest.mark.parametrize(
    ("callback", "with_slots"),
    [
        (keras.callbacks.ModelCheckpoint("a.keras"), True),
        (keras.callbacks.ModelCheckpoint("a.weights.h5", save_weights_only=True), True),
        (keras.callbacks.TensorBoard("a", histogram_freq=1), False),
    ],
)
def test_slots_are_gathered_for_callbacks_that_read_them(callback, with_slots, monkeypatch):
    extended = types.SimpleNamespace(worker_devices=("CPU:0",), should_checkpoint=True)
    layout = kdist.Layout(data=2, shard="weights")
    workers = types.SimpleNamespace(num_replicas_in_sync=2, extended=extended, layout=layout)
    shares, *_ = with_whole_state([callback], workers)
    calls = []
    monkeypatch.setattr(whole_state, "share", lambda *arguments: calls.append(arguments))
    shares.set_model(types.SimpleNamespace(distribute_strategy=workers))
    shares.on_epoch_end(0)
    assert calls == [(shares.model, True, with_slots)]


# Sums of gradients are sent in several messages, and a layer in the middle exchanges rows.
MANY_COLLECTIVES = """
import itertools, json, sys
import keras
import numpy as np
import kdist
from kdist.compat.tensorflow import collect_function_graphs
from kdist.training.replica import reduction
from kdist.training.sharding import gathers

gathers.computes_on_gpus = lambda strategy: True
gathers._GROUP_BYTES, reduction._BUCKET_BYTES = 0, 5000
(accumulate,) = map(int, sys.argv[1:])

def network(model_class):
    keras.utils.set_random_seed(5)
    layers = keras.layers
    x = inputs = keras.Input((20,))
    for width in (24, 40, 40):
        x = layers.Dense(width, activation="tanh", kernel_regularizer="l2")(x)
    if accumulate == 1:
        x = layers.BatchNormalization(synchronized=model_class is not keras.Model)(x)
    with keras.RematScope(mode="full" if model_class is not keras.Model else None):
        block = keras.Sequential([layers.Dense(40, activation="tanh"), layers.Dense(40)])
    x = block(x)
    for width in (32, 32):
        x = layers.Dense(width, activation="tanh")(x)
    return model_class(inputs, layers.Dense(4, activation="softmax")(x))

def fit(model, **options):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", **options)
    x = np.random.default_rng(3).normal(size=(48, 20)).astype("float32")
    model.fit(x, x.argmax(1) % 4, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return model

def numbers_before(function):
    '''Returns how many others each collective of a graph waits for, sorted.'''
    nodes = {node.name: node for node in function.post_optimization_graph.node}
    ancestors = {}
    def collectives_before(name):
        if name not in ancestors:
            found = set()
            # A loop over micro-steps begins again.
            inputs = () if nodes[name].op == "NextIteration" else nodes[name].input
            for text in inputs:
                source = text.lstrip("^").partition(":")[0]
                found |= collectives_before(source)
                if nodes[source].op.startswith("Collective"):
                    found.add(source)
            ancestors[name] = found
        return ancestors[name]
    sys.setrecursionlimit(100_000)
    collectives = [
        each
        for each in nodes
        if nodes[each].op.startswith("Collective") and not each.startswith("while/")
    ]
    return sorted(len(collectives_before(each)) for each in collectives)

strategy = kdist.create_strategy(kdist.Layout(data=2, shard="weights", min_shard_bytes=64))
with strategy.scope():
    model = network(kdist.Model)
with collect_function_graphs() as functions:
    fit(model, accumulate=accumulate)
step = max(functions, key=lambda each: len(numbers_before(each)))
gathers = [n for n in step.post_optimization_graph.node if n.op.startswith("CollectiveGather")]
with model.training_state.whole():
    weights = [weight.tolist() for weight in model.get_weights()]
print(json.dumps([numbers_before(step), len(gathers), weights]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, *seldom([2])])
def test_workers_run_their_collectives_in_the_same_order(accumulate, monkeypatch):
    """On GPUs, two that wait for each other's collectives would do so forever."""
    monkeypatch.setattr(sys, "argv", ["", str(accumulate)])
    # The program sets these, and they are restored.
    monkeypatch.setattr(gathers, "computes_on_gpus", None)
    monkeypatch.setattr(gathers, "_GROUP_BYTES", None)
    monkeypatch.setattr(reduction, "_BUCKET_BYTES", None)
    names = {}
    exec(MANY_COLLECTIVES.partition("\nstrategy = ")[0], names)
    expected = names["fit"](names["network"](keras.Model)).get_weights()
    for places, num_gathers, weights in python_tasks(
        MANY_COLLECTIVES, {"worker": 2}, [str(accumulate)]
    ):
        # Two pairs of small weights are gathered together: otherwise it would be 43 and 78.
        assert num_gathers == {1: 38, 2: 68}[accumulate]
        assert places == list(range(len(places)))
        assert len(places) > 20 * accumulate
        assert_same_weights(weights, expected, 1e-5)


ALONE = """
import json

import keras
import numpy as np

import kdist

with kdist.create_strategy("multi_worker", devices=2, shard="optimizer").scope():
    inputs = keras.Input((128,))
    model = kdist.Model(inputs, keras.layers.Dense(256)(inputs))
    model.compile("adam", "mse")
x = np.ones((4, 128), "float32")
model.fit(x, np.zeros((4, 256), "float32"), batch_size=4, verbose=0)
print(json.dumps([list(v.shape) for v in model.optimizer.variables if len(v.shape) == 2]))
"""


def test_a_job_with_one_task_left_divides_state_over_its_devices():
    assert python_tasks(ALONE, {"worker": 1}) == [[[64, 256], [64, 256]]]


WITH_EVALUATOR = f"""
import json
{TRAINING}
import kdist
from kdist.training.evaluator import is_evaluator
from kdist.training.sharding.memory import state_bytes

layout = kdist.Layout(data=2, shard="weights", min_shard_bytes=64)
strategy = kdist.create_strategy(layout)
found = None
if not is_evaluator(strategy):
    with strategy.scope():
        model = fit(compiled(kdist.Model, "clipped"))
    held = [each.weights for each in state_bytes(model).values()]
    found = [held, [w.tolist() for w in model.get_weights()]]
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_a_worker_divides_its_weights_next_to_an_evaluator(expected):
    found, evaluator = python_tasks(WITH_EVALUATOR, {"worker": 1, "evaluator": 1})
    assert evaluator is None
    model = expected("clipped")
    assert_same_weights(found[1], model.get_weights(), 1e-6)
    whole = sum(weight.nbytes for weight in model.get_weights())
    assert all(held == pytest.approx(whole / 2, rel=0.1) for held in found[0])


# TensorFlow ranks tasks by name, 10 before 2.
RANKED = """
import json

import numpy as np
import tensorflow as tf

import kdist
from kdist.training.replica.reduction import exchange_rows, gather_parts, reduce_scatter_sum
from kdist.training.scopes import this_replica
from kdist.training.sharding.parts import EqualParts

strategy = kdist.create_strategy("multi_worker", shard="optimizer", cluster_timeout_seconds=120)
ranks = strategy.extended._kdist_replicas_by_rank
divisions = [EqualParts(shape, 11) for shape in ((44, 3), (30,), (5, 7))]

@tf.function
def exchange():
    def on_replica():
        own = [
            tf.fill(d.shape, tf.cast(this_replica(), tf.float32))
            + tf.reshape(tf.range(np.prod(d.shape), dtype=tf.float32), d.shape)
            for d in divisions
        ]
        parts = reduce_scatter_sum(own, divisions)
        gathered = gather_parts(parts)
        sent = 100.0 * this_replica() + tf.range(11.0)  # (sender, receiver)
        (received,) = exchange_rows([sent[:, None]])
        return [*[d.merge(p) for d, p in zip(divisions, gathered, strict=True)], received]
    return strategy.run(on_replica)

found = [strategy.experimental_local_results(each) for each in exchange()]
print(json.dumps([list(ranks), [[one.numpy().tolist() for one in each] for each in found]]))
"""


@pytest.mark.exhaustive
def test_parts_find_their_replicas_whatever_their_ranks():
    for number, (ranks, found) in enumerate(python_tasks(RANKED, {"worker": 11})):
        assert ranks != sorted(ranks) == list(range(11))
        assert found.pop() == [[[100 * sender + number] for sender in range(11)]]
        for shape, copies in zip(((44, 3), (30,), (5, 7)), found, strict=True):
            total = sum(range(11)) + 11 * np.arange(np.prod(shape)).reshape(shape)
            assert copies == [total.tolist()]
