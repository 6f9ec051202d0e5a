"""Programs about graphs and point clouds."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import ACROSS_ROWS, outcome, program


def _graph(nodes=24, edges=60, features=5, seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(nodes, features)).astype("float32"),
        rng.integers(0, nodes, (2, edges)),
        rng.integers(0, 3, nodes),
    )


class GraphConvolution(layers.Layer):
    def __init__(self, units):
        super().__init__()
        self.prepare = layers.Dense(units, activation="gelu")
        self.update = layers.Dense(units, activation="gelu")

    def call(self, inputs):
        nodes, edges, weights = inputs
        messages = self.prepare(ops.take(nodes, edges[1], axis=0)) * weights[:, None]
        gathered = ops.segment_sum(messages, edges[0], num_segments=ops.shape(nodes)[0])
        return self.update(ops.concatenate([nodes, gathered], axis=1))


class NodeClassifier(keras.Model):
    """The graph is a constant of the model; a batch holds numbers of nodes."""

    def __init__(self, graph):
        super().__init__()
        self.features, self.edges, weights = graph
        self.weights_of_edges = weights / ops.sum(weights)
        self.before = layers.Dense(6, activation="gelu")
        self.conv = GraphConvolution(6)
        self.head = layers.Dense(3, name="logits")

    def call(self, nodes):
        x = self.before(self.features)
        x = x + self.conv((x, self.edges, self.weights_of_edges))
        return self.head(ops.take(x, nodes, axis=0))


@program(slow=True)
def node_classification():
    """Graph network whose batches are indices of nodes of one constant graph."""
    features, edges, labels = _graph()
    model = NodeClassifier((features, edges, np.ones(60, "float32")))
    model.compile(
        optimizer=keras.optimizers.Adam(0.01, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    stop = keras.callbacks.EarlyStopping(monitor="val_acc", patience=9, restore_best_weights=True)
    nodes = np.arange(24)
    history = model.fit(
        nodes, labels, batch_size=7, epochs=3, validation_split=0.2, callbacks=[stop], verbose=0
    )
    return outcome(history, model, predicted=model.predict(nodes, verbose=0))


class GraphAttention(keras.Model):
    """Attention over the edges of a graph; own steps for training, testing, and prediction."""

    def __init__(self, features, edges):
        super().__init__()
        self.node_states, self.edges = tf.constant(features), tf.constant(edges.T)
        self.transform = layers.Dense(6)
        self.attend = layers.Dense(1)
        self.out = layers.Dense(3)

    def call(self, inputs):
        states, edges = inputs
        z = self.transform(states)
        pairs = tf.reshape(tf.gather(z, edges), (tf.shape(edges)[0], -1))
        scores = tf.exp(tf.clip_by_value(tf.nn.leaky_relu(self.attend(pairs))[:, 0], -2, 2))
        count = tf.shape(states)[0]
        sums = tf.math.unsorted_segment_sum(scores, edges[:, 0], count)
        shares = scores / tf.gather(sums, edges[:, 0])
        messages = tf.gather(z, edges[:, 1]) * shares[:, None]
        return self.out(z + tf.math.unsorted_segment_sum(messages, edges[:, 0], count))

    def train_step(self, data):
        indices, labels = data
        with tf.GradientTape() as tape:
            outputs = self([self.node_states, self.edges])
            loss = self.compute_loss(y=labels, y_pred=tf.gather(outputs, indices))
        grads = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, tf.gather(outputs, indices))
        return {m.name: m.result() for m in self.metrics}

    def predict_step(self, data):
        outputs = self([self.node_states, self.edges])
        return tf.nn.softmax(tf.gather(outputs, data))

    def test_step(self, data):
        indices, labels = data
        outputs = tf.gather(self([self.node_states, self.edges]), indices)
        loss = self.compute_loss(y=labels, y_pred=outputs)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, outputs)
        return {m.name: m.result() for m in self.metrics}


@program(slow=True)
def graph_attention():
    """Graph attention where call takes the graph, and fit gives indices; own predict_step."""
    features, edges, labels = _graph()
    model = GraphAttention(features, edges)
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    nodes = np.arange(24)
    history = model.fit(
        x=nodes[:19], y=labels[:19], validation_split=0.1, batch_size=8, epochs=2, verbose=0
    )
    score = model.evaluate(nodes, labels, batch_size=8, verbose=0)
    return outcome(history, model, score=score, predicted=model.predict(nodes, verbose=0))


@program(slow=True)
def molecules():
    """Message passing over padded molecules: dict of atoms and bonds, class weights, AUC."""
    rng = np.random.default_rng(0)
    atoms = rng.normal(size=(37, 5, 4)).astype("float32")
    bonds = (rng.random((37, 5, 5)) < 0.4).astype("float32")
    y = (rng.random(37) < 0.4).astype("int64")
    inputs = {
        "atoms": keras.Input((5, 4), name="atoms"),
        "bonds": keras.Input((5, 5), name="bonds"),
    }
    cell = layers.GRUCell(6)
    z = layers.Dense(6)(inputs["atoms"])
    for _ in range(2):
        messages = ops.matmul(inputs["bonds"], layers.Dense(6)(z))
        flat, _ = cell(ops.reshape(messages, (-1, 6)), [ops.reshape(z, (-1, 6))])
        z = ops.reshape(flat, (-1, 5, 6))
    z = layers.GlobalAveragePooling1D()(z)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(z))
    model.compile(
        loss=keras.losses.BinaryCrossentropy(),
        optimizer=keras.optimizers.Adam(learning_rate=5e-3, epsilon=1e-3),
        metrics=[keras.metrics.AUC(name="AUC")],
    )
    data = tf.data.Dataset.from_tensor_slices(({"atoms": atoms, "bonds": bonds}, y)).batch(16)
    history = model.fit(
        data, validation_data=data, epochs=2, verbose=0, class_weight={0: 2.0, 1: 0.5}
    )
    return outcome(history, model, predicted=model.predict(data, verbose=0))


class OrthogonalRegularizer(keras.regularizers.Regularizer):
    def __init__(self, num_features, l2reg=0.001):
        self.num_features, self.l2reg = num_features, l2reg

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.num_features, self.num_features))
        xxt = ops.tensordot(x, x, axes=(2, 2))
        xxt = ops.reshape(xxt, (-1, self.num_features, self.num_features))
        return ops.sum(self.l2reg * ops.square(xxt - ops.eye(self.num_features)))


def _point_net(regularizer):
    rng = np.random.default_rng(0)
    points, y = rng.normal(size=(40, 12, 3)).astype("float32"), rng.integers(0, 3, 40)
    inputs = keras.Input(shape=(12, 3))
    z = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(inputs))
    transform = layers.Dense(
        9,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(3).flatten()),
        activity_regularizer=regularizer,
    )(z)
    z = layers.Dot(axes=(2, 1))([inputs, layers.Reshape((3, 3))(transform)])
    z = layers.GlobalMaxPooling1D()(layers.Conv1D(8, 1, activation="relu")(z))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(z))
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(learning_rate=0.01, epsilon=1e-3),
        metrics=["sparse_categorical_accuracy"],
    )
    data = tf.data.Dataset.from_tensor_slices((points, y)).shuffle(40, seed=1).batch(16)
    history = model.fit(data, epochs=2, validation_data=data, verbose=0)
    return outcome(history, model)


@program(slow=True)
def point_net():
    """Point clouds with a learned transform that an activity regularizer keeps small."""
    return _point_net(keras.regularizers.L2(0.01))


@program(slow=True, differs=ACROSS_ROWS)
def orthogonal_point_net():
    """Point clouds with PointNet's orthogonal regularizer as published: tensordot over rows."""
    return _point_net(OrthogonalRegularizer(3))


@program(slow=True)
def traffic_graph():
    """Forecasts on a road network: graph convolution over time, then an LSTM per node."""
    rng = np.random.default_rng(0)
    speeds = rng.random((60, 4, 1)).astype("float32")
    adjacency = ops.convert_to_tensor((rng.random((4, 4)) < 0.5).astype("float32"))

    class GraphLSTM(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.weight = self.add_weight(shape=(1, 6), initializer="glorot_uniform")
            self.lstm, self.dense = layers.LSTM(5), layers.Dense(2)

        def call(self, x):
            x = ops.transpose(x, [2, 0, 1, 3])
            z = ops.relu(ops.einsum("ij,jbtf->ibtf", adjacency, ops.matmul(x, self.weight)))
            shape = ops.shape(z)
            z = self.dense(self.lstm(ops.reshape(z, (shape[0] * shape[1], shape[2], 6))))
            return ops.transpose(ops.reshape(z, (shape[0], shape[1], 2)), [1, 2, 0])

    def dataset(series):
        inputs = keras.utils.timeseries_dataset_from_array(
            series[:-2], None, sequence_length=5, shuffle=False, batch_size=16
        )
        targets = keras.utils.timeseries_dataset_from_array(
            series[5:, :, 0], None, sequence_length=2, shuffle=False, batch_size=16
        )
        return tf.data.Dataset.zip((inputs, targets)).prefetch(16).cache()

    inputs = layers.Input((5, 4, 1))
    model = keras.Model(inputs, GraphLSTM()(inputs))
    model.compile(keras.optimizers.RMSprop(2e-3, epsilon=1e-3), keras.losses.MeanSquaredError())
    history = model.fit(
        dataset(speeds[:45]), validation_data=dataset(speeds[45:]), epochs=2,
        callbacks=[keras.callbacks.EarlyStopping(patience=10)], verbose=0,
    )  # fmt: skip
    return outcome(history, model)
