"""Variables on parameter servers: many small ones in one message, and large tables in parts.

A worker's step reads every variable and sends a gradient for each. A message costs more than the
arithmetic of a small model. Therefore small variables of the same server and type are read and
written as one vector.

The operations of a step on one server form one function. TensorFlow makes a step wait for each of
its writes with a message of its own, but only once for a function.

Keras requires a single variable per weight, and reads a whole table to look up some rows. With
parameter servers an `Embedding` has one variable per part, and looks rows up on the servers: a step
moves only the rows that it needs. Files hold a plain `Embedding`.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from kdist.compat.keras import save_as
from kdist.compat.tensorflow import partitioner_of
from kdist.training.scopes import has_parameter_servers

# Larger variables are sent alone: copying them would cost more than a message.
_PACK_BELOW_BYTES = 256 * 1024

# Function from a variable's shape and dtype to the number of parts per axis, as in TensorFlow.
Partitioner = Callable[..., Sequence[int]]


def run_on_server(device, function, *tensors):
    """Returns the result of `function`, which runs on `device` as a whole."""

    def there(*tensors):
        with tf.device(device):
            return function(*tensors)

    with tf.device(device):
        return tf.function(there, autograph=False)(*tensors)


def pull(variables, counter=None):
    """Returns (values of small variables by their index, value of `counter`).

    Args:
        variables: TensorFlow variables on any devices.
        counter: variable that is read before all others; optional.
    """
    packs = _packs(variables)
    values, count, flats = {}, None, {}
    if counter is not None:
        # One function for both: control dependencies of a call do not order its operations.
        count, flats[counter.device] = run_on_server(
            counter.device,
            lambda: _read(variables, packs.get(counter.device, []), counter),
        )
    for device in packs.keys() - flats.keys():
        flats[device] = run_on_server(
            device,
            lambda *after, device=device: _read(variables, packs[device], after=after)[1],
            *([] if count is None else [count]),
        )
    for device, some in packs.items():
        for flat, numbers in zip(flats[device], some, strict=True):
            parts = _unpacked(flat, [variables[n] for n in numbers])
            values.update(zip(numbers, parts, strict=True))
    return values, count


def push(variables, tensors, write):
    """Lets each server write to its variables.

    Args:
        variables: TensorFlow variables.
        tensors: one per variable: a tensor of its shape, `tf.IndexedSlices`, or None.
        write: function of a variable and its tensor, on the same server.
    """
    moved = move_to_servers(variables, tensors)
    run_on_servers(variables, moved, lambda number, tensor: write(variables[number], tensor))


def run_on_servers(variables, tensors, act):
    """Calls `act(index, tensor)` for each variable with a tensor, in one function per server."""
    by_device = defaultdict(list)
    for number, (variable, tensor) in enumerate(zip(variables, tensors, strict=True)):
        if tensor is not None:
            by_device[variable.device].append((number, tensor))
    for device, some in by_device.items():

        def act_on_each(some=some):
            for number, tensor in some:
                act(number, tensor)

        run_on_server(device, act_on_each)


def move_to_servers(variables, tensors):
    """Returns the tensors, with small ones moved to the servers of their variables.

    Args:
        variables: TensorFlow variables.
        tensors: one per variable: a tensor of its shape, `tf.IndexedSlices`, or None.
    """
    moved = list(tensors)
    dense = [
        v if isinstance(t, tf.Tensor) else None for v, t in zip(variables, tensors, strict=True)
    ]
    for device, packs in _packs(dense).items():
        for numbers in packs:
            flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
            with tf.device(device):
                parts = _unpacked(flat, [variables[n] for n in numbers])
            for number, part in zip(numbers, parts, strict=True):
                moved[number] = part
    return moved


def _packs(variables):
    """Returns a dict: device -> lists of indices of its small variables, one per type."""
    packs = defaultdict(lambda: defaultdict(list))
    for number, variable in enumerate(variables):
        if variable is not None and _is_small(variable):
            packs[variable.device][variable.dtype].append(number)
    return {device: list(by_type.values()) for device, by_type in packs.items()}


def _is_small(variable):
    known = variable.shape.is_fully_defined() and variable.dtype != tf.string
    return known and variable.shape.num_elements() * variable.dtype.size < _PACK_BELOW_BYTES


def _read(variables, packs, counter=None, after=()):
    """Returns (value of the counter, which is read first; each pack as one vector)."""
    count = None if counter is None else counter.read_value()
    with tf.control_dependencies([*after, *([] if count is None else [count])]):
        flats = [
            tf.concat([tf.reshape(variables[n].read_value(), [-1]) for n in numbers], 0)
            for numbers in packs
        ]
    return count, flats


def _unpacked(flat, like):
    parts = tf.split(flat, [variable.shape.num_elements() for variable in like])
    return [tf.reshape(part, v.shape) for part, v in zip(parts, like, strict=True)]


def partition_embeddings(strategy: tf.distribute.Strategy, partitioner: Partitioner | None = None):
    """Partitions the tables of embeddings that are built in the scope of `strategy`.

    Args:
        strategy: a `ParameterServerStrategy`.
        partitioner: such as `tf.distribute.experimental.partitioners.MinSizePartitioner()`. If it
            is None and the strategy has no `variable_partitioner`, each table has one part.
    """
    install_partitioned_embedding()
    strategy.extended._kdist_partitioner = partitioner or partitioner_of(strategy)


@functools.cache
def install_partitioned_embedding():
    """Installs the layer in Keras, once per process. It acts in scopes with parameter servers."""
    keras_function = keras.layers.Embedding.build

    @functools.wraps(keras_function)
    def build(layer, input_shape=None):
        strategy = tf.distribute.get_strategy()
        if type(layer) is keras.layers.Embedding and has_parameter_servers(strategy):
            if not hasattr(strategy.extended, "_kdist_partitioner"):
                partition_embeddings(strategy)
            layer.__class__ = PartitionedEmbedding
            return PartitionedEmbedding.build(layer, input_shape)
        return keras_function(layer, input_shape)

    keras.layers.Embedding.build = build


@save_as(keras.layers.Embedding)
class PartitionedEmbedding(keras.layers.Embedding):
    """Embedding whose table is on parameter servers, in one or several parts."""

    def build(self, input_shape=None):
        if self.built:
            return
        sizes = self._sizes()
        self._check_can_be_partitioned(len(sizes))
        ends = np.cumsum(sizes)
        whole = None
        if len(sizes) > 1:
            # The same initial values as on one device: parts would draw different ones.
            with tf.init_scope():  # Keras builds models in a temporary graph
                whole = self.embeddings_initializer(
                    (self.input_dim, self.output_dim), dtype=self.variable_dtype
                ).numpy()
        self._parts = [
            self.add_weight(
                shape=(size, self.output_dim),
                initializer=self.embeddings_initializer
                if whole is None
                else _given(whole[end - size : end]),
                name="embeddings" if len(sizes) == 1 else f"embeddings_{number}",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
            for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
        ]
        self._embeddings = self._parts[0]
        self.built = True

    @property
    def embeddings(self):
        """The whole table, (input_dim, output_dim)."""
        return tf.concat([tf.convert_to_tensor(part) for part in self._parts], 0)

    def call(self, inputs):
        """Returns the embeddings (…, output_dim) of integers (…)."""
        if inputs.dtype not in ("int32", "int64"):
            inputs = keras.ops.cast(inputs, "int32")
        parts = [part.value for part in self._parts]
        return keras.ops.cast(tf.nn.embedding_lookup(parts, inputs), self.compute_dtype)

    def save_own_variables(self, store):
        """Saves one table, as Keras's layer does."""
        store["0"] = np.concatenate([part.numpy() for part in self._parts])

    def load_own_variables(self, store):
        """Loads a file with one table."""
        ends = np.cumsum([part.shape[0] for part in self._parts])
        for part, table in zip(self._parts, np.split(store["0"], ends[:-1]), strict=True):
            part.assign(table)

    def enable_lora(self, *args, **kwargs):
        """Adds LoRA weights, as Keras's layer does; the table must have one part."""
        self._become_plain()
        self.enable_lora(*args, **kwargs)

    def quantize(self, *args, **kwargs):
        """Quantizes the table, as Keras's layer does; the table must have one part."""
        self._become_plain()
        self.quantize(*args, **kwargs)

    def _become_plain(self):
        """Makes this Keras's own layer, which reads the whole table in each step."""
        if len(self._parts) > 1:
            raise ValueError(
                f"{self.name!r} is partitioned into {len(self._parts)} parts, so that it can be "
                "neither quantized nor have LoRA; use no partitioner, or --strategy=mirrored"
            )
        self.__class__ = keras.layers.Embedding

    def _sizes(self):
        """Returns the rows of each part: nearly equal, the larger parts first."""
        partitioner = tf.distribute.get_strategy().extended._kdist_partitioner
        if partitioner is None:
            return [self.input_dim]
        dtype = tf.as_dtype(self.variable_dtype)
        shape = tf.TensorShape([self.input_dim, self.output_dim])
        number = min(int(partitioner(shape=shape, dtype=dtype)[0]), self.input_dim)
        return [len(rows) for rows in np.array_split(np.empty(self.input_dim), number)]

    def _check_can_be_partitioned(self, number):
        if self.quantization_mode or self.lora_rank:
            raise ValueError(
                f"{self.name!r}: a quantized embedding, or one with LoRA, is not supported on "
                "parameter servers; use --strategy=mirrored or multi_worker"
            )
        separable = keras.regularizers.L1 | keras.regularizers.L2 | keras.regularizers.L1L2
        regularizer = self.embeddings_regularizer
        if number > 1 and (
            self.embeddings_constraint is not None
            or not (regularizer is None or isinstance(regularizer, separable))
        ):
            raise ValueError(
                f"{self.name!r} is partitioned into {number} parts, and its constraint or "
                "regularizer depends on the whole table; remove it, use L1 or L2, or no partitioner"
            )


def _given(values):
    return lambda shape, dtype=None: tf.constant(values, dtype)


# Keras's files name a layer's variables after its class.
PartitionedEmbedding.__name__ = keras.layers.Embedding.__name__
