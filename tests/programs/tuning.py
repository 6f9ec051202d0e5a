"""Programs that load, fine-tune, adapt, average, and quantize models."""

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import outcome, program


def _data(n=46, seed=0, classes=3):
    rng = np.random.default_rng(seed)
    return rng.random((n, 8, 8, 1)).astype("float32"), rng.integers(0, classes, n)


def _base():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
        ],
        name="base",
    )


@program(slow=True)
def transfer_learning():
    """Pretrain, freeze the base, train a head, unfreeze, compile with a low rate, fine-tune."""
    x, y = _data()
    base = _base()
    pretraining = keras.Sequential([base, layers.Dense(3, activation="softmax")])
    pretraining.compile("adam", "sparse_categorical_crossentropy")
    pretraining.fit(x, y, batch_size=16, verbose=0)
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    outputs = layers.Dense(1)(base(inputs, training=False))
    model = keras.Model(inputs, outputs)
    loss, target = keras.losses.BinaryCrossentropy(from_logits=True), (y > 1).astype("float32")
    model.compile(
        keras.optimizers.Adam(), loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0)]
    )
    logs = [model.fit(x, target, batch_size=16, epochs=2, verbose=0).history]
    base.trainable = True
    model.compile(
        keras.optimizers.Adam(1e-5), loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0)]
    )
    logs.append(model.fit(x, target, batch_size=16, validation_split=0.2, verbose=0).history)
    return outcome(logs, model, predicted=model.predict(x, verbose=0))


@program
def continue_from_file():
    """Saves a model in mid-training, loads it compiled, and continues with its optimizer."""
    x, y = _data()
    model = keras.Sequential([_base(), layers.Dense(3, activation="softmax")])
    model.compile(
        keras.optimizers.Adam(0.01, epsilon=1e-3),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    checkpoint = keras.callbacks.ModelCheckpoint("model_{epoch}.keras")
    first = model.fit(x, y, batch_size=16, epochs=2, callbacks=[checkpoint], verbose=0)
    loaded = keras.models.load_model("model_1.keras")
    again = loaded.fit(x, y, batch_size=16, initial_epoch=1, epochs=2, verbose=0).history
    score = loaded.evaluate(x, y, verbose=0)
    return outcome(first, model, loaded, again=again, score=score)


@keras.saving.register_keras_serializable(package="programs")
class Registered(keras.Model):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.hidden, self.out = layers.Dense(units, activation="tanh"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@program(slow=True)
def registered_class():
    """Subclass with get_config: saved, loaded, cloned from its config, trained further."""
    x = np.random.default_rng(0).normal(size=(45, 5)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = Registered(6)
    model.compile("adam", "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=16, verbose=0)
    model.save("registered.keras")
    loaded = keras.models.load_model("registered.keras")
    again = loaded.fit(x, y, batch_size=16, verbose=0).history
    other = Registered.from_config(model.get_config())
    other(x[:1])
    other.set_weights(loaded.get_weights())
    return outcome(history, loaded, again=again, predicted=other.predict(x, verbose=0))


@program
def backup_and_restore():
    """BackupAndRestore: an interrupted fit is repeated, and continues at its epoch."""
    x, y = _data()

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("interrupted")

    model = keras.Sequential([_base(), layers.Dense(3, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    backup = keras.callbacks.BackupAndRestore(backup_dir="backup")
    try:
        model.fit(x, y, batch_size=16, epochs=4, callbacks=[backup, Interrupt()], verbose=0)
    except RuntimeError:
        history = model.fit(x, y, batch_size=16, epochs=4, callbacks=[backup], verbose=0)
    return outcome(history, model)


@program
def best_weights():
    """ModelCheckpoint of the best epoch, best weights restored by EarlyStopping, load_weights."""
    x, y = _data()
    model = keras.Sequential([_base(), layers.Dense(3, activation="softmax")])
    model.compile(
        keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    callbacks = [
        keras.callbacks.ModelCheckpoint("best.keras", save_best_only=True, monitor="val_loss"),
        keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
    ]
    history = model.fit(
        x, y, batch_size=16, epochs=4, validation_split=0.2, callbacks=callbacks, verbose=0
    )
    best = keras.models.load_model("best.keras")
    return outcome(history, model, best=best.predict(x, verbose=0))


@program(slow=True)
def lora():
    """LoRA: enable_lora on Dense and Embedding layers of a trained model, then fine-tuning."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 12, (43, 5)), rng.integers(0, 3, 43)
    inputs = keras.Input((5,), dtype="int32")
    z = layers.GlobalAveragePooling1D()(layers.Embedding(12, 6, name="words")(inputs))
    z = layers.Dense(8, activation="tanh", name="hidden")(z)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(z))
    model.compile("adam", "sparse_categorical_crossentropy")
    first = model.fit(x, y, batch_size=16, verbose=0)
    for name in ("words", "hidden"):
        model.get_layer(name).enable_lora(2)
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.01, epsilon=1e-3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    second = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(first, model, second=second.history, predicted=model.predict(x, verbose=0))


@program(slow=True)
def averaged_weights():
    """use_ema in the optimizer, SwapEMAWeights in validation, and the average in the end."""
    x, y = _data()
    model = keras.Sequential([_base(), layers.Dense(3, activation="softmax")])
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3, use_ema=True, ema_momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    history = model.fit(
        x, y, batch_size=16, epochs=2, validation_data=(x[:9], y[:9]), callbacks=[swap], verbose=0
    )
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def quantized_model():
    """model.quantize("int8") after training, predictions of the quantized model."""
    x = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)])
    model.compile("adam", "mse")
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    exact = model.predict(x, verbose=0)
    model.quantize("int8")
    return outcome(history, exact=exact, quantized=model.predict(x, verbose=0))


@program(slow=True, atol=2e-3)
def quantized_fine_tuning():
    """Quantized Dense layers with LoRA are trained further."""
    x = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")
    y = x.sum(1, keepdims=True)
    hidden = layers.Dense(8, activation="relu")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)])
    model.quantize("int8")
    hidden.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


@program(slow=True, atol=2e-2)
def mixed_precision():
    """Policy mixed_bfloat16 for a whole model, with a float32 head."""
    x, y = _data()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        head = layers.Dense(3, activation="softmax", dtype="float32")
        model = keras.Sequential([_base(), head])
        model.compile(
            keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
        return outcome({"loss": history.history["loss"]}, model)
    finally:
        keras.config.set_dtype_policy("float32")


@program
def gradient_accumulation():
    """Optimizer settings: gradient_accumulation_steps, clipnorm, weight decay, a schedule."""
    x, y = _data(64)
    model = keras.Sequential([_base(), layers.Dense(3, activation="softmax")])
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([2, 4], [0.1, 0.05, 0.01])
    optimizer = keras.optimizers.SGD(
        rate, momentum=0.9, clipnorm=0.5, weight_decay=0.01, gradient_accumulation_steps=2
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model)


@program(slow=True)
def shared_layers():
    """Layers shared by two models that are trained in turn, and a model inside a model."""
    x, y = _data()
    base = _base()
    inputs = keras.Input((8, 8, 1))
    classifier = keras.Model(inputs, layers.Dense(3, activation="softmax")(base(inputs)))
    decoder = keras.Model(inputs, layers.Reshape((8, 8, 1))(layers.Dense(64)(base(inputs))))
    classifier.compile("sgd", "sparse_categorical_crossentropy")
    decoder.compile("adam", keras.losses.MeanSquaredError())
    logs = []
    for _ in range(2):
        logs.append(classifier.fit(x, y, batch_size=16, verbose=0).history)
        logs.append(decoder.fit(x, x, batch_size=16, verbose=0).history)
    return outcome(logs, classifier, decoder)


@program(slow=True)
def orthogonal_heads():
    """Model that overrides compute_loss, calls super, and adds a penalty of two heads."""
    x, y = _data()

    class Heads(keras.Model):
        def __init__(self):
            super().__init__()
            self.base = _base()
            self.one, self.two = layers.Dense(3, "softmax"), layers.Dense(3, "softmax")

        def call(self, x):
            z = self.base(x)
            return {"one": self.one(z), "two": self.two(z)}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            loss = super().compute_loss(x, y, y_pred, sample_weight, training)
            return loss + 0.1 * ops.mean(ops.sum(self.one.kernel * self.two.kernel, axis=0) ** 2)

    model = Heads()
    loss = dict.fromkeys(("one", "two"), "sparse_categorical_crossentropy")
    model.compile("adam", loss=loss, metrics={"one": ["accuracy"]})
    history = model.fit(x, {"one": y, "two": (y + 1) % 3}, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))
