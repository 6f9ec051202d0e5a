"""Training steps as programs write them, for `random_models.py`."""

import keras
import tensorflow as tf


def with_step(model_class, name):
    """Returns a class of models that has the step of this name."""
    return type(f"Own{model_class.__name__}", (STEPS[name], model_class), {})


class _OwnStep:
    """The step of Keras's guides; others change how it computes losses, or gradients."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        gradients, loss, y_pred = self.pass_back(x, y, sample_weight)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return self.logs(x, y, y_pred, sample_weight, loss, gradients)

    def pass_back(self, x, y, sample_weight):
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(x, y, y_pred, sample_weight)
        return tape.gradient(loss, self.trainable_variables), loss, y_pred

    def loss_of(self, x, y, y_pred, sample_weight):
        return self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)

    def logs(self, x, y, y_pred, sample_weight, loss, gradients):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {metric.name: metric.result() for metric in self.metrics}


class _Returned(_OwnStep):
    """Logs the loss itself, and the norm of the gradients."""

    def logs(self, x, y, y_pred, sample_weight, loss, gradients):
        norm = tf.linalg.global_norm(gradients)
        return {"loss": loss, "norm": norm, "mean": tf.reduce_mean(y_pred)}


class _Clipped(_OwnStep):
    """Clips gradients itself."""

    def pass_back(self, x, y, sample_weight):
        gradients, loss, y_pred = super().pass_back(x, y, sample_weight)
        return tf.clip_by_global_norm(gradients, 0.1)[0], loss, y_pred


class _ByRow(_OwnStep):
    """Weights the losses of rows, and divides their sum by the batch size."""

    def loss_of(self, x, y, y_pred, sample_weight):
        losses = tf.reduce_mean(tf.square(y_pred), axis=-1)
        losses = tf.reduce_sum(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)
        total = tf.reduce_sum(losses) / tf.cast(tf.shape(x)[0], losses.dtype)
        return total + super().loss_of(x, y, y_pred, sample_weight)


class _Penalty(_OwnStep):
    """Penalizes the gradient with respect to the inputs."""

    def pass_back(self, x, y, sample_weight):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y_pred = self(x, training=True)
            slope = inner.gradient(y_pred, x)
            norms = tf.norm(tf.reshape(slope, [tf.shape(slope)[0], -1]), axis=1)
            loss = self.loss_of(x, y, y_pred, sample_weight)
            loss += tf.reduce_mean(tf.square(norms - 1.0))
        return tape.gradient(loss, self.trainable_variables), loss, y_pred


class _Contrast(_OwnStep):
    """Compares every row of the batch with every other one."""

    def loss_of(self, x, y, y_pred, sample_weight):
        flat = tf.reshape(y_pred, [tf.shape(y_pred)[0], -1])
        similarity = tf.matmul(flat, flat, transpose_b=True)
        labels = tf.range(tf.shape(flat)[0])
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarity)
        return tf.reduce_mean(losses) + super().loss_of(x, y, y_pred, sample_weight)


class _Twice(_OwnStep):
    """Updates twice in a step, as discriminators do."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class _Persistent(_OwnStep):
    """Adds gradients of two losses, of one tape."""

    def pass_back(self, x, y, sample_weight):
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.loss_of(x, y, y_pred, sample_weight)
            other = tf.reduce_mean(tf.abs(y_pred))
        variables = self.trainable_variables
        both = zip(tape.gradient(loss, variables), tape.gradient(other, variables), strict=True)
        return [_sum(*pair) for pair in both], loss, y_pred


class _Assigned(_OwnStep):
    """Keeps a moving average of the loss, and scales by it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.average = self.add_weight(shape=(), initializer="ones", trainable=False)

    def loss_of(self, x, y, y_pred, sample_weight):
        loss = super().loss_of(x, y, y_pred, sample_weight)
        self.average.assign(0.9 * self.average + 0.1 * tf.stop_gradient(loss))
        return loss / (1.0 + tf.abs(tf.convert_to_tensor(self.average)))


def _sum(first, second):
    if first is None or second is None:
        return second if first is None else first
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


STEPS = {
    "guide": _OwnStep,
    "returned": _Returned,
    "clipped": _Clipped,
    "by_row": _ByRow,
    "penalty": _Penalty,
    "contrast": _Contrast,
    "twice": _Twice,
    "persistent": _Persistent,
    "assigned": _Assigned,
}
# What these compute of a micro-batch is not a part of what they compute of the batch.
OF_BATCHES = ("assigned", "clipped", "contrast", "twice")
