"""Workloads known by name: names, contents, and sizes."""

import csv
import gzip
import pathlib

import pytest

from kdist.planner import Workload
from kdist.planner.workload.layers import WORKLOADS_DIRECTORY, known_workload, known_workloads

ROOT = pathlib.Path(__file__).parents[3]
SCALING = ROOT / "benchmarks" / "planner_validation" / "tables" / "scaling.csv"


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        ("resnet50", "resnet50"),
        ("ResNet-50", "resnet50"),
        ("ResNet-50 v1.5", "resnet50_v1_5"),
        ("mobilenet_v2", "mobilenetv2"),
        ("MobileNetV2 fine-tune 224px", "mobilenetv2_fine_tune"),
        ("BERT-large SQuAD fine-tune seq384", "bert_large_seq384"),
        ("BERT-large pretrain seq128", "bert_large_seq128"),
        ("EfficientDet-D0 512px", "efficientdet_d0"),
        ("Mask R-CNN R50", "mask_rcnn_r50"),
        ("ResNet-50 v1", "resnet50"),
    ],
)
def test_names_are_normalized(said, stored):
    assert known_workload(said).name == stored


def test_pixels_in_a_name_make_images_of_that_size():
    small, large = known_workload("ResNet-50"), known_workload("ResNet-50 448px")
    assert large.input_shape == (448, 448, 3)
    assert large.forward_flops == pytest.approx(4 * small.forward_flops, rel=0.01)
    with pytest.raises(ValueError, match="depends on"):
        known_workload("VGG16 448px")


def test_unknown_name_error_suggests_the_closest():
    with pytest.raises(ValueError, match=r"known by the name 'resnet51'; did you mean .*resnet50"):
        known_workload("resnet51")
    with pytest.raises(ValueError, match=r"'zzzz'\. There are alexnet, "):
        known_workload("zzzz")


def test_every_stored_workload_is_complete():
    for name in known_workloads():
        work = known_workload(name)
        assert work.name == name
        assert work.training_flops > 1.5 * work.forward_flops > 0
        # The first gives the axes of a sum; the second is said to be left out of Mask R-CNN.
        assert set(work.uncounted) <= {"BroadcastGradientArgs", "NonMaxSuppressionV3"}


@pytest.mark.parametrize(
    ("name", "parameters", "forward_gflops"),
    [  # from the papers, a multiplication and an addition as two
        ("alexnet", 61.1e6, 1.43),
        ("resnet50_v1_5", 25.6e6, 8.2),
        ("resnext101_32x4d", 44.2e6, 16.0),
        ("efficientdet_d0", 3.9e6, 5.0),
        ("unet_medical", 31.0e6, 300),
        ("mask_rcnn_r50", 44.4e6, 540),
        ("bert_large_seq384", 335e6, 246),
        ("electra_base_seq384", 109e6, 71),
    ],
)
def test_benchmark_models_are_as_large_as_published(name, parameters, forward_gflops):
    work = known_workload(name)
    assert work.parameters == pytest.approx(parameters, rel=0.1)
    assert work.forward_flops / 1e9 == pytest.approx(forward_gflops, rel=0.12)


def test_every_model_of_the_published_rates_is_known():
    with SCALING.open(newline="") as lines:
        for name in sorted({row["model"] for row in csv.DictReader(lines)}):
            assert known_workload(name).training_flops > 0, name


def stored(path):
    return Workload.from_json(gzip.decompress(path.read_bytes()).decode())


def test_files_stay_small():
    assert sum(path.stat().st_size for path in WORKLOADS_DIRECTORY.iterdir()) < 1.5e6
