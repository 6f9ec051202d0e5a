"""Programs with steps of their own: tapes, several optimizers, meta-learning, clipping."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import ACROSS_ROWS, outcome, program


def _data(n=50, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 6)).astype("float32"), rng.normal(size=(n, 1)).astype("float32")


class CustomModel(keras.Model):
    """Own trackers, a loss function by hand, and train_step and test_step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.mae_metric.result()}

    def test_step(self, data):
        x, y = data
        self.mae_metric.update_state(y, self(x, training=False))
        return {"mae": self.mae_metric.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.mae_metric]


def _functional(cls):
    inputs = keras.Input(shape=(6,))
    return cls(inputs, layers.Dense(1)(layers.Dense(6, activation="tanh")(inputs)))


@program
def own_step():
    """Low-level train_step and test_step on a functional model, compiled with an optimizer only."""
    x, y = _data()
    model = _functional(CustomModel)
    model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, score=model.evaluate(x, y, batch_size=16, verbose=0))


class WeightedStep(keras.Model):
    """Supports sample_weight in its own step, with compiled loss and metrics."""

    def train_step(self, data):
        if len(data) == 3:
            x, y, sample_weight = data
        else:
            sample_weight = None
            x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


@program(slow=True)
def weighted_step():
    """train_step with sample weights and class weights."""
    x, y = _data()
    model = _functional(WeightedStep)
    model.compile("rmsprop", "mse", metrics=["mae"])
    weight = np.random.default_rng(1).random((50, 1))
    first = model.fit(x, y, sample_weight=weight, batch_size=16, epochs=2, verbose=0)
    second = model.fit(x, (y > 0) * 1, class_weight={0: 1.0, 1: 3.0}, batch_size=16, verbose=0)
    return outcome(first, model, second=second.history)


class LowRank(tf.Module):
    """Layer of TensorFlow alone, which counts its calls."""

    def __init__(self):
        super().__init__()
        initial = np.random.default_rng(5).normal(size=(6, 4)).astype("float32")
        self.kernel = tf.Variable(initial, name="kernel")
        self.calls = tf.Variable(0, trainable=False, dtype=tf.int64)

    def __call__(self, x):
        self.calls.assign_add(1)
        return tf.nn.tanh(x @ self.kernel)


class WeightsOfTensorFlow(keras.Model):
    """One optimizer updates the weights of Keras and the variables of a `tf.Module`."""

    def __init__(self):
        super().__init__()
        self.body, self.head = LowRank(), layers.Dense(1)
        self.scale = tf.Variable(1.5, name="scale")

    def call(self, x):
        return self.scale * self.head(self.body(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = [*self.trainable_variables, *self.body.trainable_variables, self.scale]
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


@program
def weights_of_tensorflow():
    """Variables of TensorFlow that an optimizer of Keras updates."""
    x, y = _data()
    model = WeightsOfTensorFlow()
    average = {"use_ema": True, "ema_overwrite_frequency": 3}
    model.compile(keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.5, **average))
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    kernel, calls = model.body.kernel.numpy(), model.body.calls.numpy()
    return outcome(history, model, kernel=kernel, calls=calls, scale=model.scale.numpy())


class PartsOfVariables(keras.Model):
    """Keeps values of examples, classes, and the first rows in parts of its variables."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(1)
        self.kept, self.last, self.sums, self.largest, self.first = [
            tf.Variable(np.zeros((50, 2), "float32"), trainable=False) for _ in range(5)
        ]

    def call(self, data):
        return self.head(data[1])

    def train_step(self, data):
        (number, x), y = data
        with tf.GradientTape() as tape:
            pairs = tf.concat([self((number, x), training=True), x[:, :1]], 1)
            found = tf.stop_gradient(pairs)
            self.kept.scatter_nd_update(number[:, None], found)
            self.last.scatter_update(tf.IndexedSlices(found, number))
            self.sums.scatter_add(tf.IndexedSlices(found, number // 8))
            self.largest.scatter_max(tf.IndexedSlices(found, number // 8))
            self.first[1].assign(0.5 * self.first[1] + tf.reduce_mean(found, 0))
            near = tf.gather(self.kept, number) + tf.gather(self.sums, number // 8) + self.first[1]
            loss = tf.reduce_mean((pairs[:, :1] - y) ** 2) + 0.1 * tf.reduce_mean(near * pairs)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"error": loss}


@program(differs={**ACROSS_ROWS, "servers": "the dry run of a step has no slices of variables"})
def parts_of_variables():
    """Rows and slices of variables that a step and a callback assign, as in a memory."""
    x, y = _data()
    model = PartsOfVariables()
    model.compile(keras.optimizers.SGD(0.05))

    def reset(epoch, logs):
        model.last[:2].assign(tf.ones((2, 2)))
        model.kept.scatter_nd_add([[3]], tf.ones((1, 2)))

    data = tf.data.Dataset.from_tensor_slices(((np.arange(50), x), y)).batch(16)
    each_epoch = keras.callbacks.LambdaCallback(on_epoch_end=reset)
    history = model.fit(data, epochs=2, verbose=0, callbacks=[each_epoch])
    kept = [model.kept, model.last, model.sums, model.largest, model.first]
    return outcome(history, model, kept=[variable.numpy() for variable in kept])


class TwoOptimizers(keras.Model):
    """One optimizer for the first layer, another for the rest."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(6, activation="tanh"), layers.Dense(1)

    def call(self, x):
        return self.head(self.body(x))

    def compile(self, optimizers, **kwargs):
        super().compile(**kwargs)
        self.body_optimizer, self.head_optimizer = optimizers

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for layer, optimizer in (
            (self.body, self.body_optimizer),
            (self.head, self.head_optimizer),
        ):
            variables = layer.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


@program
def several_optimizers():
    """Optimizers by layer in train_step; clipping in one of them; the loss returned as a log."""
    x, y = _data(48)
    model = TwoOptimizers()
    optimizers = [keras.optimizers.SGD(0.5, global_clipnorm=0.1), keras.optimizers.Adam(0.01)]
    model.compile(optimizers, loss="mse")
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class GradientPenalty(keras.Model):
    """Penalizes the gradient of the output with respect to the input."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y_pred = self(x, training=True)
            slope = inner.gradient(y_pred, x)
            penalty = tf.reduce_mean(tf.reduce_sum(tf.square(slope), axis=-1))
            loss = self.compute_loss(x, y, y_pred) + 0.1 * penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {**self.compute_metrics(x, y, y_pred), "penalty": penalty}


@program
def gradient_penalty():
    """Second derivatives: the penalty of the input gradient is part of the loss and of the logs."""
    x, y = _data(48)
    model = _functional(GradientPenalty)
    model.compile("sgd", "mse", metrics=["mae"])
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class VectorLoss(keras.Model):
    """Differentiates one loss per example, which a tape adds up."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2, -1)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(loss)}


@program
def vector_loss():
    """Step that differentiates a vector of losses."""
    x, y = _data(49)
    model = _functional(VectorLoss)
    model.compile(optimizer=keras.optimizers.SGD(0.001))
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class MaskedDense(layers.Dense):
    """Dense layer that removes connections from its kernel in each call."""

    def call(self, x):
        self.kernel.assign(self.kernel * np.tri(*self.kernel.shape, dtype="float32"))
        return super().call(x)


class FrozenAtFirst(keras.Model):
    """Freezes a layer, as a GAN its discriminator, and differentiates before it is trainable."""

    def train_step(self, data):
        x, y = data
        *_, head = self.layers
        head.trainable = False
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        head.trainable = True
        weights = head.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"objective": loss}


@program
def masked_kernel():
    """Autoregressive layer that masks its kernel, under a head that is frozen in each step."""
    x, y = _data(48)
    inputs = keras.Input((6,))
    hidden = MaskedDense(6, activation="tanh")(inputs)
    model = keras.Model(inputs, MaskedDense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), "mse")
    first = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
    trained = FrozenAtFirst(inputs, model.outputs)
    trained.compile(keras.optimizers.SGD(0.05), "mse")
    second = trained.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(second, model, first=first)


class SummedLoss(keras.Model):
    """Sums over the batch, and divides by a constant batch size."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2) / 16.0
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@program
def summed_loss():
    """Step that sums its loss over the batch and divides by the global batch size."""
    x, y = _data(48)
    model = _functional(SummedLoss)
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class ClippedStep(keras.Model):
    """Clips gradients itself, before it applies them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.compute_metrics(x, y, y_pred)


@program(differs={"accumulate": "each micro-step clips its own gradient"})
def clipping_in_the_step():
    """Step that clips gradients by hand before it applies them."""
    x, y = _data(48)
    model = _functional(ClippedStep)
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"])
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class SharpnessAware(keras.Model):
    """Climbs along the gradient of the batch, and descends by the gradient there."""

    def __init__(self, network, rho=0.05):
        super().__init__()
        self.network, self.rho = network, rho

    def call(self, x):
        return self.network(x)

    def train_step(self, data):
        x, y = data
        variables = self.network.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, variables)
        norm = tf.norm([tf.norm(gradient) for gradient in gradients])
        climbs = [gradient * self.rho / (norm + 1e-12) for gradient in gradients]
        for variable, climb in zip(variables, climbs, strict=True):
            variable.assign_add(climb)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, variables)
        for variable, climb in zip(variables, climbs, strict=True):
            variable.assign_sub(climb)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return self.compute_metrics(x, y, y_pred)


@program(differs={"accumulate": "the perturbation follows the gradient of a micro-step"})
def sharpness_aware_minimization():
    """SAM: the step changes weights, takes a second gradient, and changes them back."""
    x, y = _data(48)
    network = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), layers.Dense(1)])
    model = SharpnessAware(network)
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), network)


class Accumulating(keras.Model):
    """Adds up gradients of two steps in variables of its own, and applies their sum."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.sums = [
            self.add_weight(shape=v.shape, initializer="zeros", trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.seen.assign_add(1)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        last = tf.cast(tf.equal(self.seen % 2, 0), "float32")
        self.optimizer.apply_gradients(
            zip([total * last for total in self.sums], self.trainable_variables, strict=True)
        )
        for total in self.sums:
            total.assign(total * (1 - last))
        return self.compute_metrics(x, y, y_pred)


@program
def accumulating_step():
    """Step that adds up gradients in variables of the model and applies them every second time."""
    x, y = _data(64)
    model = _functional(Accumulating)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class CentralizedRMSprop(keras.optimizers.RMSprop):
    """Subtracts the mean of each gradient."""

    def apply(self, grads, trainable_variables=None):
        centered = []
        for grad in grads:
            if len(grad.shape) > 1:
                grad = grad - ops.mean(grad, axis=list(range(len(grad.shape) - 1)), keepdims=True)
            centered.append(grad)
        return super().apply(centered, trainable_variables)


@program(slow=True)
def own_optimizer():
    """Subclassed optimizer that changes gradients in apply."""
    x, y = _data()
    model = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
    model.compile(CentralizedRMSprop(1e-2), "mse", metrics=[keras.metrics.R2Score()])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class Running(layers.Layer):
    """Subtracts a moving mean that it keeps in a weight that is not trained."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
            self.calls.assign_add(1.0)
        return x - self.mean


@program(differs=ACROSS_ROWS)
def layer_with_state():
    """Layer with weights that are not trained: a moving mean and a counter."""
    x, y = _data(48)
    model = keras.Sequential([keras.Input((6,)), Running(), layers.Dense(1)])
    model.compile("sgd", "mse")
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class MetaLearning(keras.Model):
    """MAML: each row of a batch is a task, whose weights are one gradient step from the shared."""

    def __init__(self):
        super().__init__()
        self.start = self.add_weight(shape=(2, 1), initializer="ones")
        self.tracker = keras.metrics.Mean(name="loss")

    def call(self, x):
        return ops.reshape(x, (-1, 3, 2)) @ self.start

    def train_step(self, data):
        x, y = data
        inputs, targets = ops.reshape(x, (-1, 3, 2)), y[:, :, None]
        with tf.GradientTape() as tape:
            weights = tf.tile(self.start[None], (tf.shape(x)[0], 1, 1))
            with tf.GradientTape() as inner:
                inner.watch(weights)
                support = tf.reduce_sum(tf.square(inputs @ weights - targets))
            adapted = weights - 0.05 * inner.gradient(support, weights)
            losses = tf.reduce_mean(tf.square(inputs @ adapted - targets), axis=(1, 2))
            loss = tf.reduce_mean(losses)
        self.optimizer.apply(tape.gradient(loss, [self.start]), [self.start])
        self.tracker.update_state(losses)
        return {"loss": self.tracker.result()}


@program
def model_agnostic_meta_learning():
    """MAML: gradients through the gradient step of each task; the last batch is not full."""
    x, y = _data()
    model = MetaLearning()
    model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1))
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


@program(differs={"servers": "train_on_batch is refused"})
def reptile():
    """Reptile: inner training by train_on_batch, then weights move part of the way."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(6, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    losses = []
    for task in range(3):
        before = model.get_weights()
        x, y = _data(20, task)
        for start in (0, 10):
            losses.append(float(model.train_on_batch(x[start : start + 10], y[start : start + 10])))
        after = model.get_weights()
        rate = 0.5 * (1 - task / 3)
        model.set_weights([b + (a - b) * rate for a, b in zip(after, before, strict=True)])
    model.fit(*_data(20, 9), batch_size=10, verbose=0)
    return outcome(losses, model)


@program(slow=True)
def batch_functions():
    """train_on_batch, test_on_batch, and predict_on_batch with metrics, between two fits."""
    x, y = _data()
    model = keras.Sequential([layers.Dense(6, "tanh"), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    logs = [model.train_on_batch(x[:9], y[:9], return_dict=True)]
    logs.append(model.fit(x, y, batch_size=16, verbose=0).history)
    logs.append(
        model.train_on_batch(x[9:20], y[9:20], sample_weight=y[9:20] ** 2, return_dict=True)
    )
    logs.append(model.test_on_batch(x, y, return_dict=True))
    logs.append(model.fit(x, y, batch_size=16, verbose=0).history)
    return outcome(logs, model, predicted=model.predict_on_batch(x[:7]))
