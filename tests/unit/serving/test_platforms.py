"""Platforms in the environments that they set, and models at a URL."""

import fsspec
import pytest

from kdist.serving.platforms import fetch_models, find_platform, local_copies

# As the platforms' pages list them; each process has others besides.
VERTEX = {
    "AIP_HTTP_PORT": "8080",
    "AIP_HEALTH_ROUTE": "/v1/endpoints/1/deployedModels/2",
    "AIP_PREDICT_ROUTE": "/v1/endpoints/1/deployedModels/2:predict",
    "AIP_STORAGE_URI": "gs://bucket/model",
    "AIP_MODE": "PREDICTION",
    "AIP_FRAMEWORK": "CUSTOM_CONTAINER",
}
CLOUD_RUN = {"PORT": "9090", "K_SERVICE": "digits", "K_REVISION": "digits-1"}


def test_the_environment_names_the_platform(tmp_path):
    def name(environment):
        platform = find_platform("auto", environment, str(tmp_path))
        return platform and platform.name

    assert name(VERTEX) == "vertex"
    assert name({"SAGEMAKER_BIND_TO_PORT": "8080"}) == "sagemaker"
    assert name({"SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "m"}) == "sagemaker"
    assert name(CLOUD_RUN) == "cloud_run"
    (tmp_path / "mnt" / "models").mkdir(parents=True)
    assert name(CLOUD_RUN) == "kserve"
    # A notebook on SageMaker, and a program that has a PORT, must not listen on all addresses.
    assert name({"SAGEMAKER_SPACE_NAME": "s", "PORT": "80", "PATH": "/bin"}) is None


def test_a_flag_overrides_the_environment():
    assert find_platform("none", VERTEX) is None
    assert find_platform("cloud_run", VERTEX).name == "cloud_run"


def test_vertex():
    platform = find_platform("auto", VERTEX)
    assert platform.health_route == VERTEX["AIP_HEALTH_ROUTE"]
    assert platform.predict_route == VERTEX["AIP_PREDICT_ROUTE"]
    assert platform.model_url == "gs://bucket/model"
    options = platform.options()
    assert (options["host"], options["port"], options["grpc_port"]) == ("0.0.0.0", 8080, None)
    assert options["limits"].body_bytes == 1_500_000


def test_sagemaker(tmp_path):
    for path in ("half/1", "half/2", "third/7", "code"):
        (tmp_path / "opt/ml/model" / path).mkdir(parents=True)
        (tmp_path / "opt/ml/model" / path / "saved_model.pb").touch()
    environment = {
        "SAGEMAKER_BIND_TO_PORT": "9000",
        "SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "third",
    }
    platform = find_platform("sagemaker", environment, str(tmp_path))
    assert platform.port == 9000
    assert (platform.health_route, platform.predict_route) == ("/ping", "/invocations")
    directories = [str(tmp_path / "opt/ml/model" / name) for name in ("half", "third")]
    assert list(platform.model_directories) == directories
    assert platform.first_model == "third"
    assert find_platform("sagemaker", {}, str(tmp_path)).port == 8080


def test_requests_end_before_the_platform_kills_the_process():
    """Closing the models takes up to 2 seconds after the requests have ended."""
    assert find_platform("cloud_run", CLOUD_RUN).options()["end_seconds"] + 2 < 10
    for name in ("sagemaker", "kserve"):
        assert find_platform(name, {}).options()["end_seconds"] + 2 < 30


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("cloud_run", {"PORT": "http"}, "PORT=http"),
        ("vertex", {"AIP_HTTP_PORT": "70000"}, "AIP_HTTP_PORT=70000"),
        ("vertex", {"AIP_PREDICT_ROUTE": "/{name}"}, "AIP_PREDICT_ROUTE"),
        ("vertex", {"AIP_HEALTH_ROUTE": "health"}, "AIP_HEALTH_ROUTE"),
        ("sagemaker", {"SAGEMAKER_MULTI_MODEL": "true"}, "tfs-model-name"),
    ],
)
def test_environments_that_are_refused(name, environment, says):
    with pytest.raises(ValueError, match=says):
        find_platform(name, environment)


@pytest.mark.parametrize(
    ("at", "copied"), [("m/3/", "3/saved_model.pb"), ("m/", "1/saved_model.pb")]
)
def test_models_are_copied_from_a_url(tmp_path, at, copied):
    store = fsspec.filesystem("memory")
    for file in ("saved_model.pb", "variables/variables.index"):
        store.pipe(f"/{tmp_path.name}/{at}{file}", b"content")
    fetch_models(f"memory://{tmp_path.name}/m/", tmp_path / "m")
    assert (tmp_path / "m" / copied).read_bytes() == b"content"
    variables = (tmp_path / "m" / copied).parent / "variables" / "variables.index"
    assert variables.read_bytes() == b"content"


def test_models_at_urls_are_served_from_copies(tmp_path):
    url = f"memory://{tmp_path.name}/models/digits"
    fsspec.filesystem("memory").pipe(f"{url.removeprefix('memory:/')}/7/saved_model.pb", b"content")
    copies = local_copies(["models/a", url, f"second={url}/"], tmp_path)
    assert copies == ["models/a", f"digits={tmp_path}/1", f"second={tmp_path}/2"]
    assert (tmp_path / "2" / "7" / "saved_model.pb").read_bytes() == b"content"
    with pytest.raises(FileNotFoundError, match="no complete version"):
        local_copies([f"{url}-2"], tmp_path)
