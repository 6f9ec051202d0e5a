"""Random small models, data, and options of `compile`, for `test_random_models.py`.

A case is a dictionary of plain values, so that a failure can be copied into a list of fixed cases.
"""

import contextlib
import dataclasses

import keras
import numpy as np
import tensorflow as tf
from hypothesis import strategies as st

import kdist
from tests.equivalence import random_steps

UNITS, CLASSES, WORDS = 3, 3, 6
INPUT_SHAPES = {"vector": (4,), "image": (5, 5, 2), "tokens": (4,), "sequence": (4, 3)}

# {name: layer}, by the kind of tensor that it receives and returns.
VECTOR_LAYERS = {
    "dense": lambda: keras.layers.Dense(UNITS, activation="tanh"),
    "l2": lambda: keras.layers.Dense(UNITS, kernel_regularizer=keras.regularizers.L2(0.1)),
    "activity": lambda: keras.layers.Dense(UNITS, activity_regularizer=keras.regularizers.L2(0.1)),
    "batch_norm": lambda: keras.layers.BatchNormalization(
        synchronized=tf.distribute.has_strategy(), momentum=0.8
    ),
    "layer_norm": keras.layers.LayerNormalization,
    "dropout": lambda: keras.layers.Dropout(0.0),
    "add": lambda: Merged(keras.layers.Add),
    "multiply": lambda: Merged(keras.layers.Multiply),
    "concatenate": lambda: Merged(keras.layers.Concatenate),
    "maximum": lambda: Merged(keras.layers.Maximum),
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(UNITS)),
    "unit_norm": keras.layers.UnitNormalization,
    "prelu": keras.layers.PReLU,
    "added_mean": lambda: AddedLoss(keras.ops.mean),
    "added_sum": lambda: AddedLoss(keras.ops.sum),
    "centered": lambda: Centered(),
    "counter": lambda: Counter(),
}
IMAGE_LAYERS = {
    "conv": lambda: keras.layers.Conv2D(2, 3, padding="same", activation="tanh"),
    "depthwise": lambda: keras.layers.DepthwiseConv2D(3, padding="same"),
    "transpose": lambda: keras.layers.Conv2DTranspose(2, 3, padding="same"),
    "group_norm": lambda: keras.layers.GroupNormalization(1),
    "pool": lambda: keras.layers.MaxPooling2D(2, strides=1, padding="same"),
    "centered": VECTOR_LAYERS["centered"],
    "batch_norm": VECTOR_LAYERS["batch_norm"],
    "dropout": VECTOR_LAYERS["dropout"],
}
SEQUENCE_LAYERS = {
    "gru": lambda: keras.layers.GRU(UNITS, return_sequences=True),
    "lstm": lambda: keras.layers.LSTM(UNITS, return_sequences=True),
    "dense": VECTOR_LAYERS["dense"],
    "layer_norm": VECTOR_LAYERS["layer_norm"],
    "batch_norm": VECTOR_LAYERS["batch_norm"],
    "positions": lambda: Positions(),
    "add": VECTOR_LAYERS["add"],
    "attention": lambda: Attention(),
    "bidirectional": lambda: keras.layers.Bidirectional(
        keras.layers.GRU(UNITS, return_sequences=True), merge_mode="sum"
    ),
    "conv": lambda: keras.layers.Conv1D(UNITS, 2, padding="causal"),
    "added_mean": VECTOR_LAYERS["added_mean"],
    "spectral": VECTOR_LAYERS["spectral"],
}
LAYERS = {
    "vector": VECTOR_LAYERS,
    "image": IMAGE_LAYERS,
    "tokens": SEQUENCE_LAYERS,
    "sequence": SEQUENCE_LAYERS,
}
REDUCERS = {
    "image": [keras.layers.GlobalAveragePooling2D, keras.layers.Flatten],
    "sequence": [
        keras.layers.GlobalAveragePooling1D,
        lambda: keras.layers.GRU(UNITS),
        keras.layers.GlobalMaxPooling1D,
    ],
}
LOSSES = {
    "mse": keras.losses.MeanSquaredError,
    "mae": keras.losses.MeanAbsoluteError,
    "huber": keras.losses.Huber,
    "log_cosh": keras.losses.LogCosh,
    "crossentropy": keras.losses.SparseCategoricalCrossentropy,
    "binary": lambda **o: keras.losses.BinaryCrossentropy(from_logits=True, **o),
    "cosine": keras.losses.CosineSimilarity,
    "dice": keras.losses.Dice,
    "function": lambda **o: squared_difference,
    "scalar": lambda **o: mean_squared_difference,
    "root": lambda **o: root_of_mean,
    "sum": lambda **o: sum_of_squares,
}
# Metrics of outputs that are not classes; the loss is one, too.
METRICS = {
    "mae": lambda: "mae",
    "mse": lambda: "mse",
    "root": keras.metrics.RootMeanSquaredError,
    "r2": keras.metrics.R2Score,
    "cosine": keras.metrics.CosineSimilarity,
    "function": lambda: largest_difference,
    "scalar": lambda: mean_squared_difference,
}
CLASS_METRICS = {
    "accuracy": lambda: "accuracy",
    "top_2": lambda: keras.metrics.SparseTopKCategoricalAccuracy(2),
    "crossentropy": keras.metrics.SparseCategoricalCrossentropy,
    "mean_iou": lambda: keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False),
}
OPTIMIZERS = {
    "sgd": lambda **o: keras.optimizers.SGD(0.1, **o),
    "momentum": lambda **o: keras.optimizers.SGD(0.05, momentum=0.8, nesterov=True, **o),
    "adam": lambda **o: keras.optimizers.Adam(0.05, epsilon=1e-3, **o),
    "amsgrad": lambda **o: keras.optimizers.Adam(0.05, epsilon=1e-3, amsgrad=True, **o),
    "adamw": lambda **o: keras.optimizers.AdamW(0.05, epsilon=1e-3, **o),
    "rmsprop": lambda **o: keras.optimizers.RMSprop(0.05, epsilon=1e-3, **o),
    "adagrad": lambda **o: keras.optimizers.Adagrad(0.05, **o),
    "adamax": lambda **o: keras.optimizers.Adamax(0.05, epsilon=1e-3, **o),
    "nadam": lambda **o: keras.optimizers.Nadam(0.05, epsilon=1e-3, **o),
    "adadelta": lambda **o: keras.optimizers.Adadelta(0.5, epsilon=1e-3, **o),
    "ftrl": lambda **o: keras.optimizers.Ftrl(0.05, **o),
    "lamb": lambda **o: keras.optimizers.Lamb(0.05, epsilon=1e-3, **o),
    "adafactor": lambda **o: keras.optimizers.Adafactor(0.05, **o),
    "muon": lambda **o: keras.optimizers.Muon(0.02, epsilon=1e-3, **o),
}


class Positions(keras.layers.Layer):
    """Adds an embedding of positions, whose indices do not come from the data."""

    def build(self, shape):
        self.embedding = keras.layers.Embedding(shape[1], shape[2])
        self.embedding.build(())

    def call(self, x):
        return x + self.embedding(keras.ops.arange(x.shape[1]))


class AddedLoss(keras.layers.Layer):
    """Adds a loss of what passes through."""

    def __init__(self, reduce):
        super().__init__()
        self._reduce = reduce

    def call(self, x):
        self.add_loss(0.1 * self._reduce(keras.ops.square(x)))
        return x


class Centered(keras.layers.Layer):
    """Subtracts the mean of the batch."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


class Counter(keras.layers.Layer):
    """Counts steps of training, and scales by a function of their number."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, x, training=False):
        if training:
            self.count.assign_add(1.0)
        return x / (1.0 + 0.1 * self.count)


class Attention(keras.layers.Layer):
    """Attention of a sequence to itself, with a mask of the past."""

    def __init__(self):
        super().__init__()
        self.supports_masking = True
        self._attention = keras.layers.MultiHeadAttention(2, 2)

    def build(self, shape):
        self._attention.build(shape, shape)

    def call(self, x):
        return x + self._attention(x, x, use_causal_mask=True)


def squared_difference(y_true, y_pred):
    """Returns a value for each row, as `mean_squared_error`, but is a function of a program."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred), axis=-1)


def mean_squared_difference(y_true, y_pred):
    """Returns a scalar."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def root_of_mean(y_true, y_pred):
    """Returns a scalar that is no mean of values of rows."""
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def sum_of_squares(y_true, y_pred):
    """Returns a scalar that grows with the number of rows."""
    return 0.1 * keras.ops.sum(keras.ops.square(y_true - y_pred))


def largest_difference(y_true, y_pred):
    """Returns a value for each row."""
    return keras.ops.max(keras.ops.abs(y_true - y_pred), axis=-1)


@dataclasses.dataclass
class Merged:
    """Two dense layers of the same input, merged."""

    merge: type

    def __call__(self, x):
        branches = [keras.layers.Dense(UNITS, activation=name)(x) for name in ("tanh", "sigmoid")]
        return self.merge()(branches)


@st.composite
def cases(draw):
    """Returns the strategy of all cases."""

    def one_of(values):
        return draw(st.sampled_from(sorted(values)))

    kind = one_of(INPUT_SHAPES)
    loss = one_of(LOSSES)
    optimizer_options = {}
    clipping = draw(st.sampled_from([None, None, "clipnorm", "clipvalue", "global_clipnorm"]))
    if clipping:
        optimizer_options[clipping] = draw(st.sampled_from([0.05, 0.5]))
    if draw(st.integers(0, 3)) == 0:
        optimizer_options |= {"use_ema": True, "ema_momentum": 0.7}
        optimizer_options["ema_overwrite_frequency"] = draw(st.sampled_from([None, 2]))
    if draw(st.integers(0, 3)) == 0:
        optimizer_options["weight_decay"] = 0.1
    case = {
        "kind": kind,
        "layers": draw(st.lists(st.sampled_from(sorted(LAYERS[kind])), max_size=2)),
        "masked": kind in ("tokens", "sequence") and draw(st.booleans()),
        "reducer": draw(st.sampled_from([0, 1, 2, None])) if kind != "vector" else None,
        "frozen": draw(st.integers(0, 5)) == 0,
        "loss": loss,
        "metric": one_of(CLASS_METRICS if loss == "crossentropy" else METRICS),
        "step": draw(st.sampled_from([None, None, *random_steps.STEPS])),
        "data": draw(st.sampled_from(["arrays", "arrays", "dataset", "py_dataset"])),
        "validates": draw(st.integers(0, 3)) == 0,
        "shares_trace": draw(st.booleans()),
        "shard": draw(st.sampled_from([None, None, None, "optimizer", "gradients", "weights"])),
        "reduction": one_of(["sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"]),
        "second_output": draw(st.booleans()),
        "loss_weights": draw(st.booleans()),
        "optimizer": one_of(OPTIMIZERS),
        "optimizer_options": optimizer_options,
        "weights": draw(st.sampled_from([None, None, "sample", "class"])),
        "rows": draw(st.integers(1, 13)),
        "batch": draw(st.integers(1, 8)),
        "accumulate": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "steps_per_execution": draw(st.sampled_from([1, 1, 2])),
        "eager": draw(st.integers(0, 3)) > 0,
        "devices": draw(st.sampled_from([2, 2, 2, 3, 4])),
    }
    return normalized(case)


def normalized(case):
    """Returns the case without combinations that Keras rejects, or that differ on purpose."""
    case = dict(case)
    if case["kind"] == "image" and case["reducer"] in (2, None):
        case["reducer"] = 0
    # Rounding decides which of equal tokens is the largest.
    if case["kind"] == "tokens" and "attention" in case["layers"] and case["reducer"] == 2:
        case["reducer"] = 0
    is_sequence = case["kind"] in ("tokens", "sequence") and case["reducer"] is None
    if case["weights"] == "class" and (
        case["loss"] != "crossentropy" or case["second_output"] or is_sequence
    ):
        case["weights"] = "sample"
    # Micro-steps have statistics and means over weights of their own.
    sees_batch = "batch_norm" in case["layers"] or case["masked"]
    combines_rows = "centered" in case["layers"] or case["loss"] in ("root", "dice")
    sees_batch |= combines_rows or case["step"] in random_steps.OF_BATCHES
    # The weights of rows multiply such losses by their mean.
    sees_batch |= case["loss"] in ("scalar", "sum")
    # Gradients of a mean and of a sum, added up.
    sees_batch |= case["step"] == "persistent" and "sum" in (case["loss"], case["reduction"])
    if sees_batch or case["reduction"] == "mean_with_sample_weight":
        case["accumulate"] = 1
    case["frozen"] &= bool(case["layers"])  # something has to be trained
    if case["step"]:
        case["second_output"] = False
    if case["step"] == "penalty" and case["kind"] == "tokens":
        case["step"] = "guide"
    # Without a graph, kdist does not know which rows are combined.
    if case["step"] not in (None, "guide") or case["shard"] or combines_rows:
        case["eager"] = False
    if case["eager"]:
        case["steps_per_execution"] = 1
    return case


def model_of(case, model_class):
    """Returns the case's model, not compiled."""
    kind = case["kind"]
    inputs = keras.Input(INPUT_SHAPES[kind], dtype="int32" if kind == "tokens" else None)
    x = inputs
    if kind == "tokens":
        x = keras.layers.Embedding(WORDS, UNITS, mask_zero=case["masked"])(x)
    elif case["masked"]:
        x = keras.layers.Masking()(x)
    for name in case["layers"]:
        x = LAYERS[kind][name]()(x)
    if case["reducer"] is not None:
        reducers = REDUCERS["image" if kind == "image" else "sequence"]
        x = reducers[case["reducer"]]()(x)
    if case["loss"] == "crossentropy":
        outputs = keras.layers.Dense(CLASSES, activation="softmax", name="first")(x)
    else:
        outputs = keras.layers.Dense(2, name="first")(x)
    if case["second_output"]:
        outputs = {"first": outputs, "second": keras.layers.Dense(1, name="second")(x)}
    if case["step"]:
        model_class = random_steps.with_step(model_class, case["step"])
    model = model_class(inputs, outputs)
    if case["frozen"]:
        model.layers[1].trainable = False
    return model


def compile_options(case, is_kdist):
    """Returns the arguments of `compile`."""
    loss = LOSSES[case["loss"]](reduction=case["reduction"])
    are_classes = case["loss"] == "crossentropy"
    metric = (CLASS_METRICS if are_classes else METRICS)[case["metric"]]()
    options = {"loss": loss, "metrics": [metric], "weighted_metrics": ["mse"]}
    if case["loss"] == "crossentropy":
        options["weighted_metrics"] = ["accuracy"]
    if case["second_output"]:
        options = {"loss": {"first": loss, "second": "mse"}, "metrics": {"first": metric}}
        if case["loss_weights"]:
            options["loss_weights"] = {"first": 0.7, "second": 2.0}
    if is_kdist:
        options["accumulate"] = case["accumulate"]
        options["share_trace"] = case["shares_trace"]
    return {
        **options,
        "optimizer": OPTIMIZERS[case["optimizer"]](**case["optimizer_options"]),
        "steps_per_execution": case["steps_per_execution"] if is_kdist else 1,
        "run_eagerly": case["eager"],
        "jit_compile": False,
    }


def data_of(case, output_shape):
    """Returns the arguments of `fit` that are data."""
    generator = np.random.default_rng(0)
    rows, shape = case["rows"], (case["rows"], *INPUT_SHAPES[case["kind"]])
    if case["kind"] == "tokens":
        x = generator.integers(0 if case["masked"] else 1, WORDS, shape)
        x[:, 0] = 1  # not all of a row is masked
    else:
        x = generator.normal(size=shape)
        if case["masked"]:
            x[generator.random((rows, shape[1])) < 0.4] = 0
            x[:, 0] = 1
    y = generator.normal(size=(rows, *output_shape[1:]))
    if case["loss"] == "crossentropy":
        y = generator.integers(0, CLASSES, (rows, *output_shape[1:-1]))
    if case["loss"] == "dice":
        y = generator.uniform(size=y.shape)
    data = {"x": x, "y": y}
    if case["second_output"]:
        data["y"] = {"first": y, "second": generator.normal(size=(rows, *output_shape[1:-1], 1))}
    if case["weights"] == "sample":
        weights = generator.uniform(0, 2, rows) * (generator.random(rows) < 0.7)
        data["sample_weight"] = (
            {"first": weights, "second": weights[::-1].copy()} if case["second_output"] else weights
        )
    if case["weights"] == "class":
        data["class_weight"] = {0: 0.5, 1: 2.0, 2: 1.0}
    return data


class Slices(keras.utils.PyDataset):
    """Batches of arrays."""

    def __init__(self, arrays, batch):
        super().__init__()
        self._arrays, self._batch = arrays, batch

    def __len__(self):
        return -(-len(keras.tree.flatten(self._arrays)[0]) // self._batch)

    def __getitem__(self, index):
        part = slice(index * self._batch, (index + 1) * self._batch)
        return keras.tree.map_structure(lambda array: array[part], self._arrays)


def batches(case, data):
    """Returns the arguments of `fit` for `data` in the form of the case."""
    if case["data"] == "arrays":
        return {**data, "batch_size": case["batch"]}
    others = {"class_weight": data["class_weight"]} if "class_weight" in data else {}
    arrays = tuple(data[name] for name in ("x", "y", "sample_weight") if name in data)
    if case["data"] == "py_dataset":
        return {"x": Slices(arrays, case["batch"]), **others}
    return {"x": tf.data.Dataset.from_tensor_slices(arrays).batch(case["batch"]), **others}


def results_of(case, strategy=None):
    """Trains by plain Keras, or by kdist under a strategy.

    Returns:
        {name: array}: weights, the optimizer's variables, logs, an evaluation, and predictions.
    """
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    model_class = keras.Model if strategy is None else kdist.Model
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = model_of(case, model_class)
        model.compile(**compile_options(case, strategy is not None))
    data = data_of(case, keras.tree.flatten(model.output)[0].shape)
    fit = {"shuffle": False, "verbose": 0, "epochs": 2}
    if case["validates"]:
        weights = [data["sample_weight"]] if "sample_weight" in data else []
        fit["validation_data"] = (data["x"], data["y"], *weights)
        fit["validation_batch_size"] = case["batch"]
    history = model.fit(**batches(case, data), **fit).history
    # Parts of slots have other shapes.
    variables = [*model.weights, *([] if case["shard"] else model.optimizer.variables)]
    results = {f"variable {n}": np.asarray(v.numpy()) for n, v in enumerate(variables)}
    results |= {f"log {name}": np.asarray(values) for name, values in history.items()}
    data.pop("class_weight", None)
    evaluated = model.evaluate(**data, batch_size=case["batch"], verbose=0, return_dict=True)
    return results | {f"evaluated {name}": np.asarray(v) for name, v in evaluated.items()}
