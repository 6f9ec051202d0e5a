"""Programs about tables and recommendations."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import ACROSS_ROWS, outcome, program

COLORS = np.array(["red", "green", "blue", "white"])


def _table(n, seed=0):
    rng = np.random.default_rng(seed)
    columns = {
        "age": rng.normal(40, 12, n).astype("float32"),
        "rate": rng.random(n).astype("float32"),
        "color": rng.choice(COLORS, n),
        "zone": rng.integers(0, 5, n),
    }
    return columns, (columns["age"] > 40).astype("int64")


@program(slow=True)
def structured_data():
    """Adapted Normalization and StringLookup layers inside the model, dict of columns."""
    columns, y = _table(47)
    data = tf.data.Dataset.from_tensor_slices((columns, y)).batch(16)
    inputs, features = {}, []
    for name in ("age", "rate"):
        inputs[name] = keras.Input((1,), name=name)
        normalizer = layers.Normalization()
        normalizer.adapt(columns[name][:, None])
        features.append(normalizer(inputs[name]))
    inputs["color"] = keras.Input((1,), name="color", dtype="string")
    lookup = layers.StringLookup(output_mode="one_hot")
    lookup.adapt(columns["color"])
    features.append(lookup(inputs["color"]))
    inputs["zone"] = keras.Input((1,), name="zone", dtype="int64")
    index = layers.IntegerLookup(vocabulary=[0, 1, 2, 3, 4], output_mode="one_hot")
    features.append(index(inputs["zone"]))
    z = layers.Dense(8, activation="relu")(layers.concatenate(features))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(z))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    data = data.map(lambda x, y: ({name: x[name][:, None] for name in x}, y))
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    model.save("table.keras")
    loaded = keras.models.load_model("table.keras")
    return outcome(history, model, loaded=loaded.predict(data, verbose=0))


@program(slow=True)
def feature_space():
    """keras.utils.FeatureSpace with a crossing; one model for training, one for inference."""
    columns, y = _table(45)
    data = tf.data.Dataset.from_tensor_slices((columns, y))
    space = keras.utils.FeatureSpace(
        features={
            "age": keras.utils.FeatureSpace.float_normalized(),
            "rate": keras.utils.FeatureSpace.float_discretized(num_bins=4),
            "color": keras.utils.FeatureSpace.string_categorical(num_oov_indices=0),
            "zone": keras.utils.FeatureSpace.integer_categorical(num_oov_indices=0),
        },
        crosses=[
            keras.utils.FeatureSpace.cross(feature_names=("color", "zone"), crossing_dim=8),
        ],
        output_mode="concat",
    )
    space.adapt(data.map(lambda x, _: x))
    data = data.batch(16)
    processed = data.map(lambda x, y: (space(x), y))
    encoded = space.get_encoded_features()
    z = layers.Dense(8, activation="relu")(encoded)
    predictions = layers.Dense(1, activation="sigmoid")(z)
    training = keras.Model(inputs=encoded, outputs=predictions)
    training.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
    history = training.fit(processed, epochs=2, validation_data=processed, verbose=0)
    inference = keras.Model(inputs=space.get_inputs(), outputs=predictions)
    predicted = inference.predict(data.map(lambda x, _: x), verbose=0)
    return outcome(history, training, predicted=predicted)


@program(slow=True)
def imbalanced_classes():
    """Rare positives: class weights, an initial bias, and metrics of confusion."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(61, 5)).astype("float32"), (rng.random((61, 1)) < 0.2).astype("uint8")
    bias = keras.initializers.Constant(np.log(0.25))
    model = keras.Sequential(
        [
            keras.Input(shape=x.shape[1:]),
            layers.Dense(8, activation="relu"),
            layers.Dense(1, activation="sigmoid", bias_initializer=bias),
        ]
    )
    metrics = [
        keras.metrics.FalseNegatives(name="fn"),
        keras.metrics.TruePositives(name="tp"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.Recall(name="recall"),
        keras.metrics.AUC(name="prc", curve="PR"),
    ]
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3), "binary_crossentropy", metrics=metrics)
    stop = keras.callbacks.EarlyStopping("val_prc", mode="max", restore_best_weights=True)
    history = model.fit(
        x, y, batch_size=16, epochs=3, callbacks=[stop], validation_split=0.2,
        class_weight={0: 0.6, 1: 2.5}, verbose=0,
    )  # fmt: skip
    return outcome(history, model, score=model.evaluate(x, y, return_dict=True, verbose=0))


@program(slow=True)
def fuel_regression():
    """Regression with an adapted Normalization in a Sequential, and a validation split."""
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, (59, 4)).astype("float32")
    y = x.sum(1)
    normalizer = layers.Normalization(axis=-1)
    normalizer.adapt(x)
    model = keras.Sequential([normalizer, layers.Dense(8, activation="relu"), layers.Dense(1)])
    model.compile(loss="mean_absolute_error", optimizer=keras.optimizers.Adam(0.05))
    history = model.fit(x, y, validation_split=0.2, verbose=0, epochs=3, batch_size=16)
    model.save("fuel.keras")
    loaded = keras.models.load_model("fuel.keras")
    score = [model.evaluate(x, y, verbose=0), loaded.evaluate(x, y, verbose=0)]
    return outcome(history, model, score=score)


@program(slow=True)
def wide_and_deep():
    """Wide, deep, and cross parts: two named inputs, a custom layer, sample weights."""
    rng = np.random.default_rng(0)
    deep, wide = rng.normal(size=(43, 6)).astype("float32"), rng.integers(0, 2, (43, 5))
    y, weight = rng.normal(size=(43, 1)), rng.random(43)

    class Cross(layers.Layer):
        def build(self, shapes):
            self.kernel = self.add_weight(shape=(shapes[0][-1],) * 2, name="kernel")
            self.bias = self.add_weight(shape=(shapes[0][-1],), initializer="zeros", name="bias")

        def call(self, inputs):
            first, x = inputs
            return first * (ops.matmul(x, self.kernel) + self.bias) + x

    numbers, flags = keras.Input((6,), name="deep"), keras.Input((5,), name="wide")
    crossed = Cross()([numbers, Cross()([numbers, numbers])])
    hidden = layers.Dense(
        8, activation="selu", kernel_regularizer=keras.regularizers.L1L2(1e-3, 1e-3)
    )(numbers)
    merged = layers.concatenate([crossed, hidden, flags])
    model = keras.Model([numbers, flags], layers.Dense(1)(merged))
    model.compile(keras.optimizers.Ftrl(0.05), "log_cosh", weighted_metrics=["mse"])
    history = model.fit(
        {"deep": deep, "wide": wide}, y, sample_weight=weight, batch_size=16, epochs=2, verbose=0
    )
    return outcome(history, model)


class QuantileLoss(keras.losses.Loss):
    def __init__(self, quantile, **kwargs):
        super().__init__(**kwargs)
        self.quantile = quantile

    def call(self, y_true, y_pred):
        error = y_true - y_pred
        return ops.mean(ops.maximum(self.quantile * error, (self.quantile - 1) * error), axis=-1)


@program(slow=True)
def quantile_regression():
    """One output per quantile: a list of losses with settings, a list of targets and weights."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(46, 3)).astype("float32"), rng.normal(size=(46, 1)).astype("float32")
    inputs = keras.Input((3,))
    hidden = layers.Dense(8, activation="tanh")(inputs)
    outputs = [layers.Dense(1, name=name)(hidden) for name in ("low", "middle", "high")]
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.Adagrad(0.1),
        loss=[QuantileLoss(q) for q in (0.1, 0.5, 0.9)],
        loss_weights=[1.0, 2.0, 1.0],
        metrics=[["mae"], ["mae", "mse"], []],
    )
    history = model.fit(x, [y, y, y], batch_size=16, epochs=2, validation_split=0.1, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class NeuralTree(keras.Model):
    """Soft decision tree with learned probabilities of leaves."""

    def __init__(self, depth, features, classes, seed):
        super().__init__()
        self.depth, self.leaves = depth, 2**depth
        used = np.random.default_rng(seed).choice(features, features // 2, replace=False)
        self.used = np.eye(features)[used].T.astype("float32")
        self.pi = self.add_weight(shape=(self.leaves, classes), initializer="random_normal")
        self.decide = layers.Dense(self.leaves, activation="sigmoid", name="decision")

    def call(self, features):
        decisions = ops.expand_dims(self.decide(ops.matmul(features, self.used)), axis=2)
        decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
        mu = ops.ones((ops.shape(features)[0], 1, 1))
        begin, end = 1, 2
        for level in range(self.depth):
            mu = ops.reshape(mu, (ops.shape(features)[0], -1, 1))
            mu = ops.tile(mu, (1, 1, 2)) * decisions[:, begin:end, :]
            begin, end = end, end + 2 ** (level + 1)
        return ops.matmul(ops.reshape(mu, (-1, self.leaves)), ops.softmax(self.pi))


@program(slow=True)
def decision_forest():
    """Neural decision forest: models in a model, weights of the model itself, batch-sized ones."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(44, 6)).astype("float32"), rng.integers(0, 3, 44)
    inputs = keras.Input((6,))
    normal = layers.LayerNormalization()(inputs)
    trees = [NeuralTree(2, 6, 3, seed)(normal) for seed in range(2)]
    model = keras.Model(inputs, layers.average(trees))
    model.compile("nadam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


class RecommenderNet(keras.Model):
    def __init__(self, num_users, num_movies, embedding_size):
        super().__init__()
        self.user_embedding = layers.Embedding(
            num_users, embedding_size, embeddings_regularizer=keras.regularizers.l2(1e-3)
        )
        self.user_bias = layers.Embedding(num_users, 1)
        self.movie_embedding = layers.Embedding(num_movies, embedding_size)
        self.movie_bias = layers.Embedding(num_movies, 1)

    def call(self, inputs):
        user, movie = self.user_embedding(inputs[:, 0]), self.movie_embedding(inputs[:, 1])
        score = ops.sum(user * movie, axis=1, keepdims=True)
        return ops.sigmoid(score + self.user_bias(inputs[:, 0]) + self.movie_bias(inputs[:, 1]))


@program(slow=True)
def collaborative_filtering():
    """Recommendations from embeddings of users and movies, regularized, under Adam."""
    rng = np.random.default_rng(0)
    x, y = np.stack([rng.integers(0, 9, 51), rng.integers(0, 7, 51)], 1), rng.random(51)
    model = RecommenderNet(9, 7, 4)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), keras.losses.BinaryCrossentropy())
    history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:9], y[:9]), verbose=0)
    return outcome(history, model, predicted=model.predict(x, verbose=0))


@program(differs=ACROSS_ROWS)
def recommender_by_tensordot():
    """Recommendations where tensordot sums over the batch too, as often published."""

    class Net(RecommenderNet):
        def call(self, inputs):
            user, movie = self.user_embedding(inputs[:, 0]), self.movie_embedding(inputs[:, 1])
            return ops.sigmoid(ops.tensordot(user, movie, 2) + self.user_bias(inputs[:, 0]))

    rng = np.random.default_rng(0)
    x, y = np.stack([rng.integers(0, 9, 48), rng.integers(0, 7, 48)], 1), rng.random(48)
    model = Net(9, 7, 4)
    model.compile("sgd", keras.losses.BinaryCrossentropy())
    return outcome(model.fit(x, y, batch_size=16, epochs=2, verbose=0), model)


class TwoTower(keras.Model):
    """Ranks by the product of two towers; the step takes ratings from the features."""

    def __init__(self):
        super().__init__()
        self.query = keras.Sequential([layers.Embedding(9, 6), layers.Dense(4)])
        self.candidate = keras.Sequential([layers.Embedding(7, 6), layers.Dense(4)])
        self.head = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(1)])
        self.rating_loss = keras.losses.MeanSquaredError()
        self.rmse = keras.metrics.RootMeanSquaredError(name="rmse")

    def call(self, features):
        towers = [self.query(features["user"]), self.candidate(features["movie"])]
        return self.head(ops.concatenate(towers, axis=1))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.rating_loss(x["rating"], y_pred)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.rmse.update_state(x["rating"], y_pred)
        return self.get_metrics_result()


@program(slow=True)
def two_tower_ranking():
    """Two towers on a dict that holds the ratings; compute_loss and compute_metrics overridden."""
    rng = np.random.default_rng(0)
    data = {
        "user": rng.integers(0, 9, 49),
        "movie": rng.integers(0, 7, 49),
        "rating": rng.random((49, 1)).astype("float32"),
    }
    model = TwoTower()
    model.compile(optimizer=keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices(data).batch(16)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(history, model, predicted=model.predict(data, verbose=0))


class Retrieval(TwoTower):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        scores = ops.matmul(self.query(x["user"]), ops.transpose(self.candidate(x["movie"])))
        labels = ops.arange(ops.shape(scores)[0])
        losses = keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        return ops.mean(losses)


@program(differs=ACROSS_ROWS)
def two_tower_retrieval():
    """Two towers with in-batch negatives."""
    rng = np.random.default_rng(0)
    data = {
        "user": rng.integers(0, 9, 48),
        "movie": rng.integers(0, 7, 48),
        "rating": rng.random((48, 1)).astype("float32"),
    }
    model = Retrieval()
    model.compile(optimizer=keras.optimizers.Adagrad(0.1))
    data = tf.data.Dataset.from_tensor_slices(data).batch(16)
    return outcome(model.fit(data, epochs=2, verbose=0), model)


@program
def behavior_sequence_transformer():
    """Sequence recommender: attention over rated movies, positions, side features, dict input."""
    rng = np.random.default_rng(0)
    data = {
        "movies": rng.integers(0, 11, (38, 4)),
        "ratings": rng.random((38, 4)).astype("float32"),
        "target": rng.integers(0, 11, 38),
        "occupation": rng.integers(0, 3, 38),
    }
    y = rng.random(38).astype("float32")
    inputs = {
        "movies": keras.Input((4,), dtype="int64", name="movies"),
        "ratings": keras.Input((4,), name="ratings"),
        "target": keras.Input((), dtype="int64", name="target"),
        "occupation": keras.Input((), dtype="int64", name="occupation"),
    }
    movies = layers.Embedding(11, 6)
    seen = movies(inputs["movies"]) + layers.Embedding(4, 6)(np.arange(4))
    seen = layers.Multiply()([seen, ops.expand_dims(inputs["ratings"], -1)])
    tokens = ops.concatenate([seen, ops.expand_dims(movies(inputs["target"]), 1)], axis=1)
    z = layers.MultiHeadAttention(num_heads=2, key_dim=3)(tokens, tokens)
    z = layers.Flatten()(layers.LayerNormalization()(layers.Add()([tokens, z])))
    z = layers.concatenate([z, layers.Embedding(3, 2)(inputs["occupation"])])
    model = keras.Model(inputs, layers.Dense(1)(z))
    model.compile(
        optimizer=keras.optimizers.Adagrad(learning_rate=0.05),
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.MeanAbsoluteError()],
    )
    history = model.fit(
        tf.data.Dataset.from_tensor_slices((data, y)).batch(16), epochs=2, verbose=0
    )
    return outcome(history, model)
