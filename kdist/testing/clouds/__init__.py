"""Stand-ins for clusters and clouds, as fixtures of pytest for tests of preemption.

    # conftest.py
    pytest_plugins = ["kdist.testing.clouds"]

    # test_preemption.py
    def test_it_resumes(slurm_cluster, tmp_path):
        handle = get_engine("slurm").submit(job)
        ...
        slurm_cluster.preempt()
        assert handle.follow(print) == 0

The fixtures are `slurm_cluster`, `kubernetes_cluster`, and `compute_engine`, whose machines are
network namespaces of this one, which need root, and `spot_vm`, which needs nothing. Where a program
is not installed, a test is skipped, with its name.
"""

import pathlib
import tempfile
from collections.abc import Iterator

import pytest

from kdist.launch.engines.gce import ComputeEngineJob
from kdist.testing.clouds.compute_engine import ComputeEngineStandIn
from kdist.testing.clouds.hosts import missing_for_hosts
from kdist.testing.clouds.kubernetes import KubernetesCluster
from kdist.testing.clouds.slurm import SlurmCluster, missing_for_slurm
from kdist.testing.metadata import MetadataServer, metadata_server

__all__ = ["ComputeEngineStandIn", "KubernetesCluster", "SlurmCluster"]


@pytest.fixture
def slurm_cluster(
    short_directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """Returns a cluster of three Slurm nodes, whose command lines are on the PATH.

    Example:

        def test_it_resumes(slurm_cluster):
            handle = kdist.launch.engines.get_engine("slurm").submit(job)
            slurm_cluster.preempt()
            assert handle.follow(print) == 0
    """
    _skip_if(missing_for_slurm())
    with SlurmCluster(short_directory, nodes=3) as cluster:
        _set(monkeypatch, cluster.environment)
        yield cluster


@pytest.fixture
def compute_engine(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ComputeEngineStandIn]:
    """Returns a stand-in for Compute Engine, whose `gcloud` is on the PATH.

    Example:

        def test_it_resumes(compute_engine):
            handle = kdist.launch.engines.get_engine("gce").submit(job)
            compute_engine.preempt("cats-worker-0")
            assert handle.follow(print) == 0
    """
    _skip_if(missing_for_hosts())
    directory = tmp_path / "compute-engine"
    directory.mkdir()
    monkeypatch.setattr(ComputeEngineJob, "poll_seconds", 1.0)
    with ComputeEngineStandIn(directory, installed=False) as service:
        _set(monkeypatch, service.environment)
        yield service


@pytest.fixture
def kubernetes_cluster(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[KubernetesCluster]:
    """Returns a stand-in for a Kubernetes cluster, whose `kubectl` is on the PATH.

    Example:

        def test_it_resumes(kubernetes_cluster, tmp_path):
            kubernetes_cluster.claims["runs"] = tmp_path
            handle = kdist.launch.engines.get_engine("kubernetes").submit(job)
            kubernetes_cluster.evict("cats-0")
            assert handle.follow(print) == 0
    """
    _skip_if(missing_for_hosts())
    directory = tmp_path / "kubernetes"
    directory.mkdir()
    with KubernetesCluster(directory) as cluster:
        _set(monkeypatch, cluster.environment)
        yield cluster


@pytest.fixture
def spot_vm(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """Returns the metadata server of a spot VM of Google, on which this process seems to run.

    Example:

        def test_it_saves(spot_vm):
            process = subprocess.Popen(["kdist", "train", "--run_dir=runs/cats"])
            spot_vm.announce()
            assert process.wait() == 143
    """
    with metadata_server("gce") as server:
        _set(monkeypatch, server.environment)
        yield server


@pytest.fixture
def short_directory() -> Iterator[pathlib.Path]:
    """Returns a directory with a short path, for sockets, whose names may not be long."""
    with tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory:
        yield pathlib.Path(directory)


def _skip_if(missing):
    if missing:
        pytest.skip(missing)


def _set(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
