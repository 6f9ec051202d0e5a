"""Programs that compute across the rows of a batch, or keep what a step computes from them."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import ACROSS_ROWS, outcome, program


def _data(rows=22, columns=3, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype("float32")


class _Trains(keras.Model):
    """Model with a step of its own, whose loss is `loss_of(x)`."""

    def __init__(self, width=3, **options):
        super().__init__(**options)
        self.dense = layers.Dense(width)

    def call(self, x):
        return self.dense(x)

    def loss_of(self, x):
        return ops.mean((self(x) - x) ** 2)

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = self.loss_of(x)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"objective": loss}


def _train(model, data=None, batch_size=8, **options):
    model.compile(keras.optimizers.SGD(0.05))
    data = _data() if data is None else data
    return model.fit(data, batch_size=batch_size, epochs=2, verbose=0, shuffle=False, **options)


@program(slow=True, differs=ACROSS_ROWS)
def barlow_twins():
    """Barlow Twins: the correlation of two views' features over the batch."""

    class Twins(_Trains):
        def loss_of(self, x):
            one, two = (ops.tanh(self(view)) for view in (x, x + 0.1 * ops.sin(x)))
            one, two = ((v - ops.mean(v, axis=0)) / (ops.std(v, axis=0) + 1e-3) for v in (one, two))
            rows = ops.cast(ops.shape(x)[0], "float32")
            correlation = ops.matmul(ops.transpose(one), two) / rows
            return ops.sum((correlation - ops.eye(3)) ** 2)

    model = Twins()
    return outcome(_train(model), model)


@program(slow=True, differs=ACROSS_ROWS)
def hard_triplets():
    """Triplets of the farthest row of the same class and the nearest one of another class."""

    class Triplets(keras.losses.Loss):
        def call(self, labels, features):
            differences = ops.expand_dims(features, 1) - ops.expand_dims(features, 0)
            distances = ops.sum(differences**2, axis=-1)
            same = ops.equal(labels, ops.transpose(labels))
            farthest = ops.max(ops.where(same, distances, 0.0), axis=1)
            nearest = ops.min(ops.where(same, distances + 1e3, distances), axis=1)
            return ops.relu(farthest - nearest + 1.0)

    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="tanh"), layers.Dense(3)]
    )
    model.compile(keras.optimizers.SGD(0.05), Triplets())
    y = np.arange(22)[:, None] % 3
    history = model.fit(
        _data(), y, batch_size=8, epochs=2, verbose=0, shuffle=False, validation_split=0.2
    )
    return outcome(history, model)


@program(differs=ACROSS_ROWS)
def in_batch_negatives_of_sequences():
    """Retrieval from sequences: the targets of the other rows are negatives; own accuracy."""

    class Retrieval(keras.Model):
        def __init__(self):
            super().__init__()
            self.gru = layers.GRU(4)
            self.accuracy = keras.metrics.SparseCategoricalAccuracy("retrieved")

        def call(self, x):
            return self.gru(x)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            scores = ops.matmul(y_pred, ops.transpose(y))
            labels = ops.arange(ops.shape(scores)[0])
            self.accuracy.update_state(labels, scores)
            losses = keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
            return ops.mean(losses)

    model = Retrieval()
    model.compile(keras.optimizers.SGD(0.1))
    x, y = _data(24, 12).reshape(24, 4, 3), _data(24, 4, seed=1)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    return outcome(model.fit(data, epochs=2, verbose=0), model)


@program(differs=ACROSS_ROWS)
def minibatch_deviation():
    """Layer that appends the standard deviation over the batch, as in StyleGAN."""

    class Deviation(layers.Layer):
        def call(self, x):
            deviation = ops.mean(ops.sqrt(ops.var(x, axis=0) + 1e-8))
            return ops.concatenate([x, ops.zeros_like(x[:, :1]) + deviation], axis=1)

    model = keras.Sequential(
        [keras.Input((3,)), layers.Dense(4, activation="relu"), Deviation(), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    history = model.fit(
        _data(), _data(columns=1), batch_size=8, epochs=2, verbose=0, validation_split=0.2
    )
    return outcome(history, model)


@program(differs=ACROSS_ROWS)
def constant_batch_size():
    """Diffusion whose noise has the batch size of the program, with random numbers and dropout."""

    class Diffusion(keras.Model):
        def __init__(self):
            super().__init__()
            self.network = keras.Sequential([layers.Dense(6), layers.Dropout(0.3), layers.Dense(3)])
            self.seeds = keras.random.SeedGenerator(1)

        def train_step(self, x):
            noise = keras.random.normal((8, 3), seed=self.seeds)
            rates = keras.random.uniform((8, 1), seed=self.seeds)
            with tf.GradientTape() as tape:
                found = self.network(
                    ops.sqrt(rates) * x + ops.sqrt(1 - rates) * noise, training=True
                )
                loss = ops.mean((found - noise) ** 2)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"objective": loss}

    model = Diffusion()
    data = tf.data.Dataset.from_tensor_slices(_data(26)).batch(8, drop_remainder=True)
    model.compile(keras.optimizers.Adam(0.01))
    return outcome(model.fit(data, epochs=2, verbose=0), model.network)


@program(slow=True, differs=ACROSS_ROWS)
def stateful_forecast():
    """Stateful GRU, whose state belongs to the rows of a batch, reset after each epoch."""

    class Reset(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.layers[0].reset_states()

    model = keras.Sequential(
        [keras.Input(batch_shape=(4, 5, 1)), layers.GRU(3, stateful=True), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = _data(12, 5)[..., None], _data(12, 1)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[Reset()])
    return outcome(history, model, predicted=model.predict(x, batch_size=4, verbose=0))


@program(differs=ACROSS_ROWS)
def feature_queue():
    """MoCo: a queue of the features of earlier batches, and a moving average of a statistic."""

    class Queue(_Trains):
        def __init__(self):
            super().__init__()
            start = np.random.default_rng(3).normal(size=(20, 3)).astype("float32")
            self.queue = keras.Variable(start, trainable=False)
            self.largest = tf.Variable(0.0, trainable=False)
            self.sizes = self.add_weight(shape=(3,), initializer="zeros", trainable=False)

        def train_step(self, x):
            features = ops.stop_gradient(self(x))
            logs = super().train_step(x)
            self.largest.assign(0.9 * self.largest + 0.1 * ops.max(features))
            self.sizes.assign(0.5 * self.sizes + ops.sum(ops.cast(features > 0, "float32"), axis=0))
            kept = self.queue[: -ops.shape(features)[0]]
            self.queue.assign(ops.concatenate([features, kept], axis=0))
            return logs

        def loss_of(self, x):
            return ops.mean(ops.logsumexp(self(x) @ ops.transpose(self.queue), axis=1))

    model = Queue()
    data = tf.data.Dataset.from_tensor_slices(_data(24)).batch(8, drop_remainder=True)
    history = _train(model, data, batch_size=None)
    return outcome(history, model, queue=model.queue.numpy(), largest=model.largest.numpy())


@program
def attributes_of_a_step():
    """Step that stores tensors in attributes, and calls `tf.function`s with tapes and loops."""

    class Stores(_Trains):
        def __init__(self):
            super().__init__()
            self.second = layers.Dense(1)
            self.mean = keras.metrics.Mean("residual")

        @tf.function
        def first_update(self, x):
            with tf.GradientTape() as tape:
                loss = ops.mean((self(x) - self.target) ** 2)
            weights = self.dense.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            total = tf.constant(0.0)
            for number in tf.range(3):
                if number > 0:
                    total += tf.cast(number, tf.float32) * loss
            return total

        @tf.function
        def second_update(self, x):
            with tf.GradientTape() as tape:
                noise = tf.ones((self.rows, 1)) * self.target[:, :1]
                loss = ops.mean((self.second(x) - noise) ** 2)
            weights = self.second.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return loss

        def train_step(self, x):
            self.rows = tf.shape(x)[0]
            self.target = 0.5 * x
            first, second = self.first_update(x), self.second_update(x)
            self.mean.update_state(first + second)
            return {"first": first, "second": second, "residual": self.mean.result()}

    model = Stores()
    model.dense.build((None, 3))
    model.second.build((None, 3))
    model.compile(keras.optimizers.SGD(0.05))
    model.optimizer.build(model.trainable_variables)
    history = model.fit(_data(), batch_size=8, epochs=2, verbose=0, shuffle=False)
    return outcome(history, model)


@program(differs={"accumulate": "labeled and unlabeled rows are not divided"})
def labeled_and_unlabeled():
    """Semi-supervised contrastive learning: more unlabeled rows in a batch than labeled ones."""

    class Semisupervised(_Trains):
        def __init__(self):
            super().__init__()
            self.probe = layers.Dense(2)
            self.matches = keras.metrics.SparseCategoricalAccuracy("matches")
            self.probe_loss = keras.metrics.Mean("probe_loss")

        def train_step(self, data):
            unlabeled, (labeled, labels) = data
            x = ops.concatenate([unlabeled, labeled])
            with tf.GradientTape() as tape:
                one, two = self(x), self(x + 0.1 * ops.sin(x))
                scores = ops.matmul(one, ops.transpose(two))
                numbers = ops.arange(ops.shape(scores)[0])
                losses = keras.losses.sparse_categorical_crossentropy(
                    numbers, scores, from_logits=True
                )
            weights = self.dense.trainable_variables
            self.optimizer.apply(tape.gradient(losses, weights), weights)
            with tf.GradientTape() as tape:
                logits = self.probe(self(labeled))
                loss = ops.mean(
                    keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
                )
            weights = self.probe.trainable_variables
            self.probe_optimizer.apply(tape.gradient(loss, weights), weights)
            self.matches.update_state(numbers, scores)
            self.probe_loss.update_state(loss)
            return {m.name: m.result() for m in (self.matches, self.probe_loss)}

    model = Semisupervised()
    model.dense.build((None, 3))
    model.probe.build((None, 3))
    model.probe_optimizer = keras.optimizers.Adam(0.05)
    labeled = tf.data.Dataset.from_tensor_slices((_data(10, seed=1), np.arange(10) % 2))
    unlabeled = tf.data.Dataset.from_tensor_slices(_data(30))
    data = tf.data.Dataset.zip(
        unlabeled.batch(10, drop_remainder=True), labeled.batch(3, drop_remainder=True)
    )
    model.compile(keras.optimizers.SGD(0.05))
    return outcome(model.fit(data, epochs=2, verbose=0), model)


@program(differs=ACROSS_ROWS)
def metrics_across_rows():
    """Own metrics of pairs of rows, of a mean plus a sum, of two batches, and of the first row."""

    class Kernel(keras.metrics.Metric):
        def __init__(self, **options):
            super().__init__(**options)
            self.tracker = keras.metrics.Mean()

        def update_state(self, x, y=None, sample_weight=None):
            self.tracker.update_state(ops.mean(ops.matmul(x, ops.transpose(x)) ** 2))

        def result(self):
            return self.tracker.result()

        def reset_state(self):
            self.tracker.reset_state()

    class Measured(_Trains):
        def __init__(self):
            super().__init__()
            self.kernel = Kernel(name="kernel")
            self.both = keras.metrics.Mean("both")
            self.pairs = keras.metrics.BinaryAccuracy("pairs")
            self.first = keras.metrics.MeanMetricWrapper(lambda y, p: (y[0] - p[0]) ** 2, "first")

        def train_step(self, x):
            super().train_step(x)
            y = self(x)
            self.kernel.update_state(y)
            self.both.update_state(ops.mean(y) + 0.1 * ops.sum(x))
            p, q = ops.sigmoid(y[:, :1]), ops.sigmoid(x[:, :1])
            self.pairs.update_state([ops.ones_like(p), ops.zeros_like(q)], [p, q])
            self.first.update_state(x, y)
            return {m.name: m.result() for m in self.metrics if m.name != "loss"}

    model = Measured()
    return outcome(_train(model), model)


@program(differs=ACROSS_ROWS)
def synchronized_statistics():
    """GAN-like step without a scaled loss, over synchronized BatchNormalization, odd batches."""

    class Normalized(_Trains):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(synchronized=True)
            self.head = layers.Dense(1)

        def call(self, x, training=None):
            return self.head(self.norm(self.dense(x), training=training))

        def loss_of(self, x):
            real, fake = self(x, training=True), self(ops.flip(x, axis=1), training=True)
            return ops.mean(fake) - ops.mean(real) + 0.1 * ops.mean(real**2)

    model = Normalized()
    return outcome(_train(model), model)


@program(slow=True)
def session_cleared():
    """Search over models that clears Keras's session, and evaluates by hand after `fit`."""
    found = {}
    x, y = _data(), _data(columns=1)
    for width in (2, 4):
        keras.backend.clear_session()
        keras.utils.set_random_seed(width)
        model = keras.Sequential([keras.Input((3,)), layers.Dense(width), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), keras.losses.MeanSquaredError())
        model.fit(x, y, batch_size=8, verbose=0, shuffle=False)
        by_hand = keras.losses.MeanSquaredError()(y, model(x))
        found[str(width)] = [*model.get_weights(), ops.convert_to_numpy(by_hand)]
    return outcome({}, model, found=found)
