"""Custom steps as in Keras's guides."""

import keras
import tensorflow as tf

from benchmarks.equivalence.examples import compiled, hidden_layers, uneven, whole
from benchmarks.equivalence.feature import Feature

TWO_EPOCHS = {"epochs": 2}


def _functional(subclass):
    """A `build` for a perceptron of the class that `subclass` makes of a model class."""

    def build(model_class):
        inputs = keras.Input((64,))
        return compiled(subclass(model_class)(inputs, hidden_layers(inputs)))

    return build


def own_compute_loss(model_class):
    """The whole loss is the user's: a mean over the batch, in plain operations."""

    class OwnLoss(model_class):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred))

    return OwnLoss


def extended_compute_loss(model_class):
    """The compiled loss, and something more."""

    class ExtendedLoss(model_class):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss * 1.5

    return ExtendedLoss


def guide_train_step(model_class):
    """`train_step` as in keras.io/guides/custom_train_step_in_tensorflow, first example."""

    class GuideStep(model_class):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(y, y_pred)
            return {metric.name: metric.result() for metric in self.metrics}

    return GuideStep


def step_with_own_loss_and_tracker(model_class):
    """The guide's second example: nothing of `compile` but the optimizer."""

    class OwnTracker(model_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
            self.loss_function = keras.losses.SparseCategoricalCrossentropy()

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.loss_function(y, y_pred)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            self.loss_tracker.update_state(loss)
            self.accuracy.update_state(y, y_pred)
            return {
                "loss": self.loss_tracker.result(),
                "accuracy": self.accuracy.result(),
            }

        @property
        def metrics(self):
            return [self.loss_tracker, self.accuracy]

    return OwnTracker


def _with_own_tracker(model_class):
    inputs = keras.Input((64,))
    model = step_with_own_loss_and_tracker(model_class)(inputs, hidden_layers(inputs))
    model.compile(optimizer=keras.optimizers.SGD(0.1))
    return model


def gan(model_class):
    """Two models and two optimizers in one step; the noise is taken from the images."""

    class Gan(model_class):
        def __init__(self):
            super().__init__()
            self.discriminator = _perceptron(64, 1, "discriminator")
            self.generator = _perceptron(8, 64, "generator")
            self.d_tracker = keras.metrics.Mean(name="d_loss")
            self.g_tracker = keras.metrics.Mean(name="g_loss")
            self.built = True

        def compile(self, d_optimizer, g_optimizer, loss_function):
            super().compile(loss=None)
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
            self.loss_function = loss_function

        @property
        def metrics(self):
            return [self.d_tracker, self.g_tracker]

        def call(self, images):
            return self.discriminator(images)

        def train_step(self, data):
            images = data[0] if isinstance(data, tuple) else data
            noise = images[:, 20:28]
            d_variables = self.discriminator.trainable_variables
            g_variables = self.generator.trainable_variables

            fakes = self.generator(noise)
            both = keras.ops.concatenate([fakes, images], axis=0)
            labels = keras.ops.concatenate(
                [
                    keras.ops.ones_like(x[:, :1]) * value
                    for x, value in ((fakes, 1.0), (images, 0.0))
                ]
            )
            with tf.GradientTape() as tape:
                d_loss = self.loss_function(labels, self.discriminator(both))
            self.d_optimizer.apply(tape.gradient(d_loss, d_variables), d_variables)

            with tf.GradientTape() as tape:
                judged = self.discriminator(self.generator(noise))
                g_loss = self.loss_function(keras.ops.zeros_like(judged), judged)
            self.g_optimizer.apply(tape.gradient(g_loss, g_variables), g_variables)

            self.d_tracker.update_state(d_loss)
            self.g_tracker.update_state(g_loss)
            return {"d_loss": self.d_tracker.result(), "g_loss": self.g_tracker.result()}

    return Gan


def _perceptron(inputs, outputs, name):
    layers = [
        keras.Input((inputs,)),
        keras.layers.Dense(24, activation="tanh"),
        keras.layers.Dense(outputs),
    ]
    return keras.Sequential(layers, name=name)


def _compiled_gan(model_class):
    """Builds the guide's GAN, whose optimizers create their variables in the first step."""
    model = gan(model_class)()
    model.compile(
        d_optimizer=keras.optimizers.SGD(0.1),
        g_optimizer=keras.optimizers.Adam(1e-3, epsilon=1e-3),
        loss_function=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return model


def _built_gan(model_class):
    model = _compiled_gan(model_class)
    model.d_optimizer.build(model.discriminator.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)
    return model


FEATURES = {
    "custom compute_loss": Feature(
        "the user's own mean over the batch", _functional(own_compute_loss), whole, TWO_EPOCHS
    ),
    "custom compute_loss, uneven batch": Feature(
        "the same with a last batch of 5", _functional(own_compute_loss), uneven(5), TWO_EPOCHS
    ),
    "compute_loss that calls super": Feature(
        "the compiled loss times 1.5", _functional(extended_compute_loss), whole, TWO_EPOCHS
    ),
    "custom train_step": Feature(
        "compute_loss, a tape, optimizer.apply and the metrics",
        _functional(guide_train_step),
        whole,
        TWO_EPOCHS,
    ),
    "custom train_step, own loss and tracker": Feature(
        "a Keras loss object and a keras.metrics.Mean of the user's",
        _with_own_tracker,
        whole,
        TWO_EPOCHS,
    ),
    "two optimizers in one step": Feature(
        "generator and discriminator, each with its own", _built_gan, whole, TWO_EPOCHS
    ),
    "two optimizers, not built": Feature(
        "the same; they make their variables in the first step", _compiled_gan, whole, TWO_EPOCHS
    ),
}
