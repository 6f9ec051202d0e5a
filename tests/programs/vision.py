"""Programs about images: classification, segmentation, detection, and restoration."""

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import CALLBACKS_PER_CALL, outcome, program


def _images(n, size=8, channels=1, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.random((n, size, size, channels)).astype("float32")
    return x, rng.integers(0, classes, n)


@program
def convnet():
    """Convolutional network with one-hot classes, a validation split, and a saved model."""
    x, y = _images(50)
    y = keras.utils.to_categorical(y, 3)
    model = keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, kernel_size=3, activation="relu"),
            layers.MaxPooling2D(pool_size=2),
            layers.Flatten(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_split=0.14, verbose=0)
    score = model.evaluate(x, y, verbose=0)
    model.save("convnet.keras")
    loaded = keras.models.load_model("convnet.keras")
    again = loaded.fit(x, y, batch_size=16, epochs=1, verbose=0).history
    return outcome(
        history, model, loaded, score=score, predicted=model.predict(x, verbose=0), again=again
    )


@program(slow=True, differs={"accumulate": "BatchNormalization sees micro-batches"})
def residual_network():
    """Residual network with synchronized BatchNormalization and a learning-rate schedule."""
    x, y = _images(40, channels=3)

    def block(x, filters):
        y = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        y = layers.BatchNormalization(synchronized=True, momentum=0.9)(y)
        y = layers.Activation("relu")(y)
        shortcut = layers.Conv2D(filters, 1)(x)
        return layers.add([y, shortcut])

    inputs = keras.Input((8, 8, 3))
    x1 = layers.Rescaling(2.0, offset=-1.0)(inputs)
    x1 = block(x1, 4)
    x1 = layers.GlobalAveragePooling2D()(block(layers.MaxPooling2D()(x1), 6))
    model = keras.Model(inputs, layers.Dense(3)(x1))
    schedule = keras.optimizers.schedules.CosineDecay(0.1, decay_steps=6, warmup_steps=2)
    model.compile(
        optimizer=keras.optimizers.SGD(schedule, momentum=0.9, nesterov=True),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:9], y[:9]), verbose=0)
    return outcome(history, model, predicted=model.predict(x, batch_size=9, verbose=0))


@program(across="BatchNormalization normalizes the rows of each replica")
def batch_normalization():
    """Convolutional network with BatchNormalization as it is by default."""
    x, y = _images(48)
    model = keras.Sequential(
        [
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalMaxPooling2D(),
            layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class Patches(layers.Layer):
    def __init__(self, patch_size, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size

    def call(self, images):
        batch, height, width, channels = ops.shape(images)
        across, down = height // self.patch_size, width // self.patch_size
        patches = ops.image.extract_patches(images, size=self.patch_size)
        return ops.reshape(
            patches, (batch, across * down, self.patch_size * self.patch_size * channels)
        )


class PatchEncoder(layers.Layer):
    def __init__(self, num_patches, projection_dim):
        super().__init__()
        self.num_patches = num_patches
        self.projection = layers.Dense(projection_dim)
        self.position_embedding = layers.Embedding(num_patches, projection_dim)

    def call(self, patches):
        positions = ops.expand_dims(ops.arange(start=0, stop=self.num_patches, step=1), axis=0)
        return self.projection(patches) + self.position_embedding(positions)


@program(slow=True)
def vision_transformer():
    """Vision transformer: patches, an embedding of positions, AdamW."""
    x, y = _images(40, channels=3)
    inputs = keras.Input((8, 8, 3))
    encoded = PatchEncoder(4, 8)(Patches(4)(inputs))
    for _ in range(2):
        x1 = layers.LayerNormalization(epsilon=1e-6)(encoded)
        x2 = layers.Add()([layers.MultiHeadAttention(num_heads=2, key_dim=4)(x1, x1), encoded])
        x3 = layers.LayerNormalization(epsilon=1e-6)(x2)
        encoded = layers.Add()([layers.Dense(8, activation=keras.activations.gelu)(x3), x2])
    representation = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(encoded))
    model = keras.Model(inputs, layers.Dense(3)(representation))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=0.01, weight_decay=0.001, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2-accuracy"),
        ],
    )
    checkpoint = keras.callbacks.ModelCheckpoint(
        "vit.weights.h5", monitor="loss", save_best_only=True, save_weights_only=True
    )
    history = model.fit(x, y, batch_size=16, epochs=2, callbacks=[checkpoint], verbose=0)
    model.load_weights("vit.weights.h5")
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def unet_segmentation():
    """U-Net with skip connections, transposed convolutions, and MeanIoU, over a tf.data set."""
    import tensorflow as tf

    x, _ = _images(22, channels=3)
    masks = (x.mean(-1, keepdims=True) * 3).astype("uint8")
    data = tf.data.Dataset.from_tensor_slices((x, masks)).batch(8).prefetch(2)
    inputs = keras.Input((8, 8, 3))
    skips, z = [], inputs
    for filters in (4, 6):
        z = layers.SeparableConv2D(filters, 3, padding="same", activation="relu")(z)
        skips.append(z)
        z = layers.MaxPooling2D(2)(z)
    for filters, skip in zip((6, 4), reversed(skips), strict=True):
        z = layers.Conv2DTranspose(filters, 2, strides=2, activation="relu")(z)
        z = layers.Concatenate()([z, skip])
    model = keras.Model(inputs, layers.Conv2D(3, 1, activation="softmax")(z))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        loss="sparse_categorical_crossentropy",
        metrics=[keras.metrics.MeanIoU(3, sparse_y_pred=False, name="iou")],
    )
    history = model.fit(data, epochs=2, validation_data=data.take(1), verbose=0)
    return outcome(history, model, predicted=model.predict(data, verbose=0))


class BoxIoU(keras.metrics.Metric):
    """Mean intersection over union of pairs of boxes."""

    def __init__(self, name="iou", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((), "zeros", name="total")
        self.boxes = self.add_variable((), "zeros", name="boxes")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y_true = ops.cast(y_true, y_pred.dtype)
        low = ops.maximum(y_true[:, :2], y_pred[:, :2])
        high = ops.minimum(y_true[:, 2:], y_pred[:, 2:])
        area = ops.prod(ops.maximum(high - low, 0), axis=-1)
        areas = [ops.prod(ops.abs(box[:, 2:] - box[:, :2]), axis=-1) for box in (y_true, y_pred)]
        self.total.assign_add(ops.sum(area / (areas[0] + areas[1] - area + 1e-3)))
        self.boxes.assign_add(ops.cast(ops.shape(y_true)[0], self.dtype))

    def result(self):
        return self.total / ops.maximum(self.boxes, 1.0)


@program(slow=True)
def object_detection():
    """Detector with heads for class, box, and objectness: dict targets, loss weights, own IoU."""
    x, y = _images(37, channels=3)
    rng = np.random.default_rng(1)
    low = rng.random((37, 2)) / 2
    boxes = np.concatenate([low, low + 0.4], -1).astype("float32")
    there = rng.integers(0, 2, (37, 1)).astype("float32")
    inputs = keras.Input((8, 8, 3), name="image")
    z = layers.Conv2D(6, 3, strides=2, activation="relu")(inputs)
    z = layers.Dense(12, activation="tanh")(layers.Flatten()(z))
    heads = {
        "label": layers.Dense(3, activation="softmax", name="label")(z),
        "box": layers.Dense(4, activation="sigmoid", name="box")(z),
        "object": layers.Dense(1, activation="sigmoid", name="object")(z),
    }
    model = keras.Model(inputs, heads)
    model.compile(
        optimizer=keras.optimizers.RMSprop(1e-2, epsilon=1e-3),
        loss={
            "label": "sparse_categorical_crossentropy",
            "box": keras.losses.Huber(),
            "object": keras.losses.BinaryFocalCrossentropy(),
        },
        loss_weights={"label": 1.0, "box": 5.0, "object": 0.5},
        metrics={"label": "accuracy", "box": BoxIoU(), "object": "binary_accuracy"},
    )
    targets = {"label": y, "box": boxes, "object": there}
    weights = {"label": there[:, 0], "box": there[:, 0], "object": np.ones(37)}
    history = model.fit(
        {"image": x}, targets, sample_weight=weights, batch_size=10, epochs=2, verbose=0
    )
    score = model.evaluate({"image": x}, targets, batch_size=10, return_dict=True, verbose=0)
    return outcome(history, model, score=score, predicted=model.predict(x, verbose=0))


@program(slow=True)
def denoising_autoencoder():
    """Convolutional autoencoder that removes noise: images are both input and target."""
    x, _ = _images(41)
    noisy = np.clip(x + np.random.default_rng(1).normal(0, 0.2, x.shape), 0, 1).astype("float32")
    inputs = keras.Input(shape=(8, 8, 1))
    z = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
    z = layers.MaxPooling2D(2, padding="same")(z)
    z = layers.Conv2DTranspose(4, 3, strides=2, activation="relu", padding="same")(z)
    autoencoder = keras.Model(inputs, layers.Conv2D(1, 3, activation="sigmoid", padding="same")(z))
    autoencoder.compile(optimizer="adam", loss="binary_crossentropy")
    first = autoencoder.fit(
        x=x, y=x, epochs=1, batch_size=16, shuffle=True, validation_data=(x, x), verbose=0
    )
    second = autoencoder.fit(x=noisy, y=x, epochs=1, batch_size=16, verbose=0)
    predicted = autoencoder.predict(noisy, verbose=0)
    return outcome(first, autoencoder, second=second.history, predicted=predicted)


class PSNR(keras.callbacks.Callback):
    """Collects the signal-to-noise ratio of test batches, and predicts after each epoch."""

    def __init__(self, sample):
        super().__init__()
        self.sample, self.psnr, self.shown = sample, [], []

    def on_test_batch_end(self, batch, logs=None):
        self.psnr.append(-10 * np.log10(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.shown.append(self.model.predict(self.sample, verbose=0))


class DepthToSpace(layers.Layer):
    def call(self, x):
        b, h, w, _ = ops.shape(x)
        x = ops.transpose(ops.reshape(x, (b, h, w, 2, 2)), (0, 1, 3, 2, 4))
        return ops.reshape(x, (b, 2 * h, 2 * w, 1))


@program(slow=True, differs=CALLBACKS_PER_CALL)
def super_resolution():
    """Sub-pixel super-resolution, with a callback that predicts and reads the logs of batches."""
    x, _ = _images(24, size=8)
    small = x[:, ::2, ::2]
    inputs = keras.Input((None, None, 1))
    z = layers.Conv2D(6, 3, padding="same", activation="relu", kernel_initializer="orthogonal")
    z = layers.Conv2D(4, 3, padding="same")(z(inputs))
    model = keras.Model(inputs, DepthToSpace()(z))
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), keras.losses.MeanSquaredError())
    psnr = PSNR(small[:3])
    stop = keras.callbacks.EarlyStopping(monitor="loss", patience=10)
    history = model.fit(
        small, x, batch_size=10, epochs=2, validation_data=(small[:12], x[:12]),
        callbacks=[psnr, stop], verbose=0,
    )  # fmt: skip
    return outcome(history, model, psnr=psnr.psnr, shown=psnr.shown)


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.teacher = teacher
        self.student = student

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn = student_loss_fn
        self.distillation_loss_fn = distillation_loss_fn
        self.alpha = alpha
        self.temperature = 3.0

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1),
            ops.softmax(y_pred / self.temperature, axis=1),
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


@program(slow=True)
def knowledge_distillation():
    """Distillation of a trained teacher into a student, by an overridden compute_loss."""
    x, y = _images(39)

    def network(width):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(width, 3, strides=2),
                layers.LeakyReLU(negative_slope=0.2),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    teacher, student = network(6), network(2)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    teacher.compile("adam", loss, metrics=["accuracy"])
    teacher.fit(x, y, batch_size=16, epochs=1, verbose=0)
    distiller = Distiller(student, teacher)
    distiller.compile(
        optimizer=keras.optimizers.SGD(0.05),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=loss,
        distillation_loss_fn=keras.losses.KLDivergence(),
    )
    history = distiller.fit(x, y, batch_size=16, epochs=2, verbose=0)
    score = distiller.evaluate(x, y, batch_size=16, verbose=0)
    return outcome(history, distiller, score=score, predicted=student.predict(x, verbose=0))


class Mixup(keras.Model):
    """Classifier whose step mixes each image with a partner from the data."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def call(self, images):
        return self.network(images)

    def train_step(self, data):
        (first, second, share), (label, other) = data
        weight = ops.reshape(share, (-1, 1, 1, 1))
        images = weight * first + (1 - weight) * second
        labels = ops.expand_dims(share, -1) * label + (1 - ops.expand_dims(share, -1)) * other
        return super().train_step((images, labels))


@program(slow=True)
def mixup():
    """Mixup in train_step, which calls super; partners and weights come with the data."""
    x, y = _images(36)
    y = keras.utils.to_categorical(y, 3)
    share = np.random.default_rng(2).beta(0.4, 0.4, 36).astype("float32")
    model = Mixup(keras.Sequential([layers.Flatten(), layers.Dense(3, activation="softmax")]))
    model.compile(
        "sgd", keras.losses.CategoricalCrossentropy(label_smoothing=0.1), metrics=["accuracy"]
    )
    history = model.fit((x, x[::-1], share), (y, y[::-1]), batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, score=model.evaluate(x, y, verbose=0))


class ZeroReference(keras.Model):
    """Brightens images; its losses need no targets."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.curves = keras.Sequential(
            [layers.Conv2D(4, 3, padding="same", activation="relu"),
             layers.Conv2D(6, 3, padding="same", activation="tanh")]
        )  # fmt: skip

    def compile(self, learning_rate, **kwargs):
        super().compile(**kwargs)
        self.optimizer = keras.optimizers.Adam(learning_rate=learning_rate, epsilon=1e-3)
        self.trackers = [keras.metrics.Mean(name=name) for name in ("total", "exposure", "smooth")]

    @property
    def metrics(self):
        return self.trackers

    def enhance(self, images, curves):
        for curve in ops.split(curves, 2, axis=-1):
            images = images + curve * (ops.square(images) - images)
        return images

    def call(self, images):
        return self.enhance(images, self.curves(images))

    def losses_of(self, images):
        curves = self.curves(images)
        bright = ops.mean(self.enhance(images, curves), axis=3, keepdims=True)
        exposure = ops.mean(ops.square(ops.average_pool(bright, 4, strides=4) - 0.6))
        smooth = ops.mean(ops.square(curves[:, 1:] - curves[:, :-1]))
        return {"total": exposure + 10 * smooth, "exposure": exposure, "smooth": smooth}

    def track(self, losses):
        for tracker in self.trackers:
            tracker.update_state(losses[tracker.name])
        return {tracker.name: tracker.result() for tracker in self.trackers}

    def train_step(self, images):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            losses = self.losses_of(images)
        gradients = tape.gradient(losses["total"], self.curves.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.curves.trainable_weights, strict=True))
        return self.track(losses)

    def test_step(self, images):
        return self.track(self.losses_of(images))


@program
def low_light_enhancement():
    """Zero-reference enhancement: losses without targets, optimizer made in compile."""
    import tensorflow as tf

    x, _ = _images(26, channels=3)
    train = tf.data.Dataset.from_tensor_slices(x[:18]).batch(8)
    test = tf.data.Dataset.from_tensor_slices(x[18:]).batch(8)
    model = ZeroReference()
    model.compile(learning_rate=0.01)
    history = model.fit(train, validation_data=test, epochs=2, verbose=0)
    return outcome(history, model.curves, predicted=model.predict(x, batch_size=8, verbose=0))


@program(slow=True)
def masked_autoencoder():
    """Masked autoencoder of patches with a learned mask token and positions; masks are data."""
    x, _ = _images(30)
    hidden = (np.random.default_rng(3).random((30, 4)) < 0.5).astype("float32")
    patches = x.reshape(30, 2, 4, 2, 4).transpose(0, 1, 3, 2, 4).reshape(30, 4, 16)

    class MaskToken(layers.Layer):
        def build(self, shape):
            self.token = self.add_weight(shape=(1, 1, shape[0][-1]), initializer="uniform")
            self.positions = layers.Embedding(4, shape[0][-1])

        def call(self, inputs):
            z, mask = inputs
            mask = ops.expand_dims(mask, -1)
            return (1 - mask) * z + mask * self.token + self.positions(ops.arange(4))

    pixels, mask = keras.Input((4, 16), name="patches"), keras.Input((4,), name="mask")
    z = MaskToken()([layers.Dense(8)(pixels), mask])
    z = layers.LayerNormalization()(z + layers.MultiHeadAttention(2, 4)(z, z))
    model = keras.Model({"patches": pixels, "mask": mask}, layers.Dense(16)(z))
    model.compile(
        keras.optimizers.AdamW(5e-3, weight_decay=1e-2, epsilon=1e-3), "mse", metrics=["mae"]
    )
    history = model.fit(
        {"patches": patches, "mask": hidden}, patches, sample_weight=hidden, batch_size=12,
        epochs=2, verbose=0,
    )  # fmt: skip
    predicted = model.predict({"patches": patches, "mask": hidden}, verbose=0)
    return outcome(history, model, predicted=predicted)
