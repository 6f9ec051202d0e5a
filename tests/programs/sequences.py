"""Programs about time series: windows, recurrent networks, masks, video, and anomalies."""

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import MASKED_MEAN, outcome, program


def _series(n, channels=3, seed=0):
    rng = np.random.default_rng(seed)
    time = np.arange(n)[:, None] / 5 + rng.random(channels)
    return (np.sin(time) + rng.normal(0, 0.1, (n, channels))).astype("float32")


@program(slow=True)
def weather_forecast():
    """timeseries_dataset_from_array, an LSTM, early stopping, and a checkpoint of weights."""
    series = _series(90)
    windows = {"sequence_length": 8, "sampling_rate": 2, "batch_size": 16}
    train = keras.utils.timeseries_dataset_from_array(series[:60], series[16:76, :1], **windows)
    valid = keras.utils.timeseries_dataset_from_array(series[60:80], series[70:90, :1], **windows)
    for batch in train.take(1):
        inputs, _ = batch
    inputs = layers.Input(shape=(inputs.shape[1], inputs.shape[2]))
    model = keras.Model(inputs=inputs, outputs=layers.Dense(1)(layers.LSTM(6)(inputs)))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
    checkpoint = keras.callbacks.ModelCheckpoint(
        monitor="val_loss", filepath="weather.weights.h5", save_weights_only=True,
        save_best_only=True,
    )  # fmt: skip
    history = model.fit(
        train, epochs=3, validation_data=valid, callbacks=[stop, checkpoint], verbose=0
    )
    return outcome(history, model, predicted=model.predict(valid, verbose=0))


class FeedBack(keras.Model):
    """Predicts several steps, each from the one before."""

    def __init__(self, units, out_steps, features):
        super().__init__()
        self.out_steps = out_steps
        self.lstm_cell = layers.LSTMCell(units)
        self.lstm_rnn = layers.RNN(self.lstm_cell, return_state=True)
        self.dense = layers.Dense(features)

    def call(self, inputs, training=None):
        x, *state = self.lstm_rnn(inputs)
        predictions = [self.dense(x)]
        for _ in range(1, self.out_steps):
            x, state = self.lstm_cell(predictions[-1], states=state, training=training)
            predictions.append(self.dense(x))
        return ops.transpose(ops.stack(predictions), [1, 0, 2])


@program(slow=True)
def autoregressive_forecast():
    """Autoregressive LSTM cell over windows that tf.data splits into inputs and labels."""
    data = keras.utils.timeseries_dataset_from_array(
        data=_series(60), targets=None, sequence_length=9, shuffle=True, seed=4, batch_size=16
    ).map(lambda window: (window[:, :6], window[:, 6:]))
    model = FeedBack(units=6, out_steps=3, features=3)
    model.compile(
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        metrics=[keras.metrics.MeanAbsoluteError()],
    )
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(history, model, score=model.evaluate(data, verbose=0))


@program(slow=True)
def residual_forecast():
    """A wrapper model that adds its input to the prediction of an inner Sequential."""

    class ResidualWrapper(keras.Model):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def call(self, inputs, *args, **kwargs):
            return inputs + self.model(inputs, *args, **kwargs)

    series = _series(60)
    data = keras.utils.timeseries_dataset_from_array(
        series, None, sequence_length=7, batch_size=16
    ).map(lambda window: (window[:, :-1], window[:, 1:]))
    inner = keras.Sequential(
        [
            layers.GRU(6, return_sequences=True),
            layers.Dense(3, kernel_initializer=keras.initializers.Zeros()),
        ]
    )
    model = ResidualWrapper(inner)
    model.compile("adam", keras.losses.MeanSquaredError(), metrics=["mae"])
    return outcome(model.fit(data, epochs=2, verbose=0), model)


@program(slow=True, differs=MASKED_MEAN)
def masked_lstm():
    """Series of different lengths: Masking, LSTM, a mask through TimeDistributed, SGD."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(43, 6, 3)).astype("float32")
    x[np.arange(6) >= rng.integers(1, 7, (43, 1))] = -10.0
    y = rng.normal(size=(43, 6, 1))
    model = keras.Sequential(
        [
            keras.Input((6, 3)),
            layers.Masking(mask_value=-10.0),
            layers.LSTM(6, return_sequences=True),
            layers.LSTM(5, return_sequences=True),
            layers.TimeDistributed(layers.Dense(1)),
        ]
    )
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=16, epochs=2, validation_split=0.1, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def masked_gru_classifier():
    """GRU on sequences with a Masking layer, padded by pad_sequences."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 9, rng.integers(1, 8)).tolist() for _ in range(42)]
    x = keras.utils.pad_sequences(sequences, maxlen=7, dtype="float32")[..., None]
    y = rng.integers(0, 3, 42)
    model = keras.Sequential([layers.Masking(), layers.GRU(6), layers.Dense(3, "softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(slow=True)
def stateful_lstm():
    """Stateful LSTM: its state goes from batch to batch, and is reset between epochs."""
    x = _series(64, 1).reshape(8, 8, 1)
    model = keras.Sequential(
        [keras.Input(batch_shape=(4, 4, 1)), layers.LSTM(4, stateful=True), layers.Dense(1)]
    )
    model.compile("rmsprop", "mse")
    logs = []
    for _ in range(2):
        history = model.fit(
            np.concatenate([x[:4, :4], x[:4, 4:]]), np.concatenate([x[:4, 4], x[:4, 7]]),
            batch_size=4, epochs=1, shuffle=False, verbose=0,
        )  # fmt: skip
        logs.append(history.history)
        model.layers[0].reset_states()
    return outcome(logs, model)


@program(slow=True)
def next_frame():
    """Video prediction with ConvLSTM2D and Conv3D."""
    rng = np.random.default_rng(0)
    video = (rng.random((26, 5, 6, 6, 1)) > 0.7).astype("float32")
    inputs = layers.Input(shape=(None, 6, 6, 1))
    z = layers.ConvLSTM2D(3, (3, 3), padding="same", return_sequences=True)(inputs)
    z = layers.Conv3D(1, (3, 3, 3), activation="sigmoid", padding="same")(z)
    model = keras.Model(inputs, z)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    model.compile(loss=keras.losses.binary_crossentropy, optimizer=optimizer)
    reduce = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=1.0)
    history = model.fit(
        video[:, :-1], video[:, 1:], batch_size=8, epochs=3,
        validation_data=(video[:9, :-1], video[:9, 1:]), callbacks=[reduce], verbose=0,
    )  # fmt: skip
    return outcome(history, model)


@program(slow=True)
def anomaly_detection():
    """Convolutional autoencoder of series; a threshold from the errors of predictions."""
    series = _series(70, 1)
    x = np.stack([series[n : n + 8] for n in range(60)])
    model = keras.Sequential(
        [
            layers.Input(shape=(8, 1)),
            layers.Conv1D(6, 3, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(6, 3, padding="same", strides=2, activation="relu"),
            layers.Conv1DTranspose(1, 3, padding="same"),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=5, mode="min")
    history = model.fit(
        x, x, epochs=2, batch_size=16, validation_split=0.1, callbacks=[stop], verbose=0
    )
    errors = np.mean(np.abs(model.predict(x, verbose=0) - x), axis=1)
    return outcome(history, model, threshold=errors.max(), errors=errors)


@program(slow=True)
def series_transformer():
    """Transformer encoder on series with a LearningRateScheduler and CSVLogger."""
    x, y = _series(8 * 40, 1).reshape(40, 8, 1), np.random.default_rng(1).integers(0, 2, 40)
    inputs = keras.Input((8, 1))
    z = layers.MultiHeadAttention(key_dim=4, num_heads=2)(inputs, inputs)
    res = layers.LayerNormalization(epsilon=1e-6)(z) + inputs
    z = layers.Conv1D(4, kernel_size=1, activation="relu")(res)
    z = layers.LayerNormalization(epsilon=1e-6)(layers.Conv1D(1, kernel_size=1)(z)) + res
    z = layers.GlobalAveragePooling1D(data_format="channels_last")(z)
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(z))
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        metrics=["sparse_categorical_accuracy"],
    )
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (epoch + 1))
    callbacks = [schedule, keras.callbacks.CSVLogger("log.csv")]
    history = model.fit(
        x, y, validation_split=0.2, epochs=3, batch_size=16, callbacks=callbacks, verbose=0
    )
    return outcome(history, model)
