"""Devices of this process."""

import pytest

from kdist.devices import find_devices
from tests.forked import python


def test_numbers_and_names():
    assert find_devices(2) == ("CPU:0", "CPU:1")
    assert find_devices(["/device:CPU:1", "cpu:0"]) == ("CPU:1", "CPU:0")
    assert find_devices() == ("CPU:0",)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (0, "at least 1 .*got 0"),
        (-2, "at least 1 .*got -2"),
        (257, "at most 256 .*got 257"),
        (["CPU:256"], "from 0 to 255"),
        (["GPU:0"], "no such device: GPU:0.*--num_devices=N"),
        (["CPU"], "'CPU' is not a device name; write it as 'GPU:0'"),
        (["CPU:0", "CPU:0"], "named twice: CPU:0"),
        ([], "list of devices is empty"),
    ],
)
def test_rejects(request_, message):
    with pytest.raises(ValueError, match=message):
        find_devices(request_)


def test_logical_gpus_of_one_gpu_are_devices(monkeypatch):
    import tensorflow as tf

    gpu = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    grown = []
    for name, value in {
        "list_physical_devices": lambda kind: [gpu],
        "get_logical_device_configuration": lambda device: [object()] * 4,
    }.items():
        monkeypatch.setattr(tf.config, name, value)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda *given: grown.append(given)
    )
    assert find_devices() == ("GPU:0", "GPU:1", "GPU:2", "GPU:3")
    assert find_devices(["GPU:3"]) == ("GPU:3",)
    # TensorFlow rejects memory growth of a GPU with a memory limit.
    assert grown == []


def test_more_devices_than_the_running_context_has():
    import tensorflow as tf

    tf.constant(0)
    with pytest.raises(RuntimeError, match="already started with 4.*restart the kernel.*request 4"):
        find_devices(5)


def test_a_new_process_gets_the_requested_devices():
    code = """
import json, tensorflow as tf
from kdist.devices import find_devices
names = find_devices(3)
print(json.dumps([names, len(tf.config.list_logical_devices("CPU"))]))
"""
    assert python(code) == [["CPU:0", "CPU:1", "CPU:2"], 3]


@pytest.mark.parametrize(
    ("before", "threads"),
    [
        ("", 1),
        ("tf.config.threading.set_intra_op_parallelism_threads(3)", 3),
        ("os.environ['TF_NUM_INTRAOP_THREADS'] = '3'", 0),
    ],
)
def test_as_many_devices_as_cores_compute_with_one_thread_each(before, threads):
    code = f"""
import json, os, tensorflow as tf
from kdist import devices
{before}
devices.find_devices(devices.count_cores(os.environ))
print(json.dumps(tf.config.threading.get_intra_op_parallelism_threads()))
"""
    assert python(code) == threads


def test_fewer_devices_than_cores_share_all_of_them():
    code = """
import json, tensorflow as tf
from kdist import devices
devices.count_cores = lambda environment: 3
devices.find_devices(2)
print(json.dumps(tf.config.threading.get_intra_op_parallelism_threads()))
"""
    assert python(code) == 0


@pytest.mark.parametrize(("first", "threads"), [("", 3), ("tf.zeros(1)", 0)])
def test_tuned_threads_are_set_before_tensorflow_starts(first, threads):
    code = f"""
import json, logging, tensorflow as tf, kdist
messages = []
logging.getLogger("kdist.devices").addFilter(lambda each: messages.append(each.getMessage()))
{first}
kdist.create_strategy(kdist.tuning.Tuned({{"intra_op_threads": 3}}))
print(json.dumps([tf.config.threading.get_intra_op_parallelism_threads(), messages]))
"""
    found, messages = python(code)
    assert found == threads
    assert ("intra_op_threads=3 has no effect" in "".join(messages)) == bool(first)
