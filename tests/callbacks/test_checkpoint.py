import contextlib
import copy
import json
import os
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import kdist
from kdist.callbacks import Checkpoint, Telemetry
from kdist.checkpoint import CheckpointError, CheckpointFiles
from kdist.run_directory import RunDirectory, measured_saving
from kdist.strategies import create_strategy
from kdist.training.replica.accumulation import optimizers_of
from tests.forked import python, python_tasks
from tests.tiers import seldom


def pipelines(replicas=1, local=32, **options):
    batch = kdist.Batch(local, replicas)
    options = {"operations": "random_flip()", **options}
    return kdist.data.load("digits", batch=batch, examples=320, **options)


def built(shape, optimizer="adam", units=8, **options):
    layers = keras.layers
    inputs = keras.Input(shape)
    x = layers.Dense(units, activation="relu")(layers.Flatten()(inputs))
    x = layers.Dropout(0.5, seed=1)(layers.BatchNormalization()(x))
    model = kdist.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    return model


class Interruption(Exception):
    pass


class Interrupt(keras.callbacks.Callback):
    """Stops training after a number of calls, like a crash."""

    def __init__(self, calls):
        super().__init__()
        self._calls = calls

    def on_train_batch_end(self, batch, logs=None):
        self._calls -= 1
        if not self._calls:
            raise Interruption


def fit(strategy, callbacks, epochs=3, local=32, validates=True, **options):
    keras.utils.set_random_seed(3)
    keras.utils.clear_session(free_memory=False)
    train, test = pipelines(strategy.num_replicas_in_sync, local)
    with strategy.scope():
        options = {name: value() if callable(value) else value for name, value in options.items()}
        model = built(train.image_shape, **options)
    history = keras.callbacks.History()
    with contextlib.suppress(Interruption):
        model.fit(
            train,
            validation_data=test if validates else None,
            epochs=epochs,
            callbacks=[*callbacks, history],
            verbose=0,
        )
    return model, history.history


def assert_equal(model, other):
    for ours, theirs in zip(model.variables, other.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)
    for ours, theirs in zip(model.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy(), err_msg=ours.path)


def deciding():
    return [
        keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=10.0),
        keras.callbacks.EarlyStopping(patience=2, min_delta=10.0, restore_best_weights=True),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "calls"), [(2, 15), *seldom([(1, 1)])])
def test_resume_is_bit_equal_from_any_step(tmp_path, devices, calls):
    strategy = create_strategy("one_device" if devices == 1 else "mirrored", devices)
    options = {"accumulate": 2, "local": 32 // devices}
    whole, history = fit(strategy, deciding(), **options)
    interrupted = [*deciding(), Checkpoint(tmp_path, every_steps=1), Interrupt(calls)]
    fit(strategy, interrupted, **options)
    checkpoint = Checkpoint(tmp_path, every_steps=1)
    resumed, went_on = fit(strategy, [*deciding(), checkpoint], **options)
    assert (checkpoint.resumed_from or 0) == calls - 1
    assert went_on == history
    assert_equal(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": lambda: 4, "local_slots": lambda: "keep"},
        pytest.param({"steps_per_execution": lambda: 3}, marks=pytest.mark.slow),
        pytest.param(
            {"optimizer": lambda: keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True)},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["local SGD", "several steps a call", "moving average"],
)
def test_resume_with_all_training_options(tmp_path, mirrored, options):
    whole, history = fit(mirrored, [], **options)
    # Calls of two steps, between two averagings of local SGD.
    fit(mirrored, [Checkpoint(tmp_path, every_steps=1), Interrupt(3)], **options)
    checkpoint = Checkpoint(tmp_path)
    resumed, went_on = fit(mirrored, [checkpoint], **options)
    assert checkpoint.resumed_from > 0
    assert went_on == history
    assert_equal(resumed, whole)


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "step"), [(3, 6), *seldom([(2, 4), (4, 10)])])
def test_resume_within_epochs_of_unknown_length(tmp_path, mirrored, calls, step):
    """Calls of four steps, of which an epoch's end leaves two."""
    x, y = np.random.default_rng(0).normal(size=(2, 48, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    data = data.filter(lambda x, y: True)

    def train(*callbacks):
        keras.utils.set_random_seed(3)
        with mirrored.scope():
            inputs = keras.Input((4,))
            model = kdist.Model(inputs, keras.layers.Dense(4)(inputs))
            model.compile("adam", "mse", steps_per_execution=4)
        with contextlib.suppress(Interruption):
            model.fit(data, epochs=3, callbacks=[*callbacks], verbose=0, shuffle=False)
        return model

    whole = train()
    train(Checkpoint(tmp_path, every_steps=1), Interrupt(calls))
    assert CheckpointFiles(tmp_path).newest().state["examples"] == 8 * step
    checkpoint = Checkpoint(tmp_path)
    assert_equal(train(checkpoint), whole)
    assert checkpoint.resumed_from == step
    assert CheckpointFiles(tmp_path).newest().step == 18


def test_each_example_of_an_epoch_is_seen_once_across_an_interruption(tmp_path):
    strategy = create_strategy("one_device")
    seen = []

    class Noting(kdist.Model):
        def train_step(self, data):
            seen.append(data[0].numpy().sum((1, 2, 3)))
            return super().train_step(data)

    def train(callbacks):
        train, _ = pipelines(operations="")
        with strategy.scope():
            inputs = keras.Input(train.image_shape)
            flat = keras.layers.Flatten()(inputs)
            model = Noting(inputs, keras.layers.Dense(10, activation="softmax")(flat))
            model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
        with contextlib.suppress(Interruption):
            model.fit(train, epochs=2, callbacks=callbacks, verbose=0)

    train([])
    whole, seen[:] = np.concatenate(seen), []
    train([Checkpoint(tmp_path, every_steps=1), Interrupt(4)])
    newest = CheckpointFiles(tmp_path).newest().step
    del seen[newest:]
    train([Checkpoint(tmp_path)])
    np.testing.assert_array_equal(np.concatenate(seen), whole)


@pytest.mark.slow
def test_resume_with_another_number_of_replicas(tmp_path, capsys):
    fit(
        create_strategy("mirrored", 2),
        [Checkpoint(tmp_path, every_steps=1), Interrupt(4)],
        local=16,
    )
    one = create_strategy("one_device")
    resumed, history = fit(one, [Checkpoint(tmp_path)], local=32)
    assert "on 1 replicas now, 2 before" in capsys.readouterr().err
    assert int(resumed.optimizer.iterations.numpy()) == 30
    _, plain = fit(one, [], local=32)
    # Dropout masks differ between replicas, so the weights cannot be equal.
    assert history["loss"][-1] == pytest.approx(plain["loss"][-1], rel=0.3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"local": 16}, "global_batch_size=32.* 16"),
        ({"units": 9}, "the checkpoint is of another model"),
        ({"optimizer": "sgd"}, "of another model, optimizer, or metrics"),
    ],
)
def test_checkpoint_of_another_run_is_rejected(tmp_path, options, expected):
    strategy = create_strategy("one_device")
    fit(strategy, [Checkpoint(tmp_path)], epochs=1)
    with pytest.raises(CheckpointError, match=expected):
        fit(strategy, [Checkpoint(tmp_path)], **options)


@pytest.mark.slow
def test_damaged_checkpoints_are_an_error(tmp_path):
    strategy = create_strategy("one_device")
    fit(strategy, [Checkpoint(tmp_path, keep=1)], epochs=1)
    for path in tmp_path.glob("step-*/tensors.index"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="all checkpoints in .* damaged"):
        fit(strategy, [Checkpoint(tmp_path)])
    fit(strategy, [Checkpoint(tmp_path, resume="never")], epochs=1)
    assert CheckpointFiles(tmp_path).newest().step == 20  # above the existing ones


@pytest.mark.slow
def test_a_checkpoint_that_lacks_values_is_an_error(tmp_path):
    strategy = create_strategy("one_device")
    fit(strategy, [*deciding(), Checkpoint(tmp_path / "whole")], epochs=1)
    saved = CheckpointFiles(tmp_path / "whole").newest()
    arrays = saved.tensors()

    def check(name, arrays, state):
        files = CheckpointFiles(tmp_path / name)
        files.write(1, arrays, state)
        with pytest.raises(CheckpointError, match=name):
            fit(strategy, [*deciding(), Checkpoint(files.directory)])

    for name in ("position", "position.epoch", "generators.numpy", "facts", "best"):
        state = copy.deepcopy(saved.state)
        *parent, key = name.split(".")
        del (state[parent[0]] if parent else state)[key]
        check(name, arrays, state)
    earlier = copy.deepcopy(saved.state)
    del earlier["position"]["data_start"]  # which earlier versions did not write
    files = CheckpointFiles(tmp_path / "earlier")
    files.write(1, arrays, earlier)
    callback = Checkpoint(files.directory)
    fit(strategy, [*deciding(), callback])
    assert callback.resumed_from == 1
    lost = {name: array for name, array in arrays.items() if "best_weights" not in name}
    check("best_weights", lost, saved.state)
    for path in saved.path.glob("tensors.*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        saved.tensors()


@pytest.mark.slow
def test_resume_from_a_path(tmp_path):
    strategy = create_strategy("one_device")
    fit(strategy, [Checkpoint(tmp_path / "a", every_steps=5, keep=10)], epochs=1)
    checkpoint = Checkpoint(tmp_path / "b", resume=tmp_path / "a" / "step-0000000005")
    fit(strategy, [checkpoint], epochs=1)
    assert checkpoint.resumed_from == 5
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        fit(strategy, [Checkpoint(tmp_path / "b", resume=tmp_path / "none")])


@pytest.mark.slow
def test_second_fit_with_the_same_callback_continues(tmp_path):
    strategy = create_strategy("one_device")
    train, _ = pipelines()
    model = built(train.image_shape)
    checkpoint = Checkpoint(tmp_path)
    for _ in range(2):
        model.fit(train, epochs=1, callbacks=[checkpoint], verbose=0)
    assert int(model.optimizer.iterations.numpy()) == 20
    assert CheckpointFiles(tmp_path).newest().step == 20
    assert strategy.num_replicas_in_sync == 1


def test_plain_keras_model_is_rejected(tmp_path):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"kdist\.Model\.of"):
        model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0, callbacks=[Checkpoint(tmp_path)])


def test_nonfinite_loss_is_not_saved(tmp_path):
    x = np.ones((64, 4), "float32")
    x[40] = np.nan
    inputs = keras.Input((4,))
    model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    checkpoint = Checkpoint(tmp_path, every_steps=1)
    model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0, callbacks=[checkpoint])
    saved = CheckpointFiles(tmp_path).newest()
    assert saved.step == 5
    assert all(np.isfinite(array).all() for array in saved.tensors().values())


def test_two_resuming_callbacks_are_rejected(tmp_path):
    callbacks = [Checkpoint(tmp_path / "a"), Checkpoint(tmp_path / "b")]
    with pytest.raises(ValueError, match="one callback that resumes"):
        fit(create_strategy("one_device"), callbacks)


@pytest.mark.parametrize(
    "arguments",
    [{"every_steps": 0}, {"every_minutes": -1.0}, {"keep": 0}, {"mirror": "memory://a/b"}],
    ids=str,
)
def test_invalid_arguments(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        Checkpoint(tmp_path, **arguments)


class Signal(keras.callbacks.Callback):
    def __init__(self, number, moment, calls=3):
        super().__init__()
        self._number, self._moment, self._calls = number, moment, calls

    def _count(self, moment):
        if moment == self._moment:
            self._calls -= 1
            if not self._calls:
                os.kill(os.getpid(), self._number)

    def on_train_batch_begin(self, batch, logs=None):
        self._count("step")

    def on_test_batch_begin(self, batch, logs=None):
        self._count("validation")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("number", "error", "moment", "step"),
    [
        (signal.SIGTERM, SystemExit, "step", 3),
        (signal.SIGHUP, SystemExit, "step", 3),
        (signal.SIGINT, KeyboardInterrupt, "validation", 10),
    ],
)
def test_a_signal_saves_and_ends(tmp_path, capfd, number, error, moment, step):
    strategy = create_strategy("one_device")
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = list(map(signal.getsignal, numbers))
    with pytest.raises(error) as raised:
        fit(strategy, [Checkpoint(tmp_path), Signal(number, moment)])
    assert before == list(map(signal.getsignal, numbers))
    assert error is KeyboardInterrupt or raised.value.code == 143
    assert f"{number.name}: saving a checkpoint" in capfd.readouterr().err
    assert CheckpointFiles(tmp_path).newest().step == step
    whole, history = fit(strategy, [])
    resumed, went_on = fit(strategy, [Checkpoint(tmp_path)])
    assert went_on == history
    assert_equal(resumed, whole)


CLOSED_TERMINAL = """
import json, os, pty, sys
import keras, numpy as np
import kdist
from kdist.callbacks import Checkpoint

pid, terminal = pty.fork()
if pid == 0:
    model = kdist.Model.of(keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    try:
        model.fit(np.ones([512, 2]), np.ones(512), epochs=1000, callbacks=[Checkpoint(sys.argv[1])])
    except SystemExit as exit:
        os._exit(exit.code)
    os._exit(1)
shown = b""
while b"Epoch 3/" not in shown:
    shown += os.read(terminal, 65536)
os.close(terminal)
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


def test_a_closed_terminal_saves_and_ends(tmp_path):
    assert python(CLOSED_TERMINAL, [str(tmp_path)]) == 143
    assert CheckpointFiles(tmp_path).newest().step > 2 * 16


def test_nohup_keeps_training(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fit(create_strategy("one_device"), [Checkpoint(tmp_path), Signal(signal.SIGHUP, "step")])
    finally:
        assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert CheckpointFiles(tmp_path).newest().step == 30


def test_the_shutdown_of_a_preempted_machine_does_not_interrupt_the_saving(tmp_path, spot_vm):
    class Shutdown(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 2:
                spot_vm.announce()
                while not checkpoint._notices.has_notice:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGTERM)

    def fail(number, frame):
        raise AssertionError("a second SIGTERM")

    checkpoint, before = Checkpoint(tmp_path), signal.signal(signal.SIGTERM, fail)
    with pytest.raises(SystemExit) as raised:
        fit(create_strategy("one_device"), [checkpoint, Shutdown()])
    assert signal.signal(signal.SIGTERM, before) is fail
    assert raised.value.code == 143
    assert CheckpointFiles(tmp_path).newest().step == 3


def test_a_signal_whose_checkpoint_cannot_be_written_does_not_report_it_as_saved(
    tmp_path, caplog, monkeypatch
):
    def fail(*_):
        raise OSError("No space left on device")

    checkpoint = Checkpoint(tmp_path)
    monkeypatch.setattr(checkpoint._files, "write", fail)
    with pytest.raises(SystemExit):
        fit(create_strategy("one_device"), [checkpoint, Signal(signal.SIGTERM, "step")])
    assert "saved after step" not in caplog.text
    assert "was not saved" in caplog.text


def test_best_is_kept(tmp_path):
    class Worse(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = [3.0, 1.0, 2.0, 4.0][epoch]

    fit(create_strategy("one_device"), [Worse(), Checkpoint(tmp_path, keep=1)], epochs=4)
    assert [p.name for p in CheckpointFiles(tmp_path).paths()] == [
        "step-0000000020",
        "step-0000000040",
    ]


def test_resume_with_other_data_skips_read_batches(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(96, 4)).astype("float32"), rng.normal(size=(96, 1))

    def train(callbacks):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        model = kdist.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("adam", "mse")
        with contextlib.suppress(Interruption):
            model.fit(x, y, batch_size=16, shuffle=False, epochs=3, callbacks=callbacks, verbose=0)
        return model

    whole = train([])
    train([Checkpoint(tmp_path, every_steps=1), Interrupt(8)])
    assert_equal(train([Checkpoint(tmp_path)]), whole)


def test_a_run_of_telemetry_alone_resumes_its_curves(tmp_path):
    strategy = create_strategy("one_device")
    run = RunDirectory(tmp_path)

    def train(*others):
        telemetry = Telemetry(tmp_path, every_seconds=0.0, device_seconds=None, report=False)
        checkpoint = Checkpoint(run.checkpoints, every_steps=5)
        fit(strategy, [telemetry, checkpoint, *others])

    train(Interrupt(18))
    assert not run.summary.exists()
    train()
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    kinds = [(r["step"], r["window_steps"]) for r in records if r["kind"] == "train"]
    assert kinds == [(step, 1) for step in range(1, 31)]
    assert json.loads(run.summary.read_text())["epochs"] == 3


@pytest.mark.slow
def test_resumed_run_has_one_line_of_metrics_per_step(tmp_path):
    strategy = create_strategy("one_device")
    run = RunDirectory(tmp_path)

    def telemetry():
        return Telemetry(tmp_path, every_seconds=0.0, device_seconds=None)

    def checkpoint(**options):
        return Checkpoint(run.checkpoints, at_resume=run.discard_after, **options)

    fit(strategy, [telemetry(), checkpoint(every_steps=5), Interrupt(18)])
    with open(run.metrics, "a") as file:
        file.write('{"kind": "train", "st')  # killed in the middle of a line
    second = telemetry()
    fit(strategy, [second, checkpoint()])
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    train = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, 31))
    assert [r["seconds"] for r in train] == sorted(r["seconds"] for r in train)
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert [(r["epoch"], r["step"], r["examples"]) for r in epochs] == [
        (1, 10, 320),
        (2, 20, 640),
        (3, 30, 960),
    ]
    assert len(second.epoch_seconds) == 3
    assert 0 < second.summary()["goodput"] < 1


ON_SERVERS = """
import contextlib, json, sys
directory = sys.argv.pop()
import kdist
strategy = kdist.create_strategy("parameter_server")
import keras
import numpy as np
from tests.callbacks.test_checkpoint import Interrupt, Interruption, fit

class Interrupted(keras.callbacks.Callback):
    comes_last = True

class LaterInterrupt(Interrupted, Interrupt):
    pass

results = {}
for name, options in {
    "one after the other": {"max_staleness": 0}, "all at once": {"steps_per_execution": 2}
}.items():
    whole, history = fit(strategy, [], **options)
    place = f"{directory}/{name}"
    checkpoint = kdist.callbacks.Checkpoint(place, every_steps=3)
    fit(strategy, [checkpoint, LaterInterrupt(9)], **options)
    checkpoint = kdist.callbacks.Checkpoint(place)
    resumed, went_on = fit(strategy, [checkpoint], **options)
    results[name] = {
        "from": checkpoint.resumed_from,
        "iterations": int(resumed.optimizer.iterations.numpy()),
        "same history": went_on == history,
        "epochs": len(went_on["loss"]),
        "difference": max(
            float(np.abs(a - b).max())
            for a, b in zip(whole.get_weights(), resumed.get_weights(), strict=True)
        ),
    }
print(json.dumps(results))
"""


@pytest.mark.slow
def test_with_parameter_servers_it_saves_between_steps(tmp_path):
    chief, *_ = python_tasks(ON_SERVERS, {"chief": 1, "worker": 2, "ps": 2}, [str(tmp_path)])
    for result in chief.values():
        assert 0 < result["from"] < 30
        assert (result["iterations"], result["epochs"]) == (30, 3)
    assert chief["one after the other"]["difference"] == 0
    assert chief["one after the other"]["same history"]


def test_size_and_time_of_checkpoints_are_known_before_and_recorded_after(tmp_path):
    """For plans of spot VMs: a checkpoint has to fit into the notice of a preemption."""
    from kdist.planner.cost.memory import checkpoint_bytes

    class WaitForCheckpoint(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            deadline = time.monotonic() + 60
            while epoch and not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
                time.sleep(0.01)

    callbacks = [Checkpoint(tmp_path), WaitForCheckpoint()]
    strategy = create_strategy("one_device")
    model, _ = fit(strategy, callbacks, epochs=2, validates=False, units=4096)
    size, seconds = measured_saving(tmp_path)
    workload = kdist.planner.resolve_workload(model)
    assert size == pytest.approx(checkpoint_bytes(workload, "adam"), rel=0.05)
    assert seconds > 0


class TwoNetworks(kdist.Model):
    """Two networks, whose optimizers are in a container."""

    def __init__(self, container):
        super().__init__()
        self.networks = [keras.layers.Dense(units) for units in (3, 1)]
        self.rules = container([keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)])

    def call(self, x):
        first, second = self.networks
        return second(first(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        rules = self.rules.values() if isinstance(self.rules, dict) else self.rules
        for network, rule in zip(self.networks, rules, strict=True):
            weights = network.trainable_variables
            rule.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


@pytest.mark.parametrize(
    "container", [lambda rules: dict(enumerate(rules)), *seldom([list, tuple])]
)
def test_optimizers_in_a_container_are_stored(tmp_path, container):
    x = np.random.default_rng(0).normal(size=(24, 2)).astype("float32")

    def trained(epochs):
        keras.utils.set_random_seed(1)
        model = TwoNetworks(container)
        model.compile()
        checkpoint = kdist.callbacks.Checkpoint(tmp_path / "checkpoints")
        model.fit(x, x[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=[checkpoint])
        return model

    trained(1)
    rules = optimizers_of(trained(2))
    assert [int(rule.iterations) for rule in rules if rule.built] == [6, 6]
