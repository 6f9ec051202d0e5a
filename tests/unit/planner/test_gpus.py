"""GPUs are found by the names that drivers give them."""

import pytest

from kdist.planner import find_gpu, known_gpus


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 80GB SXM"),
        ("NVIDIA H100 PCIe", "H100 80GB PCIe"),
        ("NVIDIA H200", "H200 141GB SXM"),
        ("Tesla V100-PCIE-16GB", "V100 PCIe"),
        ("Tesla K80", "K80 (one die, what a cloud 'K80' is)"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("K80 (board, 2 dies)", "K80 (board, 2 dies)"),
        ("Tesla K80 board", "K80 (board, 2 dies)"),
        ("P100 PCIe", "P100 PCIe"),
        ("Tesla P100-PCIE-12GB", "P100 PCIe"),
        ("NVIDIA H100-PCI-E", "H100 80GB PCIe"),
        ("RTX_3090", "RTX 3090"),
        ("A100_SXM4_40GB", "A100 40GB SXM"),
        ("nvidia_a100_80gb", "A100 80GB SXM"),
    ],
)
def test_a_driver_s_name_finds_its_row(name, row):
    assert find_gpu(name).name == row


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("A100 SXM4 40GB", "A100 40GB SXM"),
        ("A100 SXM4 80GB", "A100 80GB SXM"),
        ("H100 80GB SXM", "H100 80GB SXM"),
        ("K80 (one die)", "K80 (one die, what a cloud 'K80' is)"),
        ("P100", "P100 NVLink"),
        ("P100 SXM2 16GB", "P100 NVLink"),
        ("RTX 3090 24GB", "RTX 3090"),
        ("V100", "V100 SXM2 16/32GB"),
        ("V100 SXM 32GB", "V100 SXM2 16/32GB"),
        ("V100 SXM3 32GB (DGX-2H)", "V100 SXM2 16/32GB"),
    ],
)
def test_a_name_of_the_own_tables_finds_its_row(name, row):
    assert find_gpu(name).name == row


def test_a_row_s_own_name_finds_it():
    assert [find_gpu(gpu.name) for gpu in known_gpus()] == list(known_gpus())


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3090 Ti",
        "RTX_3090_Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 NVL",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "A100-1g.5gb",
        "Tesla V100-FHHL-16GB",
    ],
)
def test_another_board_of_a_known_name_has_no_row(name):
    assert find_gpu(name) is None


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


def test_memory_is_what_the_name_states():
    assert find_gpu("NVIDIA A100-SXM4-80GB").memory_gb == 80
    assert find_gpu("Tesla V100-SXM2-32GB").memory_gb == 32
    assert find_gpu("V100").memory_gb == 16
    assert find_gpu("P100-PCIE-12GB").memory_gb == 12
    assert find_gpu("V100 (32 GB memory)").memory_gb == 32


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("2x V100 (128 GB RAM)", 16),
        ("V100 (32 GB RAM)", 16),
        ("V100 32GB, 64 GB of host memory", 32),
        ("A100 (1024 GB)", 40),
    ],
)
def test_a_host_s_memory_is_not_the_board_s(name, memory):
    assert find_gpu(name).memory_gb == memory


def test_float16_on_tensor_cores():
    assert find_gpu("V100").fp16_tensor_cores
    assert not find_gpu("P100").fp16_tensor_cores
    assert not find_gpu("K80").fp16_tensor_cores
