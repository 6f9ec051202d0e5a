"""pynvml and what is made of it, in processes that see GPUs which are not there."""

import pytest

from kdist.testing import python

SAMPLES = """
import json, os, sys, time
from kdist.telemetry.devices.nvml import NvmlSampler
sampler = NvmlSampler()
samples = []
for _ in range(int(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
    samples.append(list(sampler.sample()))
sampler.close()
assert list(sampler.sample()) == []
print(json.dumps({"samples": samples}))
"""


def samples(environment, number=1, pause=0.0, visible=None):
    """Returns the samples of a process with this environment."""
    code = "import os; os.environ.pop('CUDA_VISIBLE_DEVICES', None)\n"
    if visible is not None:
        code = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = {visible!r}\n"
    return python(code + SAMPLES, [str(number), str(pause)], environment)["samples"]


def test_units(fake_nvml):
    (records,) = samples(fake_nvml({"utilization": 93, "memory_utilization": 41}, 0.3))
    assert records[0] == {
        "device": "gpu/0",
        "name": "Fake GPU",
        "uuid": "GPU-00000000-fake",
        "utilization": 0.93,
        "memory_utilization": 0.41,
        "memory_used_bytes": 8 * 2**30,
        "memory_total_bytes": 40 * 2**30,
        "power_watts": pytest.approx(150.5),  # of milliwatts
        "temperature_celsius": 55,
        "sm_clock_mhz": 1410,
        "pcie_sent_bytes_per_second": 1_000_000,  # of KB/s
        "pcie_received_bytes_per_second": 2_000_000,
    }
    assert (records[1]["device"], records[1]["utilization"]) == ("gpu/1", 0.3)


def test_nvlink_rates_are_since_the_last_sample(fake_nvml):
    environment = fake_nvml({"links": 2, "nvlink_sent": 5000, "nvlink_received": 60000})
    for (record,) in samples(environment, 2, pause=0.5):
        assert record["nvlink_sent_bytes_per_second"] == pytest.approx(5000 * 1024, rel=0.1)
        assert record["nvlink_received_bytes_per_second"] == pytest.approx(60000 * 1024, rel=0.1)


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({"links": 0, "nvlink_sent": 0, "nvlink_received": 0}, id="no active link"),
        pytest.param({"links": 2}, id="not counted"),
        pytest.param({"nvlink_sent": 1, "nvlink_received": 1}, id="no links"),
    ],
)
def test_without_nvlink_there_are_no_rates(fake_nvml, answers):
    for (record,) in samples(fake_nvml(answers), 2, pause=0.05):
        assert not [key for key in record if key.startswith("nvlink")]


def test_unsupported_values_are_omitted(fake_nvml):
    nothing = {"power": None, "temperature": None, "sm_clock": None, "pcie_received": None}
    (((record),),) = samples(fake_nvml({**nothing, "memory_used": None, "utilization": None}))
    assert set(record) == {"device", "name", "uuid", "pcie_sent_bytes_per_second"}


def test_memory_that_the_driver_reserves_is_not_used(fake_nvml):
    # nvidia-smi shows it apart, too.
    ((record,),) = samples(fake_nvml({"memory_used": 700, "memory_reserved": 600}))
    assert record["memory_used_bytes"] == 700


def test_a_mig_gpu_has_no_utilization(fake_nvml):
    (records,) = samples(fake_nvml({"mig": 1, "utilization": 0}, 0.7))
    assert not {"utilization", "memory_utilization"} & set(records[0])
    assert records[0]["power_watts"] == pytest.approx(150.5)
    assert records[1]["utilization"] == 0.7


def test_a_mig_gpu_has_the_memory_of_the_visible_slice(fake_nvml):
    cut = {"mig": 1, "part_memory_used": 7, "part_memory_total": 9}
    ((record,),) = samples(fake_nvml(0.1, cut), visible="MIG-10000000-fake")
    assert (record["device"], record["name"]) == ("gpu/1", "Fake GPU MIG 1g.5gb")
    assert (record["memory_used_bytes"], record["memory_total_bytes"]) == (7, 9)
    assert record["uuid"] == "MIG-10000000-fake"
    assert "utilization" not in record


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("1", [1]),
        ("GPU-30000000-fake,GPU-1", [3, 1]),
        ("0,7,1", [0]),  # CUDA stops at what is not there
        ("1,1", [1]),
        ("", []),
        ("-1", []),
        ("MIG-30000000-fake", []),  # GPU 3 is not cut up
    ],
)
def test_only_visible_gpus_by_the_drivers_index(fake_nvml, visible, indices):
    environment = fake_nvml(0.1, 0.2, 0.3, 0.4)
    (records,) = samples(environment, visible=visible)
    assert [record["device"] for record in records] == [f"gpu/{index}" for index in indices]
    expected = [(index + 1) / 10 for index in indices]
    assert [record["utilization"] for record in records] == expected


def test_a_lost_gpu_is_logged_once_and_the_others_continue(fake_nvml):
    code = f"""
import contextlib, io, json
said = io.StringIO()
with contextlib.redirect_stderr(said):
    exec({SAMPLES.replace("print", "result = ")!r})
print(json.dumps([json.loads(result), said.getvalue()]))
"""
    environment = {**fake_nvml(0.1, {"lost_after": 2}, 0.3), "CUDA_VISIBLE_DEVICES": "0,1,2"}
    result, said = python(code, ["5", "0"], environment)
    devices = [[record["device"] for record in records] for records in result["samples"]]
    both, rest = ["gpu/0", "gpu/1", "gpu/2"], ["gpu/0", "gpu/2"]
    assert devices == [both, rest, rest, rest, rest]  # in the middle of the second sample
    assert said.count("gpu/1") == 1
    assert "GPU is lost" in said


def test_a_gpu_lost_before_the_start_does_not_hide_the_others(fake_nvml):
    (records,) = samples(fake_nvml(0.1, {"lost_after": 0}, 0.3))
    assert [record["device"] for record in records] == ["gpu/0", "gpu/2"]


def test_a_driver_of_another_version_has_no_gpus(fake_nvml):
    assert samples(fake_nvml(0.5, init=18)) == [[]]


def test_a_library_that_lacks_functions_has_no_gpus(fake_nvml, fake_nvml_library):
    """Very old libraries have other names of functions."""
    environment = fake_nvml(0.5, flags=("-DnvmlDeviceGetCount_v2=nvmlDeviceGetCount",))
    assert samples(environment) == [[]]


def test_an_old_driver_has_the_old_functions_of_temperature_and_memory(fake_nvml):
    ((record,),) = samples(fake_nvml(0.5, flags=("-DOLD_DRIVER",)))
    assert record["temperature_celsius"] == 55
    assert record["memory_used_bytes"] == 8 * 2**30


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    import pynvml

    from kdist.telemetry.devices.nvml import NvmlSampler

    def no_driver(flags):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", no_driver)
    assert list(NvmlSampler().sample()) == []


def test_values_are_read_for_each_sample(fake_nvml, script_nvml):
    environment = fake_nvml(0.5)
    assert samples(environment)[0][0]["utilization"] == 0.5
    script_nvml(environment, 0.25)
    assert samples(environment)[0][0]["utilization"] == 0.25
