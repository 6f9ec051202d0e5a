"""What NVIDIA's driver knows of the GPUs that this process may use.

    gpus = NvmlSampler()
    for record in gpus.sample():
        record    # {"device": "gpu/0", "name": "NVIDIA H100", "utilization": 0.93, …}
    gpus.close()

A GPU is named by the driver's index, which CUDA_VISIBLE_DEVICES does not change: TensorFlow's GPU:0
of a process that sees CUDA_VISIBLE_DEVICES=2 is gpu/2 here. The driver counts by the PCI bus; so
does CUDA on a machine of equal GPUs, and on others with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pynvml

from kdist.launch.shares import VISIBLE, find_gpus

# pynvml's second error is no NVMLError: the driver's library is older than what it is asked for.
_ERRORS = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)
_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)
_ALL_LINKS = 0xFFFFFFFF
_MOST_LINKS = 36


class NvmlSampler:
    """Reads each GPU that CUDA_VISIBLE_DEVICES lets this process see; without it, all.

    Without a driver, or with one that does not answer, there are none, and nothing is said. Making
    it starts the driver's library, which takes up to seconds on some machines.
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
        """A record of each GPU; what a GPU does not tell is no key of it.

        Each takes some 40 ms, over which the driver measures PCIe.

        Yields:
            Records with `device`, `name`, `uuid`, and of these what there is: `utilization` and
            `memory_utilization` (0 to 1: the share of the driver's last period, a second at most,
            in which a kernel ran, or memory was read or written), `memory_used_bytes` (of all
            processes and the driver), `memory_total_bytes`, `power_watts`, `temperature_celsius`,
            `sm_clock_mhz`, `pcie_…` and `nvlink_sent_bytes_per_second` and `…_received_…`.
            NVLink's are means since the last sample, so that the first has none.
        """
        for gpu in list(self._gpus):
            try:
                record = gpu.sample()
            except _Lost as error:
                self._gpus.remove(gpu)
                print(
                    f"kdist: {gpu.device} ({gpu.name}) is not sampled any more: {error}",
                    file=sys.stderr,
                )
            else:
                yield record

    def close(self):
        """Lets the driver's library go; there are no GPUs from then on."""
        self._gpus = []
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(*_ERRORS):
                pynvml.nvmlShutdown()


class _Lost(Exception):
    """The GPU has left the machine, or does not work before it is reset."""


def _visible_gpus():
    gpus = [_gpu_at(index) for index in range(pynvml.nvmlDeviceGetCount())]
    if VISIBLE not in os.environ:
        return [gpu for gpu in gpus if gpu is not None]
    visible = []
    for name in find_gpus(os.environ):
        gpu = _called(name, gpus)
        if gpu is None:
            break  # CUDA sees none from there on
        if gpu.device not in [other.device for other in visible]:
            visible.append(gpu)
    return visible


def _gpu_at(index):
    """None if it cannot be had: the driver counts GPUs that have fallen off the bus as well."""
    try:
        return _Gpu(index, pynvml.nvmlDeviceGetHandleByIndex(index))
    except (*_ERRORS, _Lost):
        return None


def _called(name, gpus):
    """The GPU that CUDA_VISIBLE_DEVICES calls by its index, its UUID or the beginning of one."""
    if name.isdecimal():
        return gpus[int(name)] if int(name) < len(gpus) else None
    if name.startswith("MIG-"):
        return _part_called(name)
    return next((gpu for gpu in gpus if gpu and (gpu.uuid or "").startswith(name)), None)


def _part_called(uuid):
    """A part of a GPU that is cut up (MIG)."""
    try:
        part = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        return _Gpu(pynvml.nvmlDeviceGetIndex(whole), whole, part)
    except (*_ERRORS, _Lost):
        return None


class _Gpu:
    """One GPU; `part` is this process's part of it, whose memory alone counts."""

    def __init__(self, index, handle, part=None):
        self.device = f"gpu/{index}"
        self._handle, self._part = handle, part or handle
        self.name = _read(pynvml.nvmlDeviceGetName, self._part) or "a GPU"
        self.uuid = _read(pynvml.nvmlDeviceGetUUID, self._part)
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
        memory = _read(pynvml.nvmlDeviceGetMemoryInfo, self._part)
        if memory is None:
            return {}
        return {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}

    def _temperature(self):
        sensor = pynvml.NVML_TEMPERATURE_GPU
        celsius = _read(pynvml.nvmlDeviceGetTemperatureV, self._handle, sensor)
        if celsius is not None:
            return celsius
        # The only one that drivers before R570 know.
        return _read(pynvml.nvmlDeviceGetTemperature, self._handle, sensor)

    def _pcie(self, direction):
        kilobytes = _read(pynvml.nvmlDeviceGetPcieThroughput, self._handle, direction)
        return _scaled(kilobytes, 1000)

    # NVLink: the driver counts what went over all links since it was loaded.

    def _any_link_is_active(self):
        """Where there is none, some drivers count 0 bytes instead of nothing."""
        for link in range(_MOST_LINKS):
            state = _read(pynvml.nvmlDeviceGetNvLinkState, self._handle, link)
            if state is None:
                return False  # there are no more of them
            if state:
                return True
        return False

    def _nvlink_bytes(self):
        """When, and the bytes sent and received until then; None without NVLink."""
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
            return {}  # the driver began to count anew
        return {
            "nvlink_sent_bytes_per_second": sent / seconds,
            "nvlink_received_bytes_per_second": received / seconds,
        }


def _read(function, *arguments):
    """What the driver answers; None if it does not, as for much of a GPU that is cut up (MIG).

    Raises:
        _Lost: the GPU does not answer anything any more.
    """
    try:
        return function(*arguments)
    except _ERRORS as error:
        if getattr(error, "value", None) in _LOST:
            raise _Lost(str(error)) from error
        return None


def _scaled(value, factor):
    return None if value is None else value * factor
