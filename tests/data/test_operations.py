import numpy as np
import pytest
import tensorflow as tf

from kdist.data.operations import as_operations, central_crop, random_crop, random_flip, resize

IMAGE = tf.constant(np.arange(36, dtype="uint8").reshape(6, 6, 1))


def test_resize_rounds_to_whole_pixels():
    half = resize(3, 3).apply(IMAGE)
    assert half.dtype == tf.uint8
    assert half.shape == (3, 3, 1)
    flat = resize(9, 4).apply(tf.fill([6, 6, 3], tf.constant(77, tf.uint8)))
    assert np.unique(flat.numpy()).tolist() == [77]
    assert resize(3, 3).apply(tf.cast(IMAGE, tf.float32)).dtype == tf.float32


def test_central_crop():
    assert np.array_equal(central_crop(2, 4).apply(IMAGE), IMAGE[2:4, 1:5])


def test_random_crop_is_a_part_of_the_padded_image():
    operation = random_crop(6, 6, padding=2)
    crops = [operation.apply(IMAGE, (0, seed)).numpy() for seed in range(20)]
    assert all(crop.shape == (6, 6, 1) for crop in crops)
    assert len({crop.tobytes() for crop in crops}) > 5
    padded = np.pad(IMAGE.numpy(), ((2, 2), (2, 2), (0, 0)))
    parts = {padded[i : i + 6, j : j + 6].tobytes() for i in range(5) for j in range(5)}
    assert {crop.tobytes() for crop in crops} <= parts


def test_random_flip_flips_about_half():
    flipped = [
        np.array_equal(random_flip().apply(IMAGE, (0, seed)), IMAGE[:, ::-1]) for seed in range(64)
    ]
    assert 16 < sum(flipped) < 48


def test_operations_from_text():
    operations = as_operations("resize(8, width=4) | random_crop(4,4,padding=1)|random_flip()")
    assert [op.name for op in operations] == [
        "resize(8, 4)",
        "random_crop(4, 4, 1)",
        "random_flip()",
    ]
    assert [op.is_random for op in operations] == [False, True, True]
    assert as_operations("") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resise(3, 3)", "not an operation.*resize"),
        ("resize", "not an operation"),
        ("resize(3", "not an operation"),
        ("__import__('os').system('true')", "not an operation"),
        ("resize(3)", "missing 1 required positional argument: 'width'"),
        ("resize(0, 3)", "height=0"),
        ("resize(2.5, 3)", "pixels, got 2.5"),
        ("resize(open('x'), 3)", "malformed"),
        ("random_crop(2, 2, -1)", "padding=-1"),
    ],
)
def test_refuses(text, expected):
    with pytest.raises(ValueError, match=expected):
        as_operations(text)
