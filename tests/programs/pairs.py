"""Programs that learn distances: siamese, triplet, contrastive, and momentum encoders."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import ACROSS_ROWS, outcome, program


def _encoder(width=6):
    return keras.Sequential([layers.Dense(10, activation="relu"), layers.Dense(width)])


def _points(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 5)).astype("float32")


@program(slow=True)
def siamese_distance():
    """Siamese network on a list of two inputs, with a contrastive loss of the distance."""
    a, b = _points(45), _points(45, 1)
    same = np.random.default_rng(2).integers(0, 2, 45).astype("float32")
    encoder = keras.Sequential([keras.Input((5,)), layers.Dense(6, activation="tanh")])
    first, second = keras.Input((5,)), keras.Input((5,))

    def euclidean(vectors):
        x, y = vectors
        return ops.sqrt(ops.maximum(ops.sum(ops.square(x - y), axis=1, keepdims=True), 1e-7))

    distance = layers.Lambda(euclidean, output_shape=(1,))([encoder(first), encoder(second)])
    model = keras.Model([first, second], layers.Dense(1, activation="sigmoid")(distance))

    def contrastive(y_true, y_pred):
        return ops.mean(
            (1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(1 - y_pred, 0))
        )

    model.compile(loss=contrastive, optimizer=keras.optimizers.RMSprop(1e-2), metrics=["accuracy"])
    history = model.fit(
        [a, b], same, validation_data=([a[:7], b[:7]], same[:7]), batch_size=16, epochs=2, verbose=0
    )
    return outcome(history, model, predicted=model.predict([a, b], verbose=0))


class SiameseModel(keras.Model):
    """Triplet loss on the distances of a functional network with three inputs."""

    def __init__(self, network, margin=0.5):
        super().__init__()
        self.network = network
        self.margin = margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def call(self, inputs):
        return self.network(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self._triplet_loss(data)
        gradients = tape.gradient(loss, self.network.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def test_step(self, data):
        self.loss_tracker.update_state(self._triplet_loss(data))
        return {"loss": self.loss_tracker.result()}

    def _triplet_loss(self, data):
        near, far = self.network(data)
        return tf.maximum(near - far + self.margin, 0.0)

    @property
    def metrics(self):
        return [self.loss_tracker]


class Distances(layers.Layer):
    def call(self, anchor, positive, negative):
        return (
            ops.sum(ops.square(anchor - positive), -1),
            ops.sum(ops.square(anchor - negative), -1),
        )


@program
def siamese_triplets():
    """Siamese triplets from zipped data sets; the step differentiates one loss per example."""
    sets = [tf.data.Dataset.from_tensor_slices(_points(38, n)) for n in range(3)]
    data = tf.data.Dataset.zip(tuple(sets)).batch(16, drop_remainder=False).prefetch(2)
    encoder = _encoder()
    inputs = [keras.Input((5,), name=name) for name in ("anchor", "positive", "negative")]
    network = keras.Model(inputs, Distances()(*[encoder(part) for part in inputs]))
    model = SiameseModel(network)
    model.compile(optimizer=keras.optimizers.SGD(0.005))
    history = model.fit(data, epochs=2, validation_data=data.take(1), verbose=0)
    return outcome(history, network, predicted=encoder.predict(_points(9), verbose=0))


class TripletsByName(keras.Model):
    """Model that is never called on what `fit` gets."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.tracker = keras.metrics.Mean(name="loss")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            parts = {name: self.encoder(part, training=True) for name, part in data.items()}
            near = ops.sum(ops.square(parts["anchor"] - parts["positive"]), -1)
            far = ops.sum(ops.square(parts["anchor"] - parts["negative"]), -1)
            loss = ops.mean(ops.maximum(near - far + 0.3, 0.0))
        variables = self.encoder.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.tracker.update_state(loss)
        return {m.name: m.result() for m in self.metrics}


@program
def triplets_by_name():
    """Metric learning with a dict of anchor, positive, and negative; the model has no call."""
    data = {name: _points(38, n) for n, name in enumerate(("anchor", "positive", "negative"))}
    model = TripletsByName(_encoder())
    model.compile(optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3))
    history = model.fit(tf.data.Dataset.from_tensor_slices(data).batch(16), epochs=2, verbose=0)
    return outcome(history, model.encoder, predicted=model.encoder.predict(_points(9), verbose=0))


class SimilarityModel(keras.Model):
    """Similarities between all anchors and positives of a batch; class n is row n."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        with tf.GradientTape() as tape:
            a = ops.normalize(self.encoder(anchors, training=True), axis=-1)
            p = ops.normalize(self.encoder(positives, training=True), axis=-1)
            similarities = ops.einsum("ae,pe->ap", a, p) / 0.2
            labels = ops.arange(ops.shape(similarities)[0])
            loss = self.compute_loss(y=labels, y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, similarities)
        return {m.name: m.result() for m in self.metrics}


@program(differs=ACROSS_ROWS)
def metric_learning():
    """Metric learning: cross-entropy over the similarities of all pairs of a batch."""
    pairs = np.stack([_points(32), _points(32, 1)], 1)
    model = SimilarityModel(_encoder())
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    history = model.fit(pairs, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model.encoder)


class SimCLR(keras.Model):
    """Contrastive pretraining of two views, with a linear probe that has its own optimizer."""

    def __init__(self):
        super().__init__()
        self.encoder = _encoder(8)
        self.projection_head = keras.Sequential([keras.Input((8,)), layers.Dense(8)])
        self.linear_probe = keras.Sequential([keras.Input((8,)), layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
        super().compile(**kwargs)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_loss_tracker, self.probe_loss_tracker, self.probe_accuracy]

    def contrastive_loss(self, one, two):
        one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
        similarities = ops.matmul(one, ops.transpose(two)) / 0.1
        labels = ops.arange(ops.shape(one)[0])
        loss = keras.losses.sparse_categorical_crossentropy
        return (
            ops.mean(loss(labels, similarities, from_logits=True))
            + ops.mean(loss(labels, ops.transpose(similarities), from_logits=True))
        ) / 2

    def train_step(self, data):
        (one, two), labels = data
        with tf.GradientTape() as tape:
            projected = [self.projection_head(self.encoder(view)) for view in (one, two)]
            loss = self.contrastive_loss(*projected)
        variables = self.encoder.trainable_weights + self.projection_head.trainable_weights
        gradients = tape.gradient(loss, variables)
        self.contrastive_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.contrastive_loss_tracker.update_state(loss)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(one))
            probe_loss = self.probe_loss(labels, logits)
        variables = self.linear_probe.trainable_weights
        gradients = tape.gradient(probe_loss, variables)
        self.probe_optimizer.apply_gradients(zip(gradients, variables, strict=True))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}


@program(differs=ACROSS_ROWS)
def simclr():
    """SimCLR: two views, in-batch negatives, and a linear probe in the same step."""
    labels = np.random.default_rng(3).integers(0, 3, 32)
    model = SimCLR()
    model.compile(keras.optimizers.SGD(0.05), keras.optimizers.Adam(0.01))
    history = model.fit((_points(32), _points(32, 1)), labels, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model.encoder, model.linear_probe)


class SupervisedContrastiveLoss(keras.losses.Loss):
    def call(self, labels, features):
        features = ops.normalize(features, axis=1)
        logits = ops.matmul(features, ops.transpose(features)) / 0.5
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        shares = same / ops.sum(same, axis=1, keepdims=True)
        return -ops.sum(shares * ops.log_softmax(logits, axis=1), axis=1)


@program(differs=ACROSS_ROWS)
def supervised_contrastive():
    """Supervised contrastive loss through compile and fit, then a frozen encoder."""
    x, y = _points(32), np.random.default_rng(4).integers(0, 3, (32, 1))
    encoder = _encoder()
    encoder.compile(keras.optimizers.SGD(0.05), SupervisedContrastiveLoss())
    first = encoder.fit(x, y, batch_size=16, epochs=2, verbose=0)
    encoder.trainable = False
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(encoder(inputs)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return outcome(model.fit(x, y, batch_size=16, verbose=0), model, first=first.history)


class MomentumEncoder(keras.Model):
    """BYOL: an online network predicts the output of its moving average."""

    def __init__(self):
        super().__init__()
        self.online, self.target = _encoder(), _encoder()
        self.predictor = keras.Sequential([keras.Input((6,)), layers.Dense(6)])
        self.tracker = keras.metrics.Mean(name="loss")

    def build(self, shape):
        self.online.build((None, 5))
        self.target.build((None, 5))
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False

    def call(self, x):
        return self.online(x)

    def train_step(self, data):
        one, two = data[0]
        with tf.GradientTape() as tape:
            predicted = ops.normalize(self.predictor(self.online(one)), axis=-1)
            expected = ops.stop_gradient(ops.normalize(self.target(two), axis=-1))
            loss = ops.mean(2 - 2 * ops.sum(predicted * expected, axis=-1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for weight, average in zip(self.online.weights, self.target.weights, strict=True):
            average.assign(0.9 * average + 0.1 * weight)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@program(slow=True)
def momentum_encoder():
    """BYOL: the step assigns a moving average of the weights to a second network."""
    model = MomentumEncoder()
    model.build((None, 5))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    history = model.fit((_points(37), _points(37, 1)), batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(_points(7), verbose=0))
