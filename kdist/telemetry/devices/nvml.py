"""Measurements of the GPUs that this process may use, from NVIDIA's driver.

    gpus = NvmlSampler()
    for record in gpus.sample():
        record    # {"device": "gpu/0", "name": "NVIDIA H100", "utilization": 0.93, …}
    gpus.close()

Names of GPUs use the driver's index, which CUDA_VISIBLE_DEVICES does not change: with
CUDA_VISIBLE_DEVICES=2, TensorFlow's GPU:0 is gpu/2 here. The driver orders GPUs by PCI bus. So does
CUDA if all GPUs are equal, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import pynvml

from kdist.hardware import VISIBLE_DEVICES, find_gpus

# The second error, which is no NVMLError, means that the driver's library lacks a function.
_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
_ALL_LINKS = 0xFFFFFFFF
_MAX_LINKS = 36

_logger = logging.getLogger(__name__)


class NvmlSampler:
    """Samples the GPUs in CUDA_VISIBLE_DEVICES; all GPUs if it is not set.

    Without a working driver there are no GPUs and no messages. The constructor initializes the
    driver's library, which takes seconds on some machines.
    """

    def __init__(self):
        self._gpus = []
        self._is_open = False
        try:
            pynvml.nvmlInit()
            self._is_open = True
            self._gpus = _visible_gpus()
        except _ERRORS:
            self.close()

    def sample(self) -> Iterator[dict[str, Any]]:
        """Yields a record of each GPU, without measurements that the GPU does not provide.

        A record takes about 40 ms, during which the driver measures PCIe. It has `device`, `name`,
        `uuid`, and where available: `utilization` and `memory_utilization` (0 to 1: the share of
        the driver's last period, up to one second, in which a kernel ran, or memory was read or
        written), `memory_used_bytes` (of all processes, as `nvidia-smi` shows it),
        `memory_total_bytes`, `power_watts`, `temperature_celsius`, `sm_clock_mhz`, and `pcie_` and
        `nvlink_` with `sent_bytes_per_second` and `received_bytes_per_second`. Those of NVLink are
        means since the last sample, so that the first record has none.
        """
        for gpu in list(self._gpus):
            try:
                record = gpu.sample()
            except _Lost as error:
                self._gpus.remove(gpu)
                _logger.warning("%s (%s) is no longer sampled: %s", gpu.device, gpu.name, error)
            else:
                yield record

    def close(self):
        """Releases the driver's library; later samples are empty."""
        self._gpus = []
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(*_ERRORS):
                pynvml.nvmlShutdown()


class _Lost(Exception):
    """Raised for a GPU that has fallen off the bus or must be reset."""


def _visible_gpus():
    gpus = [_gpu_at(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if VISIBLE_DEVICES not in os.environ:
        return [gpu for gpu in gpus if gpu is not None]
    visible = []
    for name in find_gpus(os.environ):
        gpu = _find(name, gpus)
        if gpu is None:
            break  # CUDA ignores all GPUs after an invalid one
        if gpu.device not in [other.device for other in visible]:
            visible.append(gpu)
    return visible


def _gpu_at(index):
    """Returns None for GPUs that have fallen off the bus, which the driver still counts."""
    try:
        return _NvmlGpu(index, pynvml.nvmlDeviceGetHandleByIndex(index))
    except (*_ERRORS, _Lost):
        return None


def _find(name, gpus):
    """Returns the GPU with this index, UUID, or beginning of a UUID in CUDA_VISIBLE_DEVICES."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if name.startswith("MIG-"):
        return _mig_device(name)
    return next((gpu for gpu in gpus if gpu and (gpu.uuid or "").startswith(name)), None)


def _mig_device(uuid):
    """Returns a MIG device: one partition of a GPU."""
    try:
        partition = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(partition)
        return _NvmlGpu(pynvml.nvmlDeviceGetIndex(gpu), gpu, partition)
    except (*_ERRORS, _Lost):
        return None


class _NvmlGpu:
    """One GPU; only the memory of `partition` counts, if this process uses a MIG device."""

    def __init__(self, index, handle, partition=None):
        self.device = f"gpu/{index}"
        self._handle, self._partition = handle, partition or handle
        self.name = _read(pynvml.nvmlDeviceGetName, self._partition) or "a GPU"
        self.uuid = _read(pynvml.nvmlDeviceGetUUID, self._partition)
        self._has_nvlink = self._any_link_is_active()
        self._nvlink_before = self._nvlink_bytes()

    def sample(self):
        values = {
            "name": self.name,
            "uuid": self.uuid,
            **self._utilization(),
            **self._memory(),
            "power_watts": _scaled(_read(pynvml.nvmlDeviceGetPowerUsage, self._handle), 1e-3),
            "temperature_celsius": self._temperature(),
            "sm_clock_mhz": _read(
                pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM
            ),
            "pcie_sent_bytes_per_second": self._pcie(pynvml.NVML_PCIE_UTIL_TX_BYTES),
            "pcie_received_bytes_per_second": self._pcie(pynvml.NVML_PCIE_UTIL_RX_BYTES),
            **self._nvlink(),
        }
        known = {name: value for name, value in values.items() if value is not None}
        return {"device": self.device, **known}

    def _utilization(self):
        rates = _read(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        if rates is None:
            return {}
        return {"utilization": rates.gpu / 100, "memory_utilization": rates.memory / 100}

    def _memory(self):
        version = pynvml.nvmlMemory_v2
        memory = _read(pynvml.nvmlDeviceGetMemoryInfo, self._partition, version)
        if memory is None:
            # Drivers before R510 know only the first version, which also counts what they reserve.
            memory = _read(pynvml.nvmlDeviceGetMemoryInfo, self._partition)
        if memory is None:
            return {}
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}

    def _temperature(self):
        sensor = pynvml.NVML_TEMPERATURE_GPU
        celsius = _read(pynvml.nvmlDeviceGetTemperatureV, self._handle, sensor)
        if celsius is not None:
            return celsius
        # Drivers before R570 know only the older function.
        return _read(pynvml.nvmlDeviceGetTemperature, self._handle, sensor)

    def _pcie(self, direction):
        kilobytes = _read(pynvml.nvmlDeviceGetPcieThroughput, self._handle, direction)
        return _scaled(kilobytes, 1000)

    # NVLink: the driver counts the bytes on all links since it was loaded.

    def _any_link_is_active(self):
        """Returns whether the GPU uses NVLink; without it, some drivers still count 0 bytes."""
        for link in range(_MAX_LINKS):
            state = _read(pynvml.nvmlDeviceGetNvLinkState, self._handle, link)
            if state is None:
                return False  # no more links
            if state:
                return True
        return False

    def _nvlink_bytes(self):
        """Returns (time, bytes sent, bytes received); None without NVLink."""
        if not self._has_nvlink:
            return None
        fields = [
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]
        values = _read(pynvml.nvmlDeviceGetFieldValues, self._handle, fields)
        if values is None or any(value.nvmlReturn != pynvml.NVML_SUCCESS for value in values):
            return None
        return time.monotonic(), *(value.value.ullVal * 1024 for value in values)

    def _nvlink(self):
        before, now = self._nvlink_before, self._nvlink_bytes()
        self._nvlink_before = now
        if before is None or now is None:
            return {}
        seconds, sent, received = (b - a for a, b in zip(before, now, strict=True))
        if min(seconds, sent, received) < 0 or not seconds:
            return {}  # the driver has reset its counters
        return {
            "nvlink_sent_bytes_per_second": sent / seconds,
            "nvlink_received_bytes_per_second": received / seconds,
        }


def _read(function, *arguments):
    """Returns the driver's answer; None if it has none, as for much of a GPU that uses MIG.

    Raises _Lost if the GPU no longer works.
    """
    try:
        return function(*arguments)
    except _ERRORS as error:
        if getattr(error, "value", None) in _LOST:
            raise _Lost(str(error)) from error
        return None


def _scaled(value, factor):
    return None if value is None else value * factor
