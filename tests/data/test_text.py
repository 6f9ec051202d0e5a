"""Text as bytes: packing, and language models under several replicas."""

import math

import keras
import numpy as np
import pytest

import kdist
from kdist.data.text import SEPARATOR


def batches(pipeline):
    return list(pipeline.dataset().take(pipeline.steps_per_epoch).as_numpy_iterator())


def test_documents_are_packed_without_padding():
    source = kdist.data.from_text(["abc", b"de", "f"], length=4)
    test = kdist.data.Pipeline(source, kdist.Batch(2), training=False)
    ((tokens, labels, valid),) = batches(test)
    a, b, c, d, e, f = b"abcdef"
    stream = [a, b, c, SEPARATOR, d, e, SEPARATOR, f, SEPARATOR]
    np.testing.assert_array_equal(tokens, [stream[:4], stream[4:8]])
    np.testing.assert_array_equal(labels, [stream[1:5], stream[5:9]])
    assert valid.all()
    assert (source.num_examples, source.num_classes, test.image_shape) == (2, 257, (4,))


def test_a_directory_is_loaded_and_split_by_documents(tmp_path, caplog):
    for number in range(20):
        (tmp_path / f"{number:02d}.txt").write_text(chr(97 + number) * 50)
    (tmp_path / ".hidden").write_text("z" * 50)
    (tmp_path / "picture").write_bytes(b"\xff\x00\xfe")
    name = f"text:{tmp_path}"
    train, test = kdist.data.load(name, batch=kdist.Batch(2), sequence_length=10)
    assert "1 files that are not UTF-8" in caplog.text
    letters = [
        {chr(t) for x, *_ in batches(p) for t in np.unique(x) if t != SEPARATOR}
        for p in (train, test)
    ]
    assert len(letters[0]) == 18
    assert letters[0] | letters[1] == {chr(97 + number) for number in range(20)}
    with pytest.raises(ValueError, match="images"):
        kdist.data.load(name, batch=kdist.Batch(2), operations="random_flip()", sequence_length=9)
    with pytest.raises(ValueError, match="fill"):
        kdist.data.load(name, batch=kdist.Batch(2), sequence_length=1000)


def test_a_file_is_split_at_one_place(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 100)
    name = f"text:{tmp_path / 'a.txt'}"
    train, test = kdist.data.load(name, batch=kdist.Batch(1), sequence_length=20)
    assert {*np.unique(batches(train)[0][0])} == {ord("x")}
    assert {*np.unique(batches(test)[0][0])} == {ord("y")}


def test_what_is_no_text_is_refused(tmp_path):
    with pytest.raises(TypeError, match="list"):
        kdist.data.from_text("a text, not a list of texts")
    (tmp_path / "picture").write_bytes(b"\xff\x00\xfe" * 500)
    with pytest.raises(ValueError, match="UTF-8"):
        kdist.data.load(f"text:{tmp_path / 'picture'}", batch=kdist.Batch(1))


def language_model(**options):
    return kdist.models.transformer(
        (12,), 257, vocabulary_size=257, width=16, heads=2, depth=1, dropout=0.0, causal=True,
        separator=SEPARATOR, **options,
    )  # fmt: skip


def test_tokens_see_those_before_them_in_their_document():
    model = language_model()
    tokens = np.array([[1, 2, 3, SEPARATOR, 4, 5, 6, 7, SEPARATOR, 8, 9, 10]])
    whole = model.predict(tokens, verbose=0)[0]
    assert whole.shape == (12, 257)

    def depends_on(changed):
        other = tokens.copy()
        other[0, changed] = 42
        differs = np.abs(model.predict(other, verbose=0)[0] - whole).max(-1) > 1e-7
        return [int(place) for place in np.flatnonzero(differs)]

    assert depends_on(1) == [1, 2, 3]
    assert depends_on(5) == [5, 6, 7, 8]
    assert depends_on(11) == [11]


def trained(strategy, local, epochs=1):
    text = "the quick brown fox jumps over the lazy dog. " * 20
    source = kdist.data.from_text([text[i : i + 100] for i in range(0, len(text), 100)], 12)
    batch = kdist.Batch(local, strategy.num_replicas_in_sync)
    train = kdist.data.Pipeline(source, batch)
    test = kdist.data.Pipeline(source, batch, training=False)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = language_model()
        model.compile(
            keras.optimizers.Adam(0.01),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", kdist.models.Perplexity()],
        )
    logs = model.fit(train, validation_data=test, epochs=epochs, verbose=0).history
    return model, {name: values[-1] for name, values in logs.items()}


@pytest.mark.slow
def test_language_model_equals_one_device(mirrored):
    model, logs = trained(kdist.create_strategy("one_device"), 8)
    other, theirs = trained(mirrored, 4)
    assert theirs == pytest.approx(logs, rel=1e-4)
    for ours, expected in zip(other.weights, model.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), expected.numpy(), atol=2e-4)
    assert logs["perplexity"] == pytest.approx(math.exp(logs["loss"]), rel=1e-4)
    assert logs["val_perplexity"] == pytest.approx(math.exp(logs["val_loss"]), rel=1e-4)
    assert logs["val_loss"] < 0.8 * math.log(257)
