"""Texts that kdist reads from outside, changed at random: each is read, or refused by a ValueError.

KDIST_FUZZ_CASES=2000 tries more changes of each text.
"""

import contextlib
import copy
import json
import os
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import kdist
from kdist.checkpoint import CheckpointFiles
from kdist.cluster import Cluster
from kdist.cluster.slurm import expand_hosts, expand_task_counts
from kdist.data.operations import as_operations
from kdist.parallel.placement.files import read_placement
from kdist.planner import resolve_workload
from kdist.planner.measurements import Calibration
from kdist.planner.plans import Plan
from kdist.planner.workload.layers import Workload
from kdist.report.runs import parse_prices
from kdist.run_directory import RunDirectory
from kdist.serving.core.model_directory import needed_devices

ROOT = pathlib.Path(__file__).parents[2]
CASES = int(os.environ.get("KDIST_FUZZ_CASES", 60))
SETTINGS = hypothesis.settings(
    max_examples=CASES,
    deadline=None,
    derandomize="KDIST_FUZZ_CASES" not in os.environ,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)

NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**63, -(10**40), 0.5, 1e308, float("nan"), float("inf")]),
)
LEAVES = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=9), st.sampled_from(["1", "worker", "a:1"])
)
VALUES = st.recursive(
    LEAVES,
    lambda each: (
        st.lists(each, max_size=4) | st.dictionaries(st.text(max_size=5), each, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def changed(draw, document):
    """Draws a JSON text: the document with up to three parts replaced or left out, or damaged."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(0, 3))):
        place, part, depth = None, document, draw(st.integers(0, 5))
        while depth and isinstance(part, dict | list) and part:
            keys = sorted(part) if isinstance(part, dict) else range(len(part))
            place = part, draw(st.sampled_from(list(keys)))
            part, depth = part[place[1]], depth - 1
        if place is None:
            document = draw(VALUES)
        elif draw(st.booleans()):
            place[0][place[1]] = draw(VALUES)
        else:
            place[0].pop(place[1])
    text = json.dumps(document)
    kind = draw(st.integers(0, 9))
    if kind == 0:
        text = text[: draw(st.integers(0, len(text)))]
    elif kind == 1:
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=3)) + text[at:]
    elif kind == 2 and draw(st.booleans()):
        text = "[" * 100_000
    return text


CLUSTER = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:2"], "ps": ["d:1"]},
    "task": {"type": "worker", "index": 1},
}
CALIBRATION = {
    "machine": "cpu",
    "replicas": 2,
    "precision": "float32",
    "seconds_per": {"step": 0.1, "flop": 1e-12},
    "probe_error": 0.1,
    "max_probe_error": 0.2,
}
METADATA = {"name": "m", "version": 1, "devices": ["CPU:0", "CPU:1"], "inputs": {}, "outputs": {}}
CONFIG = {"strategy": "mirrored", "seed": 1}
PLACEMENT = {"layer.*": "stage(0)", "dense": "branch(1)", "a": ["CPU:0"]}


def of_file(read, name):
    """Returns a reader of a text that writes it to a file of this name first."""

    def reader(text, directory):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        return read(directory / name)

    return reader


PLAN = json.loads((ROOT / "tests/unit/planner/plan_0_1.json").read_text())
WORKLOAD = json.loads(resolve_workload("lenet").to_json())


def devices(path):
    return needed_devices(path.parents[1])


def run_config(path):
    return RunDirectory(path.parent).check_same_config({"seed": 1}, ["seed"])


READERS = {
    "TF_CONFIG": (CLUSTER, lambda text, _: Cluster.from_tf_config(text)),
    "calibration": (CALIBRATION, lambda text, _: Calibration.from_json(text)),
    "workload": (WORKLOAD, lambda text, _: Workload.from_json(text)),
    "plan": (PLAN, of_file(Plan.load, "plan.json")),
    "metadata of a model": (METADATA, of_file(devices, "assets.extra/kdist.json")),
    "placement": (PLACEMENT, of_file(read_placement, "placement.json")),
    "configuration of a run": (CONFIG, of_file(run_config, "config.json")),
}


def check_all(texts, read):
    """Checks that each text is read, or refused by a ValueError."""

    @SETTINGS
    @hypothesis.given(texts)
    def check(text):
        with contextlib.suppress(ValueError):
            read(text)

    check()


@pytest.mark.parametrize("kind", READERS)
def test_documents(kind, tmp_path):
    document, read = READERS[kind]
    check_all(changed(document), lambda text: read(text, tmp_path))


CHECKPOINT_FILES = ("checksums.json", "state.json")


@pytest.mark.parametrize("name", CHECKPOINT_FILES)
def test_a_damaged_checkpoint_passes_to_the_one_before(name, tmp_path):
    files = CheckpointFiles(tmp_path)
    files.write(1, {"w": np.ones(3)}, {"position": 1})
    newest = files.write(2, {"w": np.zeros(3)}, {"position": 2})
    contents = {name: (newest / name).read_bytes() for name in CHECKPOINT_FILES}

    def read(text):
        (newest / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        # Checksums are of bytes; the checksums themselves may be written in other ways.
        is_intact = (newest / name).read_bytes() == contents[name]
        if name == "checksums.json":
            with contextlib.suppress(ValueError, RecursionError):
                is_intact = json.loads(text) == json.loads(contents[name])
        assert CheckpointFiles(tmp_path).newest().step == (2 if is_intact else 1)

    check_all(changed(json.loads(contents[name])), read)


def words(*parts):
    """Draws texts of these parts and of others."""
    part = st.one_of(st.sampled_from(parts), st.text(max_size=3), NUMBERS.map(str))
    return st.lists(part, max_size=12).map("".join)


LINES = {
    "layout": (
        words("data", "pipeline", "tensor", "branch", "micro_batches", "recompute", "=", ",", "2"),
        kdist.Layout.parse,
    ),
    "image operations": (
        words("resize", "random_flip", "crop", "(", ")", "|", ",", "160", "[" * 500, "height="),
        as_operations,
    ),
    "prices": (st.lists(words("a", "=", "2.5", "-")), parse_prices),
    "hosts of Slurm": (words("n", "[", "1-3", "]", ",", "-", "08"), expand_hosts),
    "hosts of Kubernetes": (
        words("cats-0", ".cats", ":2222", ",", " "),
        lambda text: Cluster.resolve({"JOB_COMPLETION_INDEX": "1", "KDIST_HOSTS": text}),
    ),
    "hosts of SageMaker": (
        words("[", "]", '"algo-1"', '"algo-2"', ",", "5"),
        lambda text: Cluster.resolve({"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": text}),
    ),
    "counts of Slurm": (words("2", "(x3)", ",", "(", "x"), expand_task_counts),
}


@pytest.mark.parametrize("kind", LINES)
def test_lines(kind):
    check_all(*LINES[kind])
