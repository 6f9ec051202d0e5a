"""Small models that Keras cannot build, in the manner of published Keras programs.

Each builder has one argument, the base class, and returns (model, data of `fit`). Nothing is
random: noise and times of a diffusion are part of the data.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import kdist

ROWS, BATCH = 22, 8  # the last batch has 6 rows
BUILDERS = []


def _builder(build):
    BUILDERS.append(build)
    return build


def _numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def _batches(*tensors):
    data = tensors if len(tensors) > 1 else tensors[0]
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


def _dense(units, **options):
    return layers.Dense(units, **options)


@_builder
def gan(base):
    """Adversaries without `call`, and a `compile` of their own."""

    class GAN(base):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential([_dense(6, activation="tanh"), _dense(4)])
            self.discriminator = keras.Sequential([_dense(5, activation="tanh"), _dense(1)])

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
            self.d_loss = keras.metrics.Mean(name="d_loss")
            self.g_loss = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self):
            return [self.d_loss, self.g_loss]

        def train_step(self, data):
            real, noise = data
            rows = ops.shape(real)[0]
            images = ops.concatenate([self.generator(noise), real], 0)
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], 0)
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(images))
            weights = self.discriminator.trainable_weights
            grads = tape.gradient(d_loss, weights)
            self.d_optimizer.apply_gradients(zip(grads, weights, strict=True))
            with tf.GradientTape() as tape:
                judged = self.discriminator(self.generator(noise))
                g_loss = self.loss_fn(ops.zeros((rows, 1)), judged)
            weights = self.generator.trainable_weights
            grads = tape.gradient(g_loss, weights)
            self.g_optimizer.apply_gradients(zip(grads, weights, strict=True))
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    model = GAN()
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.optimizers.SGD(1e-2, momentum=0.9),
        keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model, _batches(_numbers(4), _numbers(3, seed=1))


@_builder
def wgan_gp(base):
    """Several steps of a critic with a gradient penalty, then one of the generator."""

    class WGAN(base):
        def __init__(self, critic_steps=2):
            super().__init__()
            self.generator = keras.Sequential([keras.Input((3,)), _dense(4)])
            self.critic = keras.Sequential([_dense(5, activation="tanh"), _dense(1)])
            self.critic_steps = critic_steps

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

        def _penalty(self, real, fake):
            middle = (real + fake) / 2
            with tf.GradientTape() as tape:
                tape.watch(middle)
                judged = self.critic(middle, training=True)
            slopes = tape.gradient(judged, [middle])[0]
            return ops.mean((ops.sqrt(ops.sum(slopes**2, axis=1) + 1e-6) - 1.0) ** 2)

        def train_step(self, data):
            real, noise = data
            for _ in range(self.critic_steps):
                with tf.GradientTape() as tape:
                    fake = self.generator(noise, training=True)
                    d_loss = ops.mean(self.critic(fake)) - ops.mean(self.critic(real))
                    d_loss += 10.0 * self._penalty(real, fake)
                grads = tape.gradient(d_loss, self.critic.trainable_variables)
                grads = [tf.clip_by_norm(g, 5.0) for g in grads]  # fails without a gradient
                self.d_optimizer.apply_gradients(
                    zip(grads, self.critic.trainable_variables, strict=True)
                )
            with tf.GradientTape() as tape:
                g_loss = -ops.mean(self.critic(self.generator(noise)))
            grads = tape.gradient(g_loss, self.generator.trainable_variables)
            self.g_optimizer.apply_gradients(
                zip(grads, self.generator.trainable_variables, strict=True)
            )
            return {"d_loss": d_loss, "g_loss": g_loss}

    model = WGAN()
    model.compile(keras.optimizers.SGD(1e-2), keras.optimizers.RMSprop(1e-3))
    return model, _batches(_numbers(4), _numbers(3, seed=1))


@_builder
def vae(base):
    """An encoder and a decoder, with Keras's `compile`."""

    class VAE(base):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([_dense(6, activation="relu"), _dense(4)])
            self.decoder = keras.Sequential([_dense(6, activation="relu"), _dense(5)])
            self.kl_tracker = keras.metrics.Mean(name="kl")
            self.total_tracker = keras.metrics.Mean(name="total")

        @property
        def metrics(self):
            return [self.total_tracker, self.kl_tracker]

        def train_step(self, data):
            x, noise = data
            with tf.GradientTape() as tape:
                mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
                z = mean + ops.exp(0.5 * log_var) * noise
                error = ops.mean(ops.sum((x - self.decoder(z)) ** 2, axis=1))
                kl = -0.5 * ops.mean(ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=1))
                total = error + kl
            grads = tape.gradient(total, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_tracker.update_state(total)
            self.kl_tracker.update_state(kl)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data):
            x, noise = data
            mean, _ = ops.split(self.encoder(x), 2, axis=-1)
            self.total_tracker.update_state(
                ops.mean(ops.sum((x - self.decoder(mean + noise)) ** 2, axis=1))
            )
            return {"total": self.total_tracker.result()}

        def predict_step(self, data):
            return self.decoder(data[1])

    model = VAE()
    model.compile(optimizer=keras.optimizers.Adam(1e-2))
    return model, _batches(_numbers(5), _numbers(2, seed=1))


@_builder
def diffusion(base):
    """A normalizer, a network of two inputs, and its moving average."""

    class Diffusion(base):
        def __init__(self):
            super().__init__()
            self.normalizer = layers.Normalization()
            image, time = keras.Input((4,)), keras.Input((1,))
            joined = layers.Concatenate()([image, time])
            self.network = keras.Model(
                [image, time], _dense(4)(_dense(8, activation="relu")(joined))
            )
            self.ema_network = keras.models.clone_model(self.network)

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")

        @property
        def metrics(self):
            return [self.noise_loss_tracker]

        def train_step(self, data):
            images, noises, times = data
            images = self.normalizer(images, training=True)
            noisy = ops.cos(times) * images + ops.sin(times) * noises
            with tf.GradientTape() as tape:
                loss = self.loss(noises, self.network([noisy, times], training=True))
            grads = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.network.trainable_weights, strict=True))
            self.noise_loss_tracker.update_state(loss)
            for weight, ema in zip(self.network.weights, self.ema_network.weights, strict=True):
                ema.assign(0.9 * ema + 0.1 * weight)
            return {m.name: m.result() for m in self.metrics}

    model = Diffusion()
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=keras.losses.MeanAbsoluteError())
    model.normalizer.adapt(_numbers(4))
    times = np.abs(_numbers(1, seed=2))
    return model, _batches(_numbers(4), _numbers(4, seed=1), times)


@_builder
def contrastive(base):
    """SimCLR: two optimizers, a probe, nested data, and metrics that `metrics` does not list."""

    class Contrastive(base):
        def __init__(self):
            super().__init__()
            self.encoder = keras.Sequential([keras.Input((4,)), _dense(6, activation="relu")])
            self.projection = keras.Sequential([keras.Input((6,)), _dense(3)])
            self.probe = keras.Sequential([layers.Input((6,)), _dense(2)])

        def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
            super().compile(**kwargs)
            self.contrastive_optimizer = contrastive_optimizer
            self.probe_optimizer = probe_optimizer
            self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

        @property
        def metrics(self):
            return [self.probe_accuracy]

        def train_step(self, data):
            (first, second), (x, y) = data
            with tf.GradientTape() as tape:
                a = ops.normalize(self.projection(self.encoder(first)), axis=1)
                b = ops.normalize(self.projection(self.encoder(second)), axis=1)
                loss = ops.mean(ops.logaddexp(0.0, -ops.sum(a * b, axis=1) / 0.1))
            weights = self.encoder.trainable_weights + self.projection.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            with tf.GradientTape() as tape:
                logits = self.probe(self.encoder(x, training=False))
                probe_loss = self.probe_loss(y, logits)
            gradients = tape.gradient(probe_loss, self.probe.trainable_weights)
            self.probe_optimizer.apply_gradients(
                zip(gradients, self.probe.trainable_weights, strict=True)
            )
            self.probe_accuracy.update_state(y, logits)
            return {m.name: m.result() for m in self.metrics}

    model = Contrastive()
    model.compile(keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2))
    labels = (_numbers(seed=3) > 0).astype("int32")
    return model, _batches((_numbers(4), _numbers(4, seed=1)), (_numbers(4, seed=2), labels))


@_builder
def siamese(base):
    """Distances from a tuple of inputs that `call` passes on as a dict."""

    class Distances(layers.Layer):
        def call(self, anchor, positive, negative):
            return ops.sum((anchor - positive) ** 2, -1), ops.sum((anchor - negative) ** 2, -1)

    class Siamese(base):
        def __init__(self):
            super().__init__()
            embedding = keras.Sequential([keras.Input((4,)), _dense(3, use_bias=False)])
            parts = {name: keras.Input((4,), name=name) for name in ("a", "p", "n")}
            distances = Distances()(*(embedding(part) for part in parts.values()))
            self.siamese_network = keras.Model(parts, distances)
            self.loss_tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.siamese_network(inputs)

        def _loss(self, data):
            near, far = self.siamese_network(data)
            return ops.mean(ops.maximum(near - far + 0.5, 0.0))

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self._loss(data)
            gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
            self.optimizer.apply_gradients(
                zip(gradients, self.siamese_network.trainable_weights, strict=True)
            )
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

        @property
        def metrics(self):
            return [self.loss_tracker]

    model = Siamese()
    model.compile(optimizer=keras.optimizers.Adam(1e-2), weighted_metrics=[])
    numbers = {"a": _numbers(4), "p": _numbers(4, seed=1), "n": _numbers(4, seed=2)}
    return model, tf.data.Dataset.from_tensor_slices(numbers).batch(BATCH)


@_builder
def speech(base):
    """CTC-like: a dict batch that `call` does not accept, layers built late, compiled loss."""

    class Encoder(layers.Layer):
        def build(self, shape):
            self.inner = _dense(6, activation="relu")
            self.inner.build(shape)

        def call(self, x):
            return self.inner(x)

    class Speech(base):
        def __init__(self):
            super().__init__()
            self.encoder, self.classifier = Encoder(), _dense(3)

        def call(self, inputs):
            source, target = inputs[0], inputs[1]
            return self.classifier(ops.concatenate([self.encoder(source), target], -1))

        def train_step(self, batch):
            source, target = batch["source"], batch["target"]
            with tf.GradientTape() as tape:
                scores = self([source, ops.one_hot(target[:, :-1], 3)])
                loss = self.compute_loss(None, target[:, 1:], scores)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return self.compute_metrics(None, target[:, 1:], scores)

        def test_step(self, batch):
            source, target = batch["source"], batch["target"]
            scores = self([source, ops.one_hot(target[:, :-1], 3)])
            self.compute_loss(None, target[:, 1:], scores)
            return self.compute_metrics(None, target[:, 1:], scores)

    model = Speech()
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["sparse_categorical_accuracy"],
    )
    target = np.abs(_numbers(5, seed=1) * 9).astype("int32") % 3
    data = {"source": _numbers(4, 5), "target": target}
    return model, tf.data.Dataset.from_tensor_slices(data).batch(BATCH)


@_builder
def keyword_call(base):
    """A `call` with several positional arguments and keywords, which `train_step` supplies."""

    class Keywords(base):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.norm = _dense(3), _dense(3), layers.BatchNormalization()

        def call(self, a, b, *, scale, training=False):
            return self.norm(self.left(a), training=training) + scale * self.right(b)

        def train_step(self, data):
            (a, b), y = data
            with tf.GradientTape() as tape:
                y_pred = self(a, b, scale=0.5, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            for metric in self.metrics:
                metric.update_state(loss) if metric.name == "loss" else metric.update_state(
                    y, y_pred
                )
            return {m.name: m.result() for m in self.metrics}

        def predict_step(self, data):
            return self(*data[0], scale=0.5)

    model = Keywords()
    model.compile("sgd", "mse", metrics=["mae"])
    model.norm.synchronized = True
    return model, _batches((_numbers(4), _numbers(2, seed=1)), _numbers(3, seed=2))


@_builder
def no_call(base):
    """A `call` that raises, and a layer, a loss tracker, and an optimizer created in a step."""

    class NoCall(base):
        body = tracker = None

        def call(self, x):
            raise NotImplementedError("use train_step")

        def train_step(self, data):
            x, y = keras.utils.unpack_x_y_sample_weight(data)[:2]
            if self.body is None:
                self.body, self.tracker = _dense(3), keras.metrics.Mean(name="mean_loss")
            with tf.GradientTape() as tape:
                loss = ops.mean((self.body(x) - y) ** 2)
            weights = self.body.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.tracker.update_state(loss)
            return {"mean_loss": self.tracker.result()}

    model = NoCall()
    model.compile(keras.optimizers.Adam(1e-2))
    return model, _batches(_numbers(4), _numbers(3, seed=1))


@_builder
def static_rows(base):
    """Keras's `train_step`, and a `call` that needs the number of rows, which Keras leaves open."""

    class StaticRows(base):
        def __init__(self):
            super().__init__()
            self.dense = _dense(3)

        def call(self, x):
            return self.dense(x) + ops.ones((x.shape[0], 3))

    model = StaticRows()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
    data = tf.data.Dataset.from_tensor_slices((_numbers(4), _numbers(3, seed=1)))
    return model, data.batch(BATCH, drop_remainder=True)


def built(build, strategy=None):
    """Returns (model, data) of a builder: of kdist under a strategy, or of plain Keras."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        return build(kdist.Model if strategy else keras.Model)


def optimizers(model):
    """Returns the optimizers that are attributes of a model."""
    return [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]


def variables(model):
    """Returns the values of a model's variables and of its optimizers'."""
    slots = [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    return [np.asarray(variable.numpy()) for variable in [*model.variables, *slots]]
