"""Manifests of jobs for Kubernetes, validated against its published schemas."""

import copy
import dataclasses

import kubernetes_validate
import pytest
import yaml

from kdist.launch.engines import Job, MachineType
from kdist.launch.engines.kubernetes import Kubernetes, _status, manifests

# The oldest in which the policies of a Job are stable, and the newest.
OLDEST, NEWEST = "1.33", "1.37"
JOB = Job(
    "cats",
    ("kdist", "train", "--allow_remote"),
    workers=2,
    image="registry/cats:1",
    run_dir="/runs/cats",
    options={"claim": "runs"},
)
K80 = MachineType("n1-standard-4", "gcp", "us-central1", "K80", 4, 4, 0.5)
JOBS = {
    "two workers": JOB,
    "parameter servers": dataclasses.replace(JOB, ps=2),
    "one machine": dataclasses.replace(JOB, workers=1),
    "planned": dataclasses.replace(
        JOB, machine=K80, spot=True, hours=2.0, plan="2 × n1-standard-4", setup="pip install x"
    ),
    "options": dataclasses.replace(
        JOB,
        environment={"WHO": "me"},
        options={
            "claim": "runs",
            "mount": "/data",
            "cpu": "500m",
            "memory": "16Gi",
            "queue": "research",
            "selector": "disk=ssd,zone=a",
            "service_account": "reader",
        },
        run_dir="/data/cats",
    ),
}


def with_flavor(job, flavor):
    return dataclasses.replace(job, options={**job.options, "flavor": flavor})


def written(job):
    """Returns the objects of the text by kind, after checking that they are all of them."""
    assert Kubernetes().check(job) == []
    text = Kubernetes().text(job)
    assert "&id" not in text  # references, which people do not read well
    objects = list(yaml.safe_load_all(text))
    assert objects == manifests(job)
    return {each["kind"]: each for each in objects}


def pod_of(job):
    return written(job)["Job"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("name", "version"), [*((name, NEWEST) for name in JOBS), ("planned", OLDEST)]
)
def test_jobs_fit_the_schemas(name, version):
    objects = written(JOBS[name])
    assert set(objects) == {"Service", "NetworkPolicy", "Job"}
    for each in objects.values():
        assert kubernetes_validate.validate(each, version, strict=True) == version


@pytest.mark.parametrize("job", [JOBS["parameter servers"], JOBS["options"]])
def test_the_parts_of_a_jobset_fit_the_schemas(job):
    objects = written(with_flavor(job, "jobset"))
    assert set(objects) == {"NetworkPolicy", "JobSet"}
    (part,) = objects["JobSet"]["spec"]["replicatedJobs"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **part["template"]}
    assert kubernetes_validate.validate(whole, NEWEST, strict=True)


@pytest.mark.parametrize("job", [JOBS["parameter servers"], JOBS["options"]])
def test_the_parts_of_a_tfjob_fit_the_schemas(job):
    specs = written(with_flavor(job, "tfjob"))["TFJob"]["spec"]["tfReplicaSpecs"]
    assert sum(each["replicas"] for each in specs.values()) == job.num_machines
    for each in specs.values():
        metadata = {"name": "x", **each["template"]["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
        assert kubernetes_validate.validate(
            {**pod, "spec": each["template"]["spec"]}, NEWEST, strict=True
        )
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "tensorflow"  # which the operator gives TF_CONFIG


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("Job", ["spec", "podFailurePolicy", "rules", 1, "onExitCodes", "codes"], [143]),
        ("Job", ["spec", "successPolicy", "rules", 0, "succeededIndexes"], 0),
        ("Service", ["spec", "headless"], True),
        ("NetworkPolicy", ["spec", "ingress", 0, "from", 0, "podSelector", "labels"], {}),
    ],
)
def test_the_schemas_refuse_what_is_wrong(kind, path, value):
    wrong = copy.deepcopy(written(JOB)[kind])
    place = wrong
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_pods_find_each_other():
    objects = written(dataclasses.replace(JOB, ps=1))
    spec = objects["Job"]["spec"]
    pod = spec["template"]
    variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
    assert variables["KDIST_HOSTS"] == "cats-0.cats,cats-1.cats,cats-2.cats,cats-3.cats"
    assert variables["KDIST_PS"] == variables["KDIST_CHIEF"] == "1"
    assert spec["completions"] == spec["parallelism"] == 4
    service = objects["Service"]["spec"]
    assert pod["spec"]["subdomain"] == objects["Service"]["metadata"]["name"] == "cats"
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"]  # tasks meet before any is ready
    policy = objects["NetworkPolicy"]["spec"]
    labels = pod["metadata"]["labels"]
    assert service["selector"] == policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


def test_host_names_in_a_jobset():
    (part,) = written(with_flavor(JOB, "jobset"))["JobSet"]["spec"]["replicatedJobs"]
    (container,) = part["template"]["spec"]["template"]["spec"]["containers"]
    hosts = next(each["value"] for each in container["env"] if each["name"] == "KDIST_HOSTS")
    assert hosts == "cats-task-0-0.cats,cats-task-0-1.cats"


def action(rules, code=None, condition=None):
    """Returns the action of the first rule that matches, as Kubernetes evaluates them."""
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return rule["action"]
        if condition in [each["type"] for each in rule.get("onPodConditions", ())]:
            return rule["action"]
    return "Count"


def test_which_ends_cost_a_retry():
    spec = written(dataclasses.replace(JOB, max_restarts=5))["Job"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert action(rules, 143) == action(rules, 137, "DisruptionTarget") == "Ignore"
    assert action(rules, 124) == action(rules, 130) == "FailJob"
    assert action(rules, 75) == action(rules, 1) == "Count"
    assert spec["backoffLimit"] == 10  # both pods end when one fails
    jobset = written(with_flavor(JOB, "jobset"))["JobSet"]["spec"]
    free = {
        rule["action"]: rule["onJobFailureReasons"] for rule in jobset["failurePolicy"]["rules"]
    }
    assert free["RestartJobSetAndIgnoreMaxRestarts"] == ["PodFailurePolicy"]
    rules = jobset["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert action(rules, 143) == action(rules, 137, "DisruptionTarget") == "FailJob"
    assert action(rules, 1) == "Count"


def test_planned_machines():
    job = JOBS["planned"]
    objects = written(job)
    assert objects["Job"]["spec"]["activeDeadlineSeconds"] == 3 * 3600
    assert objects["Job"]["metadata"]["annotations"] == {
        "kdist/plan": "2 × n1-standard-4",
        "kdist/usd-per-hour": "0.5",
    }
    pod = pod_of(job)
    assert pod["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "n1-standard-4",
        "topology.kubernetes.io/region": "us-central1",
        "cloud.google.com/gke-accelerator": "nvidia-tesla-k80",
        "cloud.google.com/gke-spot": "true",
    }
    assert {each["key"] for each in pod["tolerations"]} == {
        "nvidia.com/gpu",
        "cloud.google.com/gke-spot",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert container["command"][:2] == ["sh", "-c"]
    assert "pip install x" in container["command"][2]
    assert container["command"][4:] == ["python", "-m", "kdist", "train", "--allow_remote"]
    assert "/dev/shm" in [each["mountPath"] for each in container["volumeMounts"]]


@pytest.mark.parametrize(
    ("cloud", "label"),
    [
        ("aws", ("eks.amazonaws.com/capacityType", "SPOT")),
        ("azure", ("kubernetes.azure.com/scalesetpriority", "spot")),
    ],
)
def test_spot_machines_of_other_clouds(cloud, label):
    job = dataclasses.replace(JOB, spot=True, machine=MachineType(cloud=cloud))
    assert pod_of(job)["nodeSelector"] == dict([label])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image": ""}, "--image"),
        ({"options": {}}, "--option=claim"),
        ({"options": {"claim": "runs", "flavor": "mpi"}}, "flavor"),
        ({"options": {"claim": "runs", "mount": "runs"}}, "begins with /"),
        ({"options": {"claim": "runs", "memory": "2 GB"}}, "no quantity"),
        ({"options": {"claim": "runs", "selector": "ssd"}}, "LABEL=VALUE"),
        ({"run_dir": "runs/cats"}, "--run_dir=/runs/cats"),
        ({"spot": True}, "--cloud"),
        ({"max_usd": 1.0}, "--time_limit_hours"),
        ({"machine": dataclasses.replace(K80, device="V1000")}, "has no GPU V1000"),
        ({"machine": MachineType("gpu_8x_v100", "lambda")}, "machines of lambda"),
    ],
)
def test_what_does_not_apply_is_refused(fields, message):
    (problem,) = Kubernetes().check(dataclasses.replace(JOB, **fields))
    assert message in problem


def test_the_pods_may_do_little():
    pod = pod_of(JOB)
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    token = next(each for each in container["env"] if each["name"] == "KDIST_JOB_TOKEN")
    assert token["valueFrom"]["secretKeyRef"]["name"] == "cats-token"


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({}, "pending"),
        ({"active": 2, "ready": 0}, "pending"),
        ({"active": 2, "ready": 1, "failed": 3}, "running, 3 restarts: 1 of 2 pods are ready"),
        ({"conditions": [{"type": "Complete", "status": "True"}]}, "done"),
        (
            {"conditions": [{"type": "Failed", "status": "False"}], "active": 2, "ready": 2},
            "running",
        ),
        (
            {"conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]},
            "failed: DeadlineExceeded",
        ),
    ],
)
def test_states(status, expected):
    found = _status({"spec": {"completions": 2}, "status": status})
    assert str(found).startswith(expected)
