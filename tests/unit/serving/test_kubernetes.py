"""Manifests for TensorFlow Serving, validated against the schemas of Kubernetes."""

import copy
import json
import sys

import kubernetes_validate
import pytest
import yaml

from kdist.serving.core.model_directory import METADATA, write_serving_files
from kdist.serving.core.settings import BatchSettings
from kdist.serving.exporting.kubernetes import KubernetesOptions, manifests, write_manifests

# The oldest and the newest that the package of schemas has where autoscaling/v2 is stable.
VERSIONS = ["1.25", "1.37"]


@pytest.fixture
def fashion(tmp_path):
    return directory(tmp_path / "fashion")


def directory(path, devices=()):
    """Returns a directory with the files of an export that manifests read."""
    (path / "3" / METADATA).parent.mkdir(parents=True)
    (path / "3" / "saved_model.pb").touch()
    (path / "3" / METADATA).write_text(json.dumps({"devices": list(devices)}))
    write_serving_files(path, BatchSettings())
    return path


def by_kind(objects):
    return {each["kind"]: each for each in objects}


def container(objects):
    (only,) = by_kind(objects)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return only


CHOICES = {
    "default": KubernetesOptions(),
    "host_path": KubernetesOptions(host_path="/srv/models/fashion", user=4242),
    "gpus": KubernetesOptions(gpus=2, cpu="500m", memory="16Gi", namespace="serving"),
    "class": KubernetesOptions(storage_class="fast", storage="1Ti", access_mode="ReadOnlyMany"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_they_fit_the_schemas(fashion, options, version):
    objects = manifests(fashion, options)
    for each in objects:
        assert kubernetes_validate.validate(each, version, strict=True) == version
    kinds = {"Deployment", "Service", "HorizontalPodAutoscaler"}
    claimed = {"PersistentVolumeClaim"} if options.host_path is None else set()
    assert {each["kind"] for each in objects} == kinds | claimed


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Deployment", ["spec", "template", "spec", "containers", 0, "ports", 0, "port"], 8500),
        ("Deployment", ["spec", "template", "spec", "volumes", 0, "hostPath"], {"dir": "/"}),
        ("Service", ["spec", "ports", 0, "port"], "8500"),
        ("HorizontalPodAutoscaler", ["spec", "maxReplicas"], "4"),
        ("PersistentVolumeClaim", ["spec", "size"], "1Gi"),
    ],
)
def test_the_schemas_refuse_what_is_wrong(fashion, kind, path, value):
    wrong = copy.deepcopy(by_kind(manifests(fashion))[kind])
    place = wrong
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_paths_ports_and_names_fit_each_other(fashion):
    objects = by_kind(manifests(fashion, KubernetesOptions(name="shirts")))
    pod = objects["Deployment"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    mounted = {mount["name"]: mount for mount in server["volumeMounts"]}
    assert mounted["models"]["mountPath"] == "/models/fashion"  # as in models.config
    assert mounted["models"]["readOnly"]
    arguments = dict(each.partition("=")[::2] for each in server["args"])
    assert arguments["--model_config_file"] == "/models/fashion/models.config"
    assert arguments["--batching_parameters_file"] == "/models/fashion/batching_parameters.txt"
    assert "--enable_batching" in arguments
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"grpc": 8500, "rest": 8501}
    assert arguments["--port"] == str(ports["grpc"])
    assert arguments["--rest_api_port"] == str(ports["rest"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/v1/models/fashion", "port": "rest"}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert set(volumes) == set(mounted)
    assert volumes["models"]["persistentVolumeClaim"]["claimName"] == "shirts"
    assert objects["PersistentVolumeClaim"]["metadata"]["name"] == "shirts"
    selector = objects["Deployment"]["spec"]["selector"]["matchLabels"]
    assert selector == pod["metadata"]["labels"] == objects["Service"]["spec"]["selector"]
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "shirts"}


def test_the_server_is_nobody_special(fashion):
    pod = by_kind(manifests(fashion))["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 1000
    (server,) = pod["containers"]
    assert server["securityContext"]["allowPrivilegeEscalation"] is False
    assert server["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_options_are_where_they_belong(fashion):
    options = KubernetesOptions(gpus=2, cpu="500m", memory="16Gi", min_replicas=2, max_replicas=9)
    objects = manifests(fashion, options)
    assert container(objects)["image"] == "tensorflow/serving:2.21.0-gpu"
    assert container(objects)["resources"] == {
        "requests": {"cpu": "500m", "memory": "16Gi"},
        "limits": {"memory": "16Gi", "nvidia.com/gpu": "2"},
    }
    scaler = by_kind(objects)["HorizontalPodAutoscaler"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 9)
    assert "replicas" not in by_kind(objects)["Deployment"]["spec"]  # the autoscaler's
    own = manifests(fashion, KubernetesOptions(image="here:5000/serving:2.19.1", gpus=1))
    assert container(own)["image"] == "here:5000/serving:2.19.1"


def test_a_directory_that_was_renamed_is_refused(fashion):
    """Its files refer to /models/fashion, which the pod would not have."""
    renamed = fashion.rename(fashion.with_name("mode"))
    with pytest.raises(ValueError, match=r"another name"):
        manifests(renamed)
    write_serving_files(renamed, BatchSettings())
    assert manifests(renamed)


def test_the_file_holds_them_all(fashion, tmp_path):
    path = write_manifests(fashion, tmp_path / "cluster" / "fashion.yaml")
    assert "&" not in path.read_text()  # no references, which people do not read well
    assert list(yaml.safe_load_all(path.read_text())) == manifests(fashion)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"name": "Fashion_MNIST"}, "RFC 1035.: give name='fashion-mnist'"),
        ({"name": "-"}, "give name='model'"),
        ({"name": "a" * 64}, "up to 63"),
        ({"namespace": "my.space"}, "namespace='my.space': .* give namespace='my-space'"),
        ({"image": "tensorflow/serving"}, "give a tag"),
        ({"image": "here:5000/serving"}, "give a tag"),
        ({"image": "tensorflow/serving:latest"}, "give a tag"),
        ({"min_replicas": -1}, "min_replicas=-1: .* at least 1"),
        ({"min_replicas": True}, "min_replicas=True"),
        ({"max_replicas": 2.5}, "max_replicas=2.5"),
        ({"min_replicas": 5}, "max_replicas=4: give at least min_replicas=5"),
        ({"cpu_percent": 0}, "cpu_percent=0"),
        ({"gpus": -1}, "gpus=-1: .* at least 0"),
        ({"user": 0}, "user=0: .* at least 1"),
        ({"cpu": "two"}, "cpu='two': give a quantity"),
        ({"memory": "2 GB"}, "memory='2 GB'"),
        ({"storage": "0Gi"}, "storage='0Gi'"),
        ({"access_mode": "Any"}, "access_mode='Any': .*ReadWriteMany"),
        ({"host_path": "models"}, "give a path that begins with /"),
    ],
    ids=str,
)
def test_options_that_are_refused(given, says):
    with pytest.raises(ValueError, match=says):
        KubernetesOptions(**given)


@pytest.mark.parametrize(
    "image", ["tensorflow/serving:2.19.1", "serving:1", f"here:5000/a/b@sha256:{'0' * 64}"]
)
def test_images_that_are_taken(image):
    assert KubernetesOptions(image=image).image_or_default == image


def test_a_models_name_may_be_none_for_kubernetes(tmp_path):
    path = directory(tmp_path / "Fashion MNIST")
    with pytest.raises(ValueError, match="give name='fashion-mnist'"):
        manifests(path)
    server = container(manifests(path, KubernetesOptions(name="fashion-mnist")))
    assert server["readinessProbe"]["httpGet"]["path"] == "/v1/models/Fashion%20MNIST"
    assert server["volumeMounts"][0]["mountPath"] == "/models/Fashion MNIST"


def test_directories_that_are_none_of_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"models.config is not there: .*export writes it"):
        manifests(tmp_path)
    write_serving_files(tmp_path, BatchSettings())
    with pytest.raises(FileNotFoundError, match="holds no version"):
        manifests(tmp_path)


def test_placed_models_need_their_devices(tmp_path):
    on_cpus = directory(tmp_path / "cpus", ["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="on CPU:0, CPU:1, and a pod has CPU:0: .*merged"):
        manifests(on_cpus)
    on_gpus = directory(tmp_path / "gpus", ["GPU:0", "GPU:1"])
    with pytest.raises(ValueError, match="a pod has CPU:0, GPU:0: set gpus"):
        manifests(on_gpus, KubernetesOptions(gpus=1))
    assert manifests(on_gpus, KubernetesOptions(gpus=2))


def test_without_yaml_it_says_so(fashion, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ModuleNotFoundError):
        write_manifests(fashion, tmp_path / "fashion.yaml")
    assert not (tmp_path / "fashion.yaml").exists()


def test_a_model_may_have_another_name_than_its_directory(fashion):
    objects = manifests(fashion, KubernetesOptions(name="shirts", model="shirts"))
    assert {each["metadata"]["name"] for each in objects} == {"shirts"}
    only = container(objects)
    assert {"--model_name=shirts", "--model_base_path=/models/fashion"} <= set(only["args"])
    assert not [each for each in only["args"] if "model_config_file" in each]
    assert only["readinessProbe"]["httpGet"]["path"] == "/v1/models/shirts"
    assert only["volumeMounts"][0]["mountPath"] == "/models/fashion"
    same = manifests(fashion, KubernetesOptions(name="fashion", model="fashion"))
    assert same == manifests(fashion)
