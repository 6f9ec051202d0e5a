"""Callbacks of Keras and W&B in jobs: the results of one device, one writer, and no hang.

One job runs all callbacks of the table, each in a training of its own. Those that end with the
training share a model, which is traced once and reset before each.
"""

import functools
import json

import keras
import numpy as np
import pytest

from tests.forked import python_tasks

# What each task does, and what plain Keras does on one device: the same lines.
TRAINING = """
import contextlib, http.server, json, os, pathlib, shutil, sys, tempfile
import threading, types
import keras
import numpy as np
import tensorflow as tf
import wandb
from wandb.integration import keras as wandb_keras

callbacks = keras.callbacks

def data():
    x = np.random.default_rng(0).normal(size=(44, 4)).astype("float32")
    return x, (x.sum(1) > 0).astype("float32")

def network(model_class, optimizer=None, **options):
    keras.utils.set_random_seed(7)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(6, activation="relu")(inputs)
    synchronized = model_class is not keras.Model
    x = keras.layers.BatchNormalization(synchronized=synchronized)(x)
    model = model_class(inputs, keras.layers.Dense(1, activation="sigmoid")(x))
    optimizer = optimizer or keras.optimizers.Adam(0.05)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], **options)
    return model

def reusing(build):
    "Returns a function that builds models, or with `again=True` resets the one that it built."
    kept = []
    def new(optimizer=None, again=False):
        if not again:
            return build(optimizer)
        if not kept:
            model = build(None)
            kept.extend([model, model.get_weights(), float(model.optimizer.learning_rate)])
        model, weights, rate = kept
        model.set_weights(weights)
        for variable in model.optimizer.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        model.optimizer.learning_rate = rate
        return model
    return new

def fit(model, *some, epochs=4, bad_row=None):
    x, y = data()
    targets = y.copy()
    if bad_row:
        targets[bad_row] = np.nan
    history = model.fit(x, targets, batch_size=16, epochs=epochs, verbose=0, shuffle=False,
                        callbacks=list(some), validation_data=(x[:20], y[:20])).history
    return [history, [w.tolist() for w in model.get_weights()],
            int(model.optimizer.iterations.numpy())]

class Interrupt(callbacks.Callback):
    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyError("interrupted")

class Predictions(wandb_keras.WandbEvalCallback):
    def __init__(self, to):
        super().__init__(["x"], ["row", "sum"])
        self.to, self.sums = to, []

    def add_ground_truth(self, logs=None):
        self.data_table.add_data(1)

    def add_model_predictions(self, epoch, logs=None):
        self.sums.append(float(self.model.predict(data()[0][:7], verbose=0).sum()))
        for row in self.data_table_ref.get_index():
            self.pred_table.add_data(row, self.sums[-1])

    def log_data_table(self):  # W&B's own needs a server
        pathlib.Path(self.to, "data").touch()
        self.data_table_ref = self.data_table

    def log_pred_table(self):
        pathlib.Path(self.to, "predictions").touch()

@contextlib.contextmanager
def server(received):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(json.loads(body)["epoch"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    listener = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listener.server_port}"
    listener.shutdown()

# Each returns what must be equal on all tasks, and writes files only on one.

def check_model_checkpoint(new, to):
    one = callbacks.ModelCheckpoint
    return fit(
        new(again=True),
        one(f"{to}/full-{{epoch}}.keras"),
        one(f"{to}/weights-{{epoch}}.weights.h5", save_weights_only=True),
        one(f"{to}/best-{{epoch}}-{{val_loss:.2f}}.keras", save_best_only=True),
        one(f"{to}/accuracy.keras", monitor="val_accuracy", mode="max", save_best_only=True),
        one(f"{to}/step-{{epoch}}-{{batch}}.keras", save_freq=2),
        callbacks.CSVLogger(f"{to}/log.csv"),
    )

def check_early_stopping(new, to):
    stop = callbacks.EarlyStopping(patience=1, min_delta=0.2, restore_best_weights=True)
    faster = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 1.1)
    return fit(new(keras.optimizers.SGD(0.9)), stop, faster, epochs=6)

def check_plateau(new, to):
    return fit(new(again=True), callbacks.ReduceLROnPlateau("loss", min_delta=1.0, patience=1))

def check_moving_averages(new, to):
    results = []
    for on_epoch in (False, True):
        model = new(keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.5))
        swap = callbacks.SwapEMAWeights(swap_on_epoch=on_epoch)
        results += fit(model, swap, callbacks.ModelCheckpoint(f"{to}/{on_epoch}-{{epoch}}.keras"))
    return results

def check_nan(new, to):
    steps = []
    note = callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    fit(new(again=True), callbacks.TerminateOnNaN(), note, bad_row=20)
    return steps

def check_functions(new, to):
    seen = []
    def note(number, logs):
        seen.append([number, list(logs), logs["loss"]])
    notes = callbacks.LambdaCallback(on_epoch_end=note, on_train_batch_end=note)
    return [fit(new(again=True), notes), seen]

def check_tensorboard(new, to):
    board = callbacks.TensorBoard(to, histogram_freq=1, update_freq="batch", write_graph=False)
    def write(name, value, step=None):
        tf.summary.write(name, np.asarray(value), step=step)
    board._summary_module = types.SimpleNamespace(  # tf.summary.scalar needs `tensorboard`
        create_file_writer=tf.summary.create_file_writer, record_if=tf.summary.record_if,
        scalar=write, histogram=write,
    )
    return fit(new(again=True), board)

def check_remote_monitor(new, to):
    received = []
    with server(received) as address:
        monitor = callbacks.RemoteMonitor(address, send_as_json=True)
        results = fit(new(again=True), monitor, epochs=2)
    for epoch in received:
        pathlib.Path(to, f"epoch-{epoch}").touch()
    return results

def backup(new, to, interrupt, **options):
    model, epochs = new(again=True), []
    def note(epoch, logs):
        epochs.append([epoch, int(model.optimizer.iterations.numpy())])
    def saver():
        return callbacks.BackupAndRestore(f"{to}/backup", **options)
    with contextlib.suppress(KeyError):
        fit(model, saver(), Interrupt(*interrupt))
    for file in pathlib.Path(to).glob("backup/*"):
        pathlib.Path(to, f"{file.name} at the interruption").touch()
    model = new()
    return [fit(model, saver(), callbacks.LambdaCallback(on_epoch_begin=note)), epochs]

def check_backup_of_epochs(new, to):
    return backup(new, to, (2, 1))

def check_backup_of_steps(new, to):
    return backup(new, to, (2, 2), save_freq=2, delete_checkpoint=False)

def check_two_backups(new, to):
    return backup(new, to, (3, 0), double_checkpoint=True)

def check_damaged_backup(new, to):
    directory = pathlib.Path(to, "backup")
    directory.mkdir()
    (directory / "latest.weights.h5").write_text("damaged")
    try:
        fit(new(), callbacks.BackupAndRestore(directory))
    except (OSError, RuntimeError):
        shutil.rmtree(directory)
        return [1]

def check_wandb(new, to):
    wandb.init(mode="disabled")
    predictions = Predictions(to)
    written = []
    class Logger(wandb_keras.WandbMetricsLogger):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            pathlib.Path(to, f"epoch-{epoch}").touch()
    saver = wandb_keras.WandbModelCheckpoint(f"{to}/{{epoch}}.keras")
    results = fit(new(again=True), Logger(log_freq=1), saver, predictions)
    wandb.finish()
    return [results, predictions.sums]

def files(directory):
    found = {}
    for path in sorted(pathlib.Path(directory).rglob("*")):
        if path.suffix == ".keras":
            weights = keras.models.load_model(path).get_weights()
            found[path.name] = [w.tolist() for w in weights]
        elif path.is_file():
            found[path.name.partition("tfevents")[0]] = []
    return found

def check_all(new):
    results = {}
    for name, check in list(globals().items()):
        if name.startswith("check_") and name != "check_all":
            to = tempfile.mkdtemp()
            results[name] = check(new, to), files(to)
    return results
"""

TASK = f"""
import faulthandler, functools, json, sys
faulthandler.dump_traceback_later(240, exit=True)  # shows where it hangs
arguments = json.loads(sys.argv.pop())
import kdist
strategy = kdist.create_strategy(arguments["name"], cluster_timeout_seconds=60)
{TRAINING}
def build(optimizer):
    with strategy.scope():
        return network(kdist.Model, optimizer, **arguments["options"])
print(json.dumps(check_all(reusing(build))))
"""


@functools.cache
def reference():
    names = {}
    exec(TRAINING, names)
    build = functools.partial(names["network"], keras.Model)
    return names["check_all"](names["reusing"](build))


def assert_equal(value, expected, where):
    if isinstance(expected, dict):
        assert list(value) == list(expected), where
        for key in expected:
            assert_equal(value[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple) and any(isinstance(e, list | dict) for e in expected):
        assert len(value) == len(expected), where
        for number, parts in enumerate(zip(value, expected, strict=True)):
            assert_equal(*parts, f"{where}/{number}")
    elif isinstance(expected, list) and any(isinstance(e, str) for e in expected):
        assert value == expected, where
    else:
        np.testing.assert_allclose(value, expected, atol=2e-5, err_msg=where)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options", "tasks"),
    [
        ("multi_worker", {}, {"worker": 2}),
        ("parameter_server", {"max_staleness": 0}, {"chief": 1, "worker": 2, "ps": 1}),
    ],
    ids=["multi_worker", "parameter_server"],
)
def test_callbacks_do_what_they_do_on_one_device(name, options, tasks):
    arguments = json.dumps({"name": name, "options": options})
    results = [result for result in python_tasks(TASK, tasks, [arguments]) if result]
    for task, checks in enumerate(results):
        assert list(checks) == list(reference())
        for check, (result, files) in checks.items():
            expected, expected_files = reference()[check]
            assert_equal(result, expected, f"{check} on task {task}")
            assert_equal(files, expected_files if task == 0 else {}, f"{check}, files")
