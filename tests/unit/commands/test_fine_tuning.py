"""Layers that --freeze matches, and start weights of applications, without TensorFlow."""

import json
import re
import types
import zipfile

import pytest

from kdist.commands.training_run import applications, fine_tuning


class Layer:
    """Part of a Keras layer that `fine_tuning` uses."""

    def __init__(self, name, *parts, weights=("kernel",)):
        self.name, self.parts, self.weights = name, parts, weights
        self.trainable = True

    def _flatten_layers(self, include_self, recursive):
        assert not include_self
        assert not recursive
        return self.parts

    @property
    def trainable_weights(self):
        return [part.name for part in self.parts if part.trainable]


@pytest.fixture
def freeze(monkeypatch):
    """Returns a function that freezes layers of a model, and returns the names of the frozen."""
    model = Layer("model", Layer("base", Layer("conv1"), Layer("conv10")), Layer("logits"))

    def call(*texts):
        monkeypatch.setattr(fine_tuning, "FLAGS", types.SimpleNamespace(freeze=list(texts)))
        fine_tuning.freeze(model)
        layers = fine_tuning.named_layers(model)
        return [path for path, layer in layers.items() if not layer.trainable]

    return call


@pytest.mark.parametrize(
    ("texts", "frozen"),
    [
        (["base"], ["base"]),
        (["conv1"], ["base/conv1"]),
        (["base/conv.*"], ["base/conv1", "base/conv10"]),
        (["base,conv1"], ["base", "base/conv1"]),
        (["base", "conv10"], ["base", "base/conv10"]),
        (["(?!logits).*"], ["base", "base/conv1", "base/conv10"]),
        ([], []),
    ],
)
def test_patterns_match_whole_names_or_paths(freeze, texts, frozen):
    assert freeze(*texts) == frozen


def test_a_pattern_without_a_layer_is_refused_with_their_names(freeze):
    with pytest.raises(ValueError, match=re.escape("base, base/conv1, base/conv10, logits")):
        freeze("base", "con")


def test_something_must_be_left_to_train(freeze):
    with pytest.raises(ValueError, match="leaves nothing to train"):
        freeze(".*")


@pytest.mark.parametrize(
    ("names", "is_of_imagenet"),
    [
        (["pixels", "rescale", "predictions"], False),  # by this program, from new weights
        (["pixels", "conv1", "logits"], True),  # by this program, from ImageNet
        (["input_layer", "conv1", "predictions"], True),  # by Keras
    ],
)
def test_a_file_tells_how_its_pixels_are_scaled(tmp_path, names, is_of_imagenet):
    path = tmp_path / "a.keras"
    layers = [{"config": {"name": name}} for name in names]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", json.dumps({"config": {"layers": layers}}))
    assert applications._is_of_imagenet(str(path)) == is_of_imagenet
    assert applications._is_of_imagenet("a.weights.h5")
    assert not applications._is_of_imagenet("none")
