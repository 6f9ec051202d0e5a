"""Simulated GPUs: a library that replaces the driver's, and its answers."""

import os
import pathlib
import shutil
import subprocess

import pytest

# Default values of a GPU, in the driver's own units (fake_nvml.c).
A_GPU = {
    "utilization": 50,
    "memory_utilization": 20,
    "memory_used": 8 * 2**30,
    "memory_total": 40 * 2**30,
    "power": 150500,
    "temperature": 55,
    "sm_clock": 1410,
    "pcie_sent": 1000,
    "pcie_received": 2000,
}


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory):
    """Function that builds libnvidia-ml.so.1 with compiler flags; returns its directory."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    built = {}

    def build(*flags):
        if flags not in built:
            built[flags] = tmp_path_factory.mktemp("nvml")
            source = pathlib.Path(__file__).with_name("fake_nvml.c")
            library = built[flags] / "libnvidia-ml.so.1"
            command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", *flags]
            subprocess.run([*command, source, "-o", library], check=True)
        return built[flags]

    return build


@pytest.fixture
def fake_nvml(fake_nvml_library, tmp_path):
    """Function that returns the environment of a process with simulated GPUs.

        environment = fake_nvml(0.9, 0.9, 0.3)                  # three, by utilization
        environment = fake_nvml({"utilization": 90, "mig": 1})  # one; the keys of fake_nvml.c
        script_nvml(environment, 0.9, 0.9, 0.8)                 # later values

    A value of None is reported as not supported. `of_library` are keys of the library (`init=18`),
    `flags` those of the compiler.
    """

    def fake(*gpus, flags=(), **of_library):
        directory = str(fake_nvml_library(*flags))
        path = os.pathsep.join(filter(None, [directory, os.environ.get("LD_LIBRARY_PATH")]))
        environment = {"LD_LIBRARY_PATH": path, "FAKE_NVML": str(tmp_path / "fake_nvml")}
        write_script(environment, *gpus, **of_library)
        return environment

    return fake


@pytest.fixture
def script_nvml():
    """`write_script`, for later values of the GPUs."""
    return write_script


def write_script(environment, *gpus, **of_library):
    """Sets the values of the GPUs of `environment`."""
    lines = [f"{key}={value}" for key, value in {"gpus": len(gpus), **of_library}.items()]
    for index, gpu in enumerate(gpus):
        answers = gpu if isinstance(gpu, dict) else {"utilization": round(100 * gpu)}
        lines += [
            f"{index} {key}={value}"
            for key, value in {**A_GPU, **answers}.items()
            if value is not None
        ]
    path = pathlib.Path(environment["FAKE_NVML"])
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines) + "\n")
    new.replace(path)  # atomically: the library reads it at any time
