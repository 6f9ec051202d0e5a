import numpy as np
import pytest

from kdist.telemetry.samples import Samples, decoded

X = np.zeros((2, 3), "float32")


@pytest.mark.parametrize(
    ("y", "outputs", "expected"),
    [
        ([2, 0], [[0.1, 0.2, 0.7], [0.3, 0.6, 0.1]], [("c", "c", 0.7), ("a", "b", 0.6)]),
        (np.eye(3)[[2, 0]], [[0.1, 0.2, 0.7], [0, 1, 0]], [("c", "c", 0.7), ("a", "b", 1.0)]),
        ([[2], [0]], np.log([[1, 2, 7], [3, 6, 1]]), [("c", "c", 0.7), ("a", "b", 0.6)]),  # logits
        ([1, 0], [[0.8], [0.7]], [("b", "b", 0.8), ("a", "b", 0.7)]),
        ([1, 0], [[np.log(4)], [-np.log(4)]], [("b", "b", 0.8), ("a", "a", 0.8)]),
        ([1, 4], [[1.5], [3.5]], [(1, 1.5, None), (4, 3.5, None)]),
        ([[0.5, 1], [2, 3]], [[1, 1], [2, 2]], [([0.5, 1], [1, 1], None), ([2, 3], [2, 2], None)]),
    ],
)
def test_rows_of_classes_and_values(y, outputs, expected):
    rows = Samples(X, y, ["a", "b", "c"]).rows(np.array(outputs, float))
    assert all(row["input"] == [0, 0, 0] for row in rows)
    for row, (label, prediction, probability) in zip(rows, expected, strict=True):
        assert (row["label"], row["prediction"]) == (label, prediction)
        assert row["probability"] == (probability and pytest.approx(probability))


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (np.array([0, 200], "uint8"), [0, 200]),
        (np.array([0, 200.0]), [0, 200]),
        (np.array([0, 0.2]), [0, 51]),
        (np.array([-1, 1.0]), [0, 255]),
    ],
)
def test_images_become_bytes(images, expected):
    image = Samples(images.reshape(1, 1, 2, 1), [0]).rows(np.eye(2)[:1])[0]["image"]
    assert decoded(image)[..., 0].tolist() == [expected]


def test_large_images_are_thinned():
    image = Samples(np.zeros((1, 1000, 500, 3)), [0]).rows(np.eye(2)[:1])[0]["image"]
    assert decoded(image).shape == (250, 125, 3)


@pytest.mark.parametrize(
    ("x", "y", "refused"),
    [
        (X, [0], "1 labels"),
        (np.zeros((101, 2)), np.zeros(101), "1 to 100"),
        (np.zeros((2, 17)), [0, 1], "16 numbers"),
        (np.zeros((2, 8, 8, 2)), [0, 1], "channels"),
    ],
)
def test_examples_that_no_table_can_show_are_refused(x, y, refused):
    with pytest.raises(ValueError, match=refused):
        Samples(x, y)


@pytest.mark.parametrize("outputs", [{"a": X}, [X, X], np.zeros((2, 3, 3)), np.zeros((3, 2))])
def test_outputs_that_no_table_can_show_are_refused(outputs):
    with pytest.raises(ValueError, match="one output"):
        Samples(X, [0, 1]).rows(outputs)
