"""Batches of other libraries: Grain, PyTorch, Hugging Face, WebDataset, and iterables of a program.

    batches = from_batches(loader)
    reader = batches.open_reader(number=20, **saved)  # `fit` does this, and the rest as well
    reader.dataset()                                  # from batch 20 on
    reader.place_after(25)                            # for a checkpoint after batch 25

Data are read ahead of the training. The reader therefore keeps the state of the source after each
batch until that batch has been trained, and a checkpoint holds the one of the last trained batch.
"""

import base64
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

_logger = logging.getLogger(__name__)

# Batches that are read ahead of the step.
_PREFETCH = 2
# Batches whose dimensions are compared, to find those that differ, as Keras does.
_COMPARED_BATCHES = 2
# Libraries give sources that repeat without end a length like `sys.maxsize`, divided by the batch.
_MIN_ENDLESS_LENGTH = 1 << 48
_UNEQUAL_ROWS = "the rows of a batch are no array; pad them to one length, such as in `select`"
# Methods that return and restore the state of a source or its iterator.
_PROTOCOLS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class SourcePlace(NamedTuple):
    """A place in a source between two batches.

    Attributes:
        passes: number of passes over the source before this one.
        batches: number of batches read in this pass.
        state: the state of the source in JSON types; None if it has none.
    """

    passes: int = 0
    batches: int = 0
    state: Any = None

    @property
    def next_pass(self) -> "SourcePlace":
        """The beginning of the following pass."""
        return SourcePlace(self.passes + 1)


class BatchSource:
    """Batches of another library; created by `from_batches`.

    Args:
        source: iterable of global batches, which each epoch iterates once.
        select: function from a batch of the source to (x, y) or (x, y, sample weights). Defaults
            to None, the batch as it is.

    Example:

        batches = kdist.data.from_batches(loader)
        model.evaluate(batches)
    """

    def __init__(self, source: Iterable, select: Callable[[Any], tuple] | None = None):
        self._source, self._select = source, select

    def open_reader(
        self,
        number: int = 0,
        passes: int = 0,
        batches: int = 0,
        state: Any = None,
        keeps_places: bool = False,
    ) -> "SourceReader":
        """Returns a reader of the batches.

        Args:
            number: number of the first batch, counted over all epochs. Defaults to 0.
            passes, batches, state: the `SourcePlace` where to begin. Defaults to the beginning.
            keeps_places: whether `SourceReader.place_after` will be called. Defaults to False.

        Raises:
            ValueError: the source has no batches, or batches of another form, or the state is that
                of another source.
            TypeError: its state has values that a checkpoint does not hold.
        """
        place = SourcePlace(passes, batches, state)
        return SourceReader(self._source, self._select, number, place, keeps_places)


def from_batches(source: Iterable, select: Callable[[Any], tuple] | None = None) -> BatchSource:
    """Makes batches of another library usable in `fit`, `evaluate`, and `predict`.

    A checkpoint holds the place in the source if the source, or its iterator, has the methods
    `get_state` and `set_state` (Grain), or `state_dict` and `load_state_dict` (Hugging Face,
    torchdata's `StatefulDataLoader`). Training then resumes with the batch that follows the last
    trained one, however far the source has been read ahead. Otherwise the batches before it are
    read again, with a warning: the results are equal only if the source yields them in the same
    order.

    `set_epoch(number)` is called before each pass if the source or its `sampler` has it, so that an
    order that differs between epochs can be a function of the seed and the epoch.

    With several workers, each of them reads all batches, and trains on its own rows. The source
    must therefore yield global batches in all of them, and no sampler may divide the examples.

    Args:
        source: an iterable of global batches, which each epoch iterates once: a Grain dataset or
            `DataLoader`, a PyTorch `DataLoader`, a batched Hugging Face `IterableDataset`, a
            batched WebDataset, or any iterable of arrays.
        select: function from a batch of the source to (x, y) or (x, y, sample weights). For
            sources that yield other structures, such as dicts of columns. Defaults to the batch.

    Returns:
        A `BatchSource`, which `fit` accepts as `x` and `validation_data`.

    Raises:
        TypeError: `source` is an iterator, which can be read only once, or no iterable, or `select`
            is no function.
        ValueError: the source's `sampler` yields only the examples of one of several processes.

    Example:

        loader = torch.utils.data.DataLoader(examples, batch_size=64)
        model.fit(kdist.data.from_batches(loader), epochs=2)
    """
    if not hasattr(source, "__iter__") or hasattr(source, "__next__"):
        raise TypeError(
            f"from_batches reads its source once per epoch, and {type(source).__name__} is not an "
            "iterable that can be read again. Pass a dataset or loader of batches, such as a "
            "torch.utils.data.DataLoader, or an object with __iter__; not an iterator of it"
        )
    if select is not None and not callable(select):
        raise TypeError(
            f"select must be a function of a batch, got {select!r}. Write "
            'from_batches(source, lambda batch: (batch["x"], batch["y"]))'
        )
    parts = getattr(getattr(source, "sampler", None), "num_replicas", 1)
    if parts > 1:
        raise ValueError(
            f"the sampler of {type(source).__name__} yields one of {parts} parts of the examples, "
            "and kdist divides each global batch itself. Pass "
            "DistributedSampler(..., num_replicas=1, rank=0), and batch by the global batch size"
        )
    return BatchSource(source, select)


class SourceReader:
    """Reads a source from a place on; created by `BatchSource.open_reader`.

    Attributes:
        length: number of batches in a pass; None if it is unknown or endless.
        is_endless: a pass does not end.
        batch_rows: number of rows of the first batches; None if they differ.
    """

    def __init__(self, source, select, number, place, keeps_places):
        self._source, self._select = source, select
        length = _length(source)
        self.is_endless = length is not None and length >= _MIN_ENDLESS_LENGTH
        self.length = None if self.is_endless else length
        if self.length and place.batches >= self.length:
            passes, batches = divmod(place.batches, self.length)
            place = SourcePlace(place.passes + passes, batches)
        self._number, self._start = number, place  # of the next pass
        self._keeps_places = keeps_places
        # Number of batches read -> place after them. The thread that reads ahead adds to it.
        self._places = {number: place}
        self._element_spec, self.batch_rows = self._look_ahead()
        # In the thread of the program, which gets errors of the source's state as they are.
        self._opened = self._open(place)

    def dataset(self) -> tf.data.Dataset:
        """Returns a dataset, each iterator of which is one pass; the first begins at the place."""
        dataset = tf.data.Dataset.from_generator(self._pass, output_signature=self._element_spec)
        return dataset.prefetch(_PREFETCH)

    def place_after(self, number: int) -> SourcePlace:
        """Returns the place after batch `number`, which has been read, for a checkpoint.

        Places of earlier batches are forgotten.
        """
        self.forget_before(number)
        return self._places[number]

    def forget_before(self, number: int):
        """Forgets the places before that of batch `number`, which has been trained."""
        for earlier in [each for each in tuple(self._places) if each < number]:
            del self._places[earlier]

    def _look_ahead(self):
        """Returns the specification of a batch, and its number of rows or None."""
        iterator, read_state = self._open(SourcePlace(self._start.passes))
        batches = [self._arrays(batch) for batch in itertools.islice(iterator, _COMPARED_BATCHES)]
        if not batches:
            raise ValueError(f"{type(self._source).__name__} has no batches; check its arguments")
        if self._keeps_places and read_state:
            encode_state(read_state())  # fails before the training begins
        rows = {keras.tree.flatten(batch)[0].shape[0] for batch in batches}
        spec = keras.tree.map_structure(_spec_of, *batches)
        return spec, rows.pop() if len(rows) == 1 else None

    def _arrays(self, batch):
        """Returns a batch as a tuple of arrays, or of dicts or tuples of them."""
        if self._select is not None:
            batch = self._select(batch)
        if isinstance(batch, list):
            batch = tuple(batch)
        if not isinstance(batch, tuple) or not 1 <= len(batch) <= 3:
            raise ValueError(
                f"a batch of {type(self._source).__name__} is a {type(batch).__name__}, not (x,), "
                "(x, y), or (x, y, sample weights). Pass a function that makes one of it: "
                'from_batches(source, lambda batch: (batch["x"], batch["y"]))'
            )
        arrays = _as_arrays(batch)
        if any(array.ndim == 0 for array in keras.tree.flatten(arrays)):
            raise ValueError(
                f"{type(self._source).__name__} yields a scalar, so that it seems to yield single "
                "examples. Batch it by the global batch size first, such as by .batch(64)"
            )
        return arrays

    def _set_epoch(self, number):
        for owner in (self._source, getattr(self._source, "sampler", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
                return

    def _pass(self):
        # The thread of the pass before may not have noticed yet that its pass is over.
        place, self._start = self._start, self._start.next_pass
        opened, self._opened = self._opened, None
        iterator, read_state = opened or self._open(place)
        batches = place.batches
        # Some sources yield more batches than their length.
        left = None if self.length is None else self.length - batches
        for batch in itertools.islice(iterator, left):
            batches, self._number = batches + 1, self._number + 1
            if self._keeps_places:
                state = read_state and encode_state(read_state())
                self._places[self._number] = SourcePlace(place.passes, batches, state)
            arrays = self._arrays(batch)
            self._check_types(arrays)
            yield arrays

    def _check_types(self, arrays):
        """Raises a ValueError for fractions where the first batches have integers.

        `tf.data` would truncate them.
        """
        specs = keras.tree.flatten(self._element_spec)
        for spec, array in zip(specs, keras.tree.flatten(arrays), strict=False):
            if spec.dtype.is_integer and array.dtype.kind in "fc":
                raise ValueError(
                    f"an array of a batch of {type(self._source).__name__} has the type "
                    f"{array.dtype}, and {spec.dtype.name} in the first batches. Use one type, "
                    "such as by .astype in `select`"
                )

    def _open(self, place):
        """Returns (iterator that begins at a place, function that returns its state or None)."""
        self._set_epoch(place.passes)
        read_state, set_state = _state_methods(self._source)
        if read_state:
            self._restore(set_state, place.state)
        iterator = iter(self._source)
        if not read_state:
            read_state, set_state = _state_methods(iterator)
            if read_state:
                self._restore(set_state, place.state)
        if place.batches and (place.state is None or not read_state):
            _logger.warning(
                "%s: its state there is not known, so %d batches are read again and dropped. The "
                "results are those of an uninterrupted run only if their order is the same",
                type(self._source).__name__,
                place.batches,
            )
            next(itertools.islice(iterator, place.batches, place.batches), None)
        return iterator, read_state

    def _restore(self, set_state, state):
        if state is None:
            return
        try:
            set_state(decode_state(state))
        except Exception as error:  # whatever a library raises
            raise ValueError(
                f"the checkpoint holds no state of {type(self._source).__name__}: {error!r}. "
                'Resume with the same source, or start a new run (resume="never")'
            ) from error


def _state_methods(owner):
    """Returns the methods that read and set the state of a source or iterator; None without."""
    for names in _PROTOCOLS:
        if all(hasattr(owner, name) for name in names):
            return tuple(getattr(owner, name) for name in names)
    return None, None


def _length(source):
    """Returns the number of batches in a pass; None if it is unknown."""
    try:
        return len(source)
    except TypeError:
        return None


def _as_arrays(part):
    if isinstance(part, Mapping):
        return {name: _as_arrays(value) for name, value in part.items()}
    if isinstance(part, tuple):
        return tuple(map(_as_arrays, part))
    try:
        array = np.asarray(part.cpu() if hasattr(part, "cpu") else part)
    except ValueError as error:
        raise ValueError(f"{_UNEQUAL_ROWS} ({error})") from error
    if array.dtype == object and array.size and not isinstance(array.flat[0], str | bytes):
        raise ValueError(f"{_UNEQUAL_ROWS} (the first is {array.flat[0]!r:.60})")
    # Python's floats are doubles, which Keras's layers do not expect.
    is_python = isinstance(part, list) and array.dtype == np.float64
    return array.astype(keras.config.floatx()) if is_python else array


def _spec_of(*arrays):
    """Returns the specification of arrays whose first axes, and others that differ, are open."""
    dimensions = zip(*(array.shape[1:] for array in arrays), strict=True)
    equal = [sizes[0] if len({*sizes}) == 1 else None for sizes in dimensions]
    return tf.TensorSpec([None, *equal], np.result_type(*arrays))


def encode_state(state: Any) -> Any:
    """Returns the state of a source in JSON types, without pickling it.

    Args:
        state: numbers, strings, bytes, None, NumPy arrays, and PyTorch tensors, in lists, tuples,
            and dicts.

    Raises:
        TypeError: the state has a value of another type.
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, bytes):
        return {"bytes": base64.b85encode(state).decode()}
    if isinstance(state, Mapping):
        pairs = [[encode_state(key), encode_state(value)] for key, value in state.items()]
        return {"dict": pairs}
    if isinstance(state, list):
        return [encode_state(value) for value in state]
    if isinstance(state, tuple):
        return {"tuple": [encode_state(value) for value in state]}
    if type(state).__module__ == "torch" and hasattr(state, "numpy"):
        return {"tensor": encode_state(state.cpu().numpy())}
    if isinstance(state, np.ndarray | np.generic) and state.dtype != object:
        array = np.asarray(state)
        return {"array": [array.dtype.str, list(array.shape), encode_state(array.tobytes())]}
    raise TypeError(
        f"the state of the data has a {type(state).__name__}, which a checkpoint does not hold. "
        "Return numbers, strings, bytes, or arrays"
    )


def decode_state(state: Any) -> Any:
    """Returns the argument of `encode_state`, given its result."""
    if isinstance(state, list):
        return [decode_state(value) for value in state]
    if not isinstance(state, dict):
        return state
    ((kind, value),) = state.items()
    if kind == "bytes":
        return base64.b85decode(value)
    if kind == "dict":
        return {decode_state(key): decode_state(part) for key, part in value}
    if kind == "tuple":
        return tuple(map(decode_state, value))
    if kind == "tensor":  # the source has imported torch
        return sys.modules["torch"].from_numpy(decode_state(value))
    dtype, shape, content = value
    return np.frombuffer(decode_state(content), dtype).reshape(shape).copy()
