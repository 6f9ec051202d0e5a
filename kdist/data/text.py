"""Text as bytes: documents that are packed into sequences for next-token prediction.

The tokens are the 256 bytes of UTF-8 and a separator, which follows each document. The documents
are put one after another and cut into sequences of equal length, so no token is padding. The label
of each token is the one after it.
"""

import logging
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from kdist.data.arrays import ArraySource
from kdist.data.names import TEXT_PREFIX

_logger = logging.getLogger(__name__)

# The token after each document; the others are the bytes.
SEPARATOR = 256
NUM_TOKENS = 257
_TEST_FRACTION = 0.1


class TextSource(ArraySource):
    """Sequences of tokens in memory; created by `from_text`.

    Attributes:
        separator: the token after each document.
    """

    separator = SEPARATOR

    def __init__(self, sequences):
        super().__init__(sequences, sequences, NUM_TOKENS)
        self.image_shape = (sequences.shape[1] - 1,)

    def batch(self, indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the tokens (B, T) and labels (B, T) of the sequences with these numbers."""
        (sequences,) = self.tensors()
        chosen = tf.cast(tf.gather(sequences, indices), tf.int32)
        return chosen[..., :-1], chosen[..., 1:]

    def select(self, indices):
        return TextSource(self.images[indices])

    def arrays(self):
        return (self.images,)


def from_text(documents: Sequence[str | bytes], length: int = 128) -> TextSource:
    """Creates a source of token sequences from documents, for `kdist.models.transformer`.

    Args:
        documents: texts, which are encoded in UTF-8, or bytes.
        length: number of tokens per sequence. The tokens at the end that do not fill a sequence
            are dropped. Defaults to 128.

    Returns:
        A `kdist.data.Source` of tokens (T,) and labels (T,), which are the tokens after them.

    Raises:
        TypeError: `documents` is a single text.
        ValueError: `length` is less than 1, or the documents have fewer tokens than a sequence.

    Example:

        source = kdist.data.from_text(["To be, or not to be", "that is the question"], length=16)
        train = kdist.data.Pipeline(source, kdist.Batch(2))
    """
    if isinstance(documents, str | bytes):
        raise TypeError("from_text needs a list of documents, got a single one: write [document]")
    if length < 1:
        raise ValueError(f"length={length} must be at least 1 token")
    parts = []
    for document in documents:
        content = document.encode() if isinstance(document, str) else document
        parts += [np.frombuffer(content, "uint8").astype("uint16"), np.array([SEPARATOR], "uint16")]
    tokens = np.concatenate(parts) if parts else np.empty(0, "uint16")
    count = (len(tokens) - 1) // length
    if count < 1:
        raise ValueError(
            f"{len(tokens)} tokens do not fill a sequence of {length} and its last label; pass "
            "more text or a smaller length"
        )
    # The last label of a sequence is the first token of the next one.
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return TextSource(windows[::length][:count].copy())


def load_text(name: str, length: int, seed: int) -> tuple[TextSource, TextSource]:
    """Returns the training and test source of `text:PATH`, a text file or a directory of them.

    Each file is a document. Of a directory, a tenth of the documents are for testing, and of a
    single file the last part. Hidden files, and those that are not UTF-8, are skipped.

    Raises:
        FileNotFoundError: the path does not exist.
        ValueError: there are no text files, or too few to fill a sequence for training and one
            for testing.
    """
    root = pathlib.Path(name.removeprefix(TEXT_PREFIX))
    documents = _documents(root)
    if len(documents) == 1:
        (text,) = documents
        cut = round(len(text) * (1 - _TEST_FRACTION))
        parts = [[text[:cut]], [text[cut:]]]
    else:
        order = np.random.default_rng(seed).permutation(len(documents))
        count = max(1, round(len(documents) * _TEST_FRACTION))
        chosen = np.sort(order[count:]), np.sort(order[:count])
        parts = [[documents[number] for number in numbers] for numbers in chosen]
    try:
        train, test = (from_text(part, length) for part in parts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return train, test


def _documents(root):
    """Returns the contents of a text file, or of those below a directory, ordered by path."""
    documents, skipped = [], 0
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        if not path.is_file() or any(part[0] == "." for part in path.relative_to(root).parts):
            continue
        content = path.read_bytes()
        if not content:
            continue
        if _is_text(content):
            documents.append(content)
        else:
            skipped += 1
    if skipped:
        _logger.warning("%s: %d files that are not UTF-8 text are ignored", root, skipped)
    if not documents:
        raise ValueError(f"{os.fspath(root)} is or contains no text in UTF-8")
    return documents


def _is_text(content):
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
