"""Programs about fit itself: data, inputs and outputs, metrics, callbacks, regularization."""

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import CALLBACKS_PER_CALL, outcome, program


def _data(n=50, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 6)).astype("float32"), rng.integers(0, 3, n)


def _classifier(**kwargs):
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh", **kwargs), layers.Dense(3, "softmax")]
    )


@program(slow=True)
def several_inputs_and_outputs():
    """Tickets: title, body, and tags as inputs; priority and department with loss weights."""
    rng = np.random.default_rng(0)
    title, body = rng.integers(0, 12, (45, 4)), rng.integers(0, 12, (45, 7))
    tags = rng.integers(0, 2, (45, 3)).astype("float32")
    priority = rng.random((45, 1)).astype("float32")
    department = np.eye(4)[rng.integers(0, 4, 45)]
    inputs = [
        keras.Input((None,), name="title"), keras.Input((None,), name="body"),
        keras.Input((3,), name="tags"),
    ]  # fmt: skip
    read = [layers.LSTM(4)(layers.Embedding(12, 5)(text)) for text in inputs[:2]]
    z = layers.concatenate([*read, inputs[2]])
    outputs = {
        "priority": layers.Dense(1, name="priority")(z),
        "department": layers.Dense(4, name="department")(z),
    }
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-3),
        loss={
            "priority": keras.losses.BinaryCrossentropy(from_logits=True),
            "department": keras.losses.CategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
    )
    history = model.fit(
        {"title": title, "body": body, "tags": tags},
        {"priority": priority, "department": department},
        epochs=2, batch_size=16, verbose=0,
    )  # fmt: skip
    return outcome(history, model)


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y, size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y, self.size = x, y, size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows], np.linspace(0.5, 1.5, len(self.x))[rows]


@program(slow=True)
def py_dataset():
    """PyDataset with sample weights, for training, validation, and evaluation."""
    x, y = _data()
    model = _classifier()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        Batches(x, y, 16), validation_data=Batches(x, y, 15), shuffle=False, epochs=2, verbose=0
    )
    return outcome(history, model, score=model.evaluate(Batches(x, y, 9), verbose=0))


@program(slow=True)
def python_generator():
    """Endless Python generator with steps_per_epoch, initial_epoch, and validation_steps."""
    x, y = _data()

    def batches():
        while True:
            for start in range(0, 50, 16):
                yield x[start : start + 16], y[start : start + 16]

    model = _classifier()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        batches(), steps_per_epoch=4, initial_epoch=1, epochs=3, validation_data=batches(),
        validation_steps=2, verbose=0,
    )  # fmt: skip
    return outcome(history, model)


class F1(keras.metrics.Metric):
    """Macro F1 by counts that are added up."""

    def __init__(self, classes, name="f1", **kwargs):
        super().__init__(name=name, **kwargs)
        self.classes = classes
        self.counts = self.add_weight(shape=(3, classes), initializer="zeros", name="counts")

    def update_state(self, y_true, y_pred, sample_weight=None):
        true = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), self.classes)
        found = ops.one_hot(ops.argmax(y_pred, -1), self.classes)
        counts = [ops.sum(true * found, 0), ops.sum(true, 0), ops.sum(found, 0)]
        self.counts.assign(self.counts + ops.stack(counts))

    def result(self):
        hits, true, found = ops.unstack(self.counts, 3)
        return ops.mean(2 * hits / ops.maximum(true + found, 1.0))

    def reset_state(self):
        self.counts.assign(ops.zeros_like(self.counts))


@program(slow=True)
def own_metric():
    """Metric that assigns its state, and one that is a function."""
    x, y = _data()

    def confidence(y_true, y_pred):
        return ops.max(y_pred, axis=-1)

    model = _classifier()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=[F1(3), confidence])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_split=0.1, verbose=0)
    return outcome(history, model, score=model.evaluate(x, y, batch_size=16, verbose=0))


class PerClass(keras.metrics.Metric):
    """Accuracy of each class, as a dict."""

    def __init__(self, name="per_class", **kwargs):
        super().__init__(name=name, **kwargs)
        self.hits = [self.add_variable((), "zeros", name=f"hits_{n}") for n in range(3)]
        self.rows = [self.add_variable((), "zeros", name=f"rows_{n}") for n in range(3)]

    def update_state(self, y_true, y_pred, sample_weight=None):
        hit = ops.cast(ops.equal(ops.cast(y_true, "int64"), ops.argmax(y_pred, -1)), "float32")
        for n in range(3):
            of_class = ops.cast(ops.equal(y_true, n), "float32")
            self.hits[n].assign_add(ops.sum(hit * of_class))
            self.rows[n].assign_add(ops.sum(of_class))

    def result(self):
        return {f"class_{n}": self.hits[n] / ops.maximum(self.rows[n], 1.0) for n in range(3)}


@program
def metric_of_dicts():
    """Metric whose result is a dict."""
    x, y = _data()
    model = _classifier()
    model.compile("adam", "sparse_categorical_crossentropy", metrics=[PerClass()])
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class LogisticEndpoint(layers.Layer):
    """Computes loss and metric from predictions and targets that are inputs."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.accuracy_metric = keras.metrics.BinaryAccuracy(name="binary_accuracy")

    def call(self, logits, targets=None, sample_weight=None):
        if targets is not None:
            self.add_loss(self.loss_fn(targets, logits, sample_weight))
            self.accuracy_metric.update_state(targets, logits, sample_weight)
        return ops.softmax(logits)


@program
def endpoint_layer():
    """Endpoint layer: targets are an input; loss and metric belong to a layer."""
    x, _ = _data()
    targets = (x[:, :1] > 0).astype("float32")
    inputs = {
        "inputs": keras.Input((6,), name="inputs"),
        "targets": keras.Input((1,), name="targets"),
    }
    logits = layers.Dense(1)(inputs["inputs"])
    model = keras.Model(inputs, LogisticEndpoint(name="predictions")(logits, inputs["targets"]))
    model.compile(optimizer="adam")
    data = {"inputs": x, "targets": targets}
    return outcome(model.fit(data, batch_size=16, epochs=2, verbose=0), model)


class ActivityRegularization(layers.Layer):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def call(self, inputs):
        self.add_loss(self.rate * ops.mean(ops.square(inputs)))
        return inputs


@program(slow=True)
def added_losses():
    """add_loss in a layer, activity and weight regularizers, constraints, uneven last batch."""
    x, y = _data(49)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", activity_regularizer="l2"),
            ActivityRegularization(0.1),
            layers.Dense(8, kernel_regularizer="l1", bias_constraint="non_neg"),
            layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_split=0.1, verbose=0)
    return outcome(history, model)


class SumOfActivity(layers.Layer):
    """Adds a sum over the batch, and a loss for each example."""

    def call(self, inputs):
        self.add_loss(1e-3 * ops.sum(ops.square(inputs)))
        self.add_loss(1e-2 * ops.sum(ops.abs(inputs), axis=-1))
        return inputs


@program
def summed_losses():
    """add_loss of a sum over the batch and of a vector, and a loss with reduction sum."""
    x, y = _data(49)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), SumOfActivity(), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), keras.losses.MeanSquaredError(reduction="sum"))
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


@program(differs=CALLBACKS_PER_CALL)
def changed_learning_rate():
    """Callback that writes the learning rate and the weights of the model in mid-training."""
    x, y = _data()

    class Change(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)

        def on_epoch_end(self, epoch, logs=None):
            layer = self.model.layers[-1]
            kernel, bias = layer.get_weights()
            layer.set_weights([np.clip(kernel, -0.5, 0.5), bias])
            self.model.layers[0].kernel.assign(self.model.layers[0].kernel * 0.9)

    model = _classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=16, epochs=3, callbacks=[Change()], verbose=0)
    return outcome(history, model)


@program
def freezing_in_training():
    """Callback that freezes a layer between epochs and compiles the model again."""
    x, y = _data()

    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.layers[0].trainable = False
                self.model.compile("sgd", "sparse_categorical_crossentropy")
                self.model.make_train_function(force=True)

    model = _classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(x, y, batch_size=16, epochs=2, callbacks=[Freeze()], verbose=0)
    return outcome(history, model)


@program(slow=True)
def weight_averaging():
    """Callback that averages weights over epochs, and leaves the mean in the model."""
    x, y = _data()

    class Averaging(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.sums, self.count = [np.zeros_like(w) for w in self.model.get_weights()], 0

        def on_epoch_end(self, epoch, logs=None):
            self.sums = [s + w for s, w in zip(self.sums, self.model.get_weights(), strict=True)]
            self.count += 1

        def on_train_end(self, logs=None):
            self.model.set_weights([s / self.count for s in self.sums])

    model = _classifier()
    model.compile("nadam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=3, callbacks=[Averaging()], verbose=0)
    return outcome(history, model, score=model.evaluate(x, y, verbose=0))


@program(slow=True)
def recompile_and_continue():
    """Three phases: another optimizer, another loss, and frozen layers, each compiled again."""
    x, y = _data()
    model = _classifier()
    logs = []
    for optimizer, loss, trainable in (
        (keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", True),
        (keras.optimizers.Adam(0.01, epsilon=1e-3), "sparse_categorical_crossentropy", True),
        (keras.optimizers.Adam(0.01, epsilon=1e-3), keras.losses.Poisson(), False),
    ):
        model.layers[0].trainable = trainable
        model.compile(optimizer, loss, metrics=["accuracy"])
        target = y if trainable else np.eye(3)[y]
        logs.append(model.fit(x, target, batch_size=16, epochs=1, verbose=0).history)
    return outcome(logs, model)


@program(differs=CALLBACKS_PER_CALL)
def stopping_inside_an_epoch():
    """Callbacks that read the logs of batches, stop inside an epoch, and count test batches."""
    x, y = _data()
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])
            if len(seen) == 6:
                self.model.stop_training = True

        def on_test_batch_end(self, batch, logs=None):
            seen.append(logs["loss"])

    model = _classifier()
    model.compile("sgd", "sparse_categorical_crossentropy")
    history = model.fit(
        x, y, batch_size=16, epochs=4, validation_data=(x, y), callbacks=[Watch()], verbose=0
    )
    return outcome(history, model, seen=seen)


@program
def float64_network():
    """Network whose layers have dtype float64, with a LambdaCallback and TerminateOnNaN."""
    x, y = _data()
    seen = []
    model = keras.Sequential(
        [layers.Dense(8, "tanh", dtype="float64"), layers.Dense(3, "softmax", dtype="float64")]
    )
    model.compile("adamax", "sparse_categorical_crossentropy", metrics=["accuracy"])
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])
    )
    callbacks = [note, keras.callbacks.TerminateOnNaN(), keras.callbacks.History()]
    history = model.fit(x, y, batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
    return outcome(history, model, seen=seen)
