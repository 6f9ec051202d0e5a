"""GPUs are found by the names that drivers give them."""

import pytest

from kdist.planner import find_gpu, known_gpus


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 40GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA H100 PCIe", "H100 80GB PCIe"),
        ("NVIDIA H200", "H200 141GB SXM"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla K80", "K80 (one die, what a cloud 'K80' is)"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_a_driver_s_name_finds_its_row(name, row):
    assert find_gpu(name).name == row


@pytest.mark.parametrize("name", ["NVIDIA L40S", "NVIDIA A10", "Radeon", ""])
def test_an_unknown_gpu_has_no_row(name):
    assert find_gpu(name) is None


def test_peaks_by_precision():
    a100, v100, t4 = (find_gpu(name) for name in ("A100-SXM4-40GB", "V100-SXM2-16GB", "Tesla T4"))
    assert a100.peak_flops("float32") == 156e12  # TF32
    assert a100.peak_flops("mixed_bfloat16") == 312e12
    assert v100.peak_flops("float32") == 15.7e12
    assert v100.peak_flops("mixed_float16") == 125e12
    assert t4.peak_flops("mixed_bfloat16") is None


def test_all_rows_have_a_peak():
    assert all(gpu.float32_tflops for gpu in known_gpus())
