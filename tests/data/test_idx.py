"""Errors in MNIST's files."""

import gzip
import struct

import numpy as np
import pytest

from kdist.data.arrays import load_idx, read_idx


def write_idx(path, array, code=8):
    path.write_bytes(
        struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape) + array.tobytes()
    )


def write_parts(directory, train_labels, test_labels):
    for part, labels in (("train", train_labels), ("t10k", test_labels)):
        write_idx(directory / f"{part}-images-idx3-ubyte", np.zeros((len(labels), 5, 4), "uint8"))
        write_idx(directory / f"{part}-labels-idx1-ubyte", np.array(labels, "uint8"))


def test_both_parts_have_the_classes_of_either(tmp_path):
    write_parts(tmp_path, [0, 1, 2, 3], [0, 1])
    assert [source.num_classes for source in load_idx(tmp_path)] == [4, 4]
    write_parts(tmp_path, [0, 1], [0, 5])
    assert [source.num_classes for source in load_idx(tmp_path)] == [6, 6]


def test_a_label_out_of_range_is_named(tmp_path):
    write_parts(tmp_path, [0, 1, 7], [0, 1])
    with pytest.raises(ValueError, match=f"{tmp_path}.*example 2 has the label 7.*0 to 1"):
        load_idx(tmp_path, ("a", "b"))


def test_mixed_up_files_are_named(tmp_path):
    write_parts(tmp_path, [0, 1], [0, 1])
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros(2, "uint8"))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte holds .* 1 axes instead of 3"):
        load_idx(tmp_path)


def test_parts_of_different_length_are_named(tmp_path):
    write_parts(tmp_path, [0, 1], [0, 1])
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(3, "uint8"))
    with pytest.raises(ValueError, match=f"{tmp_path}.*2 images and 3 labels"):
        load_idx(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    write_parts(tmp_path, [0, 1], [0, 1])
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte or"):
        load_idx(tmp_path)


@pytest.mark.parametrize("at", [12, 40, 200])
def test_a_damaged_gz_file_is_named(tmp_path, at):
    path = tmp_path / "images.gz"
    content = bytearray(gzip.compress(np.random.default_rng(0).bytes(300) * 5))
    content[at : at + 9] = b"\xff" * 9
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="images.gz cannot be read.*download"):
        read_idx(path)


def test_wider_numbers_are_big_endian(tmp_path):
    write_idx(tmp_path / "wide", np.array([[1, 2], [300, 70_000]], ">i4"), code=12)
    assert read_idx(tmp_path / "wide").tolist() == [[1, 2], [300, 70_000]]
