"""Application on a Ray cluster of three nodes."""

import json
import pathlib
import tempfile

import numpy as np
import pytest

import kdist
from kdist.testing import python
from tests.ray_programs import run_ray_program

PROGRAM = pathlib.Path(__file__).with_name("ray_program.py")
# Replicas import TensorFlow, which takes a minute or more on a busy machine.
pytestmark = pytest.mark.timeout(600)
X = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype("float32")


@pytest.fixture(scope="module")
def seen():
    """Returns the output of the program, with its exit status and the remaining processes."""
    # On a busy machine, proxies start later than Ray's limit of 5 s.
    limit = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
    with tempfile.TemporaryDirectory(prefix="k", ignore_cleanup_errors=True) as directory:
        export_two_versions(pathlib.Path(directory))
        said, left = run_ray_program(PROGRAM, directory, 500, **limit)
    return json.loads(said.strip().splitlines()[-1]) | {"left": left}


def export_two_versions(directory):
    outputs = []
    for number, place in ((1, "fashion"), (2, "staged")):
        model = kdist.models.create("mlp", input_shape=(8, 8, 1), num_classes=3)
        kdist.serving.export(model, directory / place, number)
        outputs.append(model.predict(X, verbose=0).tolist())
    known = {"rows": X.tolist(), "outputs": outputs}
    (directory / "expected.json").write_text(json.dumps(known))


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_it_predicts_as_the_model_in_batches(seen):
    assert seen["worst"] <= 1e-6
    numbers = dict(
        line.rsplit(" ", 1) for line in seen["metrics"].splitlines() if not line.startswith("#")
    )
    labels = '{model="fashion",version="2"}'
    rows, batches = (
        float(numbers[f"kdist_serving_batch_rows_{what}{labels}"]) for what in ("sum", "count")
    )
    assert rows > batches > 0
    assert any(name.startswith("target_info{replica=") for name in numbers)


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_a_bad_request_is_told_why(seen):
    for status, message in seen["refused"]:
        assert status == 400
        assert message
    assert "shape" in seen["refused"][0][1]


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_more_load_brings_more_replicas_on_other_nodes(seen):
    assert seen["replicas"][:2] == [1, 2]
    assert seen["nodes"] == 2


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_a_killed_node_and_a_new_version_lose_no_request_that_is_asked_for_again(seen):
    assert seen["lost"] == []
    assert 0 < seen["asked"][0] < seen["asked"][1]
    assert seen["replicas"][2] == 2
    assert not seen["killed node serves"]


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_only_replicas_listen_beyond_loopback_and_strangers_are_refused(seen):
    # Of Ray 2.60; a later one may well listen at less.
    for name, told in seen["open to a network"]:
        assert name.startswith("ray::ServeReplica")
        assert told == "UNAUTHENTICATED"


@pytest.mark.exhaustive  # Ray itself gives its processes a minute to start
def test_nothing_is_left(seen):
    assert seen["left"] == []
    assert seen["without TensorFlow"]


@pytest.mark.slow
def test_the_example_is_what_ray_takes():
    code = """
import json, textwrap, yaml
from kdist.serving import ray
from ray.serve.schema import ServeDeploySchema
text = ray.__doc__[ray.__doc__.index("    proxy_location:"):ray.__doc__.index("`serve run")]
[application] = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
ray.build(ray.BuildArguments.model_validate(application.args))
print(json.dumps(application.import_path))
"""
    assert python(code) == "kdist.serving.ray:build"


def test_without_ray_it_says_what_to_install():
    code = """
import json, sys
sys.modules["ray"] = None
try:
    import kdist.serving.ray
except ImportError as error:
    print(json.dumps(str(error)))
"""
    assert "pip install kdist[ray]" in python(code)


def test_arguments_of_a_file_and_of_a_command_line():
    code = """
import json, sys
from kdist.serving import ray
def refused(**arguments):
    try:
        ray.build(ray.BuildArguments.model_validate(arguments))
    except ValueError as error:
        return str(error)
models = ray.BuildArguments.model_validate({"models": '{"fashion": "m"}', "max_replicas": "3"})
ray.build(models)
print(json.dumps({
    "models": models.models,
    "max_replicas": models.max_replicas,
    "refused": [refused(models={"a": "m"}, replicas=3), refused(models={"a": "m"}, min_replicas=9)],
    "tensorflow": "tensorflow" in sys.modules,
}))
"""
    found = python(code)
    assert found["models"] == {"fashion": "m"}
    assert found["max_replicas"] == 3
    assert "replicas" in found["refused"][0]
    assert "min_replicas" in found["refused"][1]
    assert not found["tensorflow"]
