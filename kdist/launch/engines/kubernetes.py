"""Kubernetes: manifests of a job for `kubectl apply`, which need no operator.

    job = Job("cats", ("train.py",), workers=2, image="registry/cats:1", options={"claim": "runs"})
    print(Kubernetes().text(job))

The objects are an Indexed Job with one pod per task, a headless Service that gives each pod a host
name, and a NetworkPolicy, because TensorFlow's servers accept every client. The options
flavor=jobset and flavor=tfjob write a JobSet or a TFJob of the operators with these names instead.
"""

import datetime
import json
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from kdist.cluster.handshake import TOKEN_VARIABLE
from kdist.cluster.nodes import HOSTS_VARIABLE, PORT
from kdist.exit_codes import INTERRUPTED, SAVED, TIMED_OUT
from kdist.launch.engines.base import (
    Cost,
    Engine,
    Handle,
    Job,
    NoSuchJobError,
    Status,
    call,
    show_output,
)

_POLL_SECONDS = 2.0
# Ended jobs, and with them their output, are kept for a day.
_KEPT_SECONDS = 24 * 3600
_NAME_LABEL, _MANAGER_LABEL = "app.kubernetes.io/name", "app.kubernetes.io/managed-by"
_PLAN, _PRICE = "kdist/plan", "kdist/usd-per-hour"
# Flavor -> resource of kubectl.
_RESOURCES = {
    "job": "jobs.batch",
    "jobset": "jobsets.jobset.x-k8s.io",
    "tfjob": "tfjobs.kubeflow.org",
}
# Cloud -> label of nodes that may be preempted, by its documentation: GKE "Spot VMs", EKS "managed
# node groups", AKS "add a spot node pool".
_SPOT_LABELS = {
    "gcp": ("cloud.google.com/gke-spot", "true"),
    "aws": ("eks.amazonaws.com/capacityType", "SPOT"),
    "azure": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
# GPU -> value of GKE's label of nodes. Other clouds have the GPU in the name of the machine.
_GKE_GPUS = {
    "K80": "nvidia-tesla-k80",
    "P100": "nvidia-tesla-p100",
    "P4": "nvidia-tesla-p4",
    "V100": "nvidia-tesla-v100",
    "T4": "nvidia-tesla-t4",
    "L4": "nvidia-l4",
    "A100-40GB": "nvidia-tesla-a100",
    "A100-80GB": "nvidia-a100-80gb",
    "H100": "nvidia-h100-80gb",
    "H200": "nvidia-h200-141gb",
}
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


class Kubernetes(Engine):
    """Runs jobs on a Kubernetes cluster, in the namespace of kubectl's current context."""

    name = "kubernetes"
    program = "kubectl"
    clouds = tuple(_SPOT_LABELS)
    fixed_workers = "an Indexed Job has a fixed number of pods, and starts only with all of them"

    options: Mapping[str, str] = {
        "flavor": "job (default), jobset, or tfjob; the last two need an operator",
        "claim": "PersistentVolumeClaim that all pods share",
        "mount": "directory of the claim in the pods; by default /runs",
        "cpu": "cores that each pod requests",
        "memory": "memory of each pod; by default 8Gi",
        "selector": "labels of the nodes, such as disk=ssd,zone=a",
        "queue": "local queue of Kueue",
        "service_account": "service account of the pods, such as one that may read a bucket",
    }

    def check(self, job: Job) -> list[str]:
        problems = self.common_problems(job)
        options = job.options
        if options.get("flavor", "job") not in _RESOURCES:
            problems.append(f"the option flavor is one of {', '.join(_RESOURCES)}")
        if not job.image:
            problems.append(
                "Kubernetes needs an image that has TensorFlow, kdist, and the program (--image)"
            )
        if "claim" not in options and not job.mirror:
            problems.append(
                "checkpoints in a pod are lost with it; name a volume that all pods share "
                "(--option=claim=NAME), or a bucket (--mirror=URL)"
            )
        mount = options.get("mount", "/runs")
        if not mount.startswith("/"):
            problems.append(f"the option mount is {mount}; use a path that begins with /")
        elif "claim" in options and job.run_dir and not f"{job.run_dir}/".startswith(f"{mount}/"):
            problems.append(
                f"the run directory {job.run_dir} is not in the claim, which pods see at {mount}; "
                f"use --run_dir={mount}/{job.name}"
            )
        if job.spot and not job.machine.cloud and "selector" not in options:
            problems.append(
                "nodes that may be preempted have different labels in each cloud; name the cloud "
                "(--cloud=gcp, aws, or azure) or the labels (--option=selector=LABEL=VALUE)"
            )
        if job.max_usd is not None:
            problems.append(
                "Kubernetes knows no prices; use --time_limit_hours instead of --max_usd"
            )
        problems += [
            f"the option {name}={options[name]} is no quantity; write it as 4, 500m, or 16Gi"
            for name in ("cpu", "memory")
            if name in options and not _QUANTITY.fullmatch(options[name])
        ]
        for part in filter(None, options.get("selector", "").split(",")):
            if "=" not in part:
                problems.append(f"the option selector has {part}; write LABEL=VALUE")
        device = job.machine.device
        if job.machine.cloud == "gcp" and job.machine.num_devices and device not in _GKE_GPUS:
            problems.append(f"Google has no GPU {device}; it has {', '.join(_GKE_GPUS)}")
        return problems

    def notice_seconds(self, job: Job) -> float | None:
        """Returns the notice of the cloud, or less if its pods have less time to end."""
        notice = super().notice_seconds(job)
        return None if notice is None else min(notice, job.grace_seconds)

    def text(self, job: Job) -> str:
        return yaml.dump_all(
            manifests(job), Dumper=_Dumper, sort_keys=False, width=100, allow_unicode=True
        )

    def submit(self, job: Job) -> Handle:
        for flavor in _RESOURCES:
            if _get(flavor, job.name):
                raise RuntimeError(
                    f"Kubernetes has a job {job.name} already; choose another --name, or delete "
                    f"it: kdist launch --job={job.name} --stop"
                )
        # The secret is no part of the text, which people keep in repositories.
        token = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job, _secret(job))}
        token["stringData"] = {"token": secrets.token_hex(16)}
        call(["kubectl", "apply", "-f", "-"], f"{json.dumps(token)}\n---\n{self.text(job)}")
        return KubernetesJob(job.name, job.options.get("flavor", "job"))

    def find(self, name: str) -> Handle:
        for flavor in _RESOURCES:
            if _get(flavor, name):
                return KubernetesJob(name, flavor)
        raise NoSuchJobError(
            f"Kubernetes has no job {name} in this namespace; kubectl get jobs lists those that "
            "it has, and kubectl config set-context --current --namespace=… changes the namespace"
        )


class KubernetesJob(Handle):
    """A job in Kubernetes, by its name and flavor."""

    def __init__(self, name: str, flavor: str):
        super().__init__(name)
        self.flavor = flavor

    def status(self) -> Status:
        return _status(self._object())

    def follow(self, show: Callable[[str], None]) -> int:
        announced, since = "", None
        while True:
            status = self.status()
            if str(status) != announced:
                announced = str(status)
                show(f"kdist: job {self.name} is {announced}")
            self._show_logs(show, since)
            since = _now()
            if status.is_over:
                return self._exit_code(status)
            time.sleep(_POLL_SECONDS)

    def stop(self):
        resources = f"{_RESOURCES[self.flavor]}/{self.name}"
        call(["kubectl", "delete", "--ignore-not-found", resources])
        label = f"{_NAME_LABEL}={self.name},{_MANAGER_LABEL}=kdist"
        call(["kubectl", "delete", "service,networkpolicy,secret", "-l", label])

    def cost(self) -> Cost:
        found = self._object()
        status = found.get("status", {})
        began = status.get("startTime") or found["metadata"]["creationTimestamp"]
        over = [each["lastTransitionTime"] for each in _conditions(found) if _is_end(each)]
        end = status.get("completionTime") or next(iter(over), _now())
        hours = (_time(end) - _time(began)).total_seconds() / 3600
        price = found["metadata"].get("annotations", {}).get(_PRICE)
        machines = _num_pods(found["spec"])
        return Cost(max(hours, 0.0) * machines, float(price) if price else None)

    def _object(self):
        found = _get(self.flavor, self.name)
        if not found:
            raise NoSuchJobError(f"Kubernetes no longer has the job {self.name}")
        return found

    def _show_logs(self, show, since):
        """Shows what all running pods write until they end."""
        command = ["kubectl", "logs", "--follow", "--prefix", "--tail=-1", "--ignore-errors"]
        command += ["--max-log-requests=512", "-l", f"{_NAME_LABEL}={self.name}"]
        command += [f"--since-time={since}"] if since else []
        show_output(command, show, stderr=subprocess.DEVNULL)

    def _exit_code(self, status):
        if status.state == "done":
            return 0
        if "DeadlineExceeded" in status.detail:
            return TIMED_OUT
        pods = _json(["kubectl", "get", "pods", "-l", f"{_NAME_LABEL}={self.name}", "-o", "json"])
        ended = [
            container["state"]["terminated"]
            for pod in pods.get("items", ())
            for container in pod.get("status", {}).get("containerStatuses", ())
            if container.get("state", {}).get("terminated")
        ]
        codes = [
            each["exitCode"]
            for each in sorted(ended, key=lambda each: each.get("finishedAt", ""))
            if each["exitCode"] not in (0, SAVED)
        ]
        return codes[0] if codes else 1


def manifests(job: Job) -> list[dict[str, Any]]:
    """Returns the objects of a job, in the order in which to create them."""
    flavor = job.options.get("flavor", "job")
    if flavor == "job":
        return [_service(job), _network_policy(job), _job(job)]
    # The operators create a service themselves.
    return [_network_policy(job), _jobset(job) if flavor == "jobset" else _tfjob(job)]


class _Dumper(yaml.SafeDumper):
    """Writes equal parts again instead of references, and long texts as blocks."""

    def ignore_aliases(self, data):
        return True


def _text(dumper, text):
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def _metadata(job, name=None):
    metadata = {"name": name or job.name, "labels": _labels(job)}
    notes = {_PLAN: job.plan}
    if job.machine.usd_per_hour is not None:
        notes[_PRICE] = f"{job.machine.usd_per_hour:.6g}"
    if annotations := {key: text for key, text in notes.items() if text}:
        metadata["annotations"] = annotations
    return metadata


def _labels(job):
    return {_NAME_LABEL: job.name, _MANAGER_LABEL: "kdist"}


def _secret(job):
    return f"{job.name}-token"


def _service(job):
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": _labels(job)}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _network_policy(job):
    # All ports, because tasks also exchange telemetry; only from pods of the job.
    own = {"matchLabels": _labels(job)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(job),
        "spec": {
            "podSelector": own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": own}]}],
        },
    }


def _job(job):
    spec = _job_spec(job, f"{job.name}-{{}}.{job.name}")
    spec["template"]["spec"] = {"subdomain": job.name, **spec["template"]["spec"]}
    spec["ttlSecondsAfterFinished"] = _KEPT_SECONDS
    # A failure of one task ends the pods of all, which are counted one by one.
    spec["backoffLimit"] = job.max_restarts * job.num_machines
    spec["podFailurePolicy"] = {
        "rules": [
            {"action": "Ignore", **_DISRUPTED},
            {"action": "Ignore", **_ended_with(SAVED)},
            {"action": "FailJob", **_ended_with(TIMED_OUT, INTERRUPTED)},
        ]
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(job), "spec": spec}


def _jobset(job):
    """Returns a JobSet, which restarts all tasks together."""
    role = "task"
    spec = _job_spec(job, f"{job.name}-{role}-0-{{}}.{job.name}")
    spec["backoffLimit"] = 0
    # The reason of a failure tells the JobSet whether to count the restart.
    spec["podFailurePolicy"] = {
        "rules": [{"action": "FailJob", **_DISRUPTED}, {"action": "FailJob", **_ended_with(SAVED)}]
    }
    rules = [
        ("saved", "RestartJobSetAndIgnoreMaxRestarts", "PodFailurePolicy"),
        ("timeout", "FailJobSet", "DeadlineExceeded"),
    ]
    jobset = {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": job.name,
            "publishNotReadyAddresses": True,
        },
        "failurePolicy": {
            "maxRestarts": job.max_restarts,
            "rules": [
                {"name": name, "action": action, "onJobFailureReasons": [reason]}
                for name, action, reason in rules
            ],
        },
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
        "replicatedJobs": [{"name": role, "replicas": 1, "template": {"spec": spec}}],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _queued(job),
        "spec": jobset,
    }


def _tfjob(job):
    """Returns a TFJob, whose operator sets TF_CONFIG itself and counts every restart."""
    names = {"chief": "Chief", "worker": "Worker", "ps": "PS"}
    replicas = {}
    for role, count in job.tasks.items():
        template = _pod(job)
        template["spec"].pop("restartPolicy")  # the operator's
        (container,) = template["spec"]["containers"]
        container["name"] = "tensorflow"
        container["ports"] = [{"containerPort": PORT, "name": "tfjob-port"}]
        # ExitCode would not restart a task whose peer has failed, which ends with 1 or 75.
        replicas[names[role]] = {
            "replicas": count,
            "restartPolicy": "OnFailure",
            "template": template,
        }
    policy = {
        "backoffLimit": job.max_restarts * job.num_machines,
        **_time_limit(job),
        "cleanPodPolicy": "Running",
        "ttlSecondsAfterFinished": _KEPT_SECONDS,
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": _metadata(job),
        "spec": {"runPolicy": policy, "tfReplicaSpecs": replicas},
    }


def _job_spec(job, host):
    """Returns what a Job has alone and in a JobSet; `host` is the host name of a pod's index."""
    template = _pod(job)
    if job.num_machines > 1:
        hosts = ",".join(host.format(index) for index in range(job.num_machines))
        (container,) = template["spec"]["containers"]
        container["env"].append({"name": HOSTS_VARIABLE, "value": hosts})
    return {
        "completionMode": "Indexed",
        "completions": job.num_machines,
        "parallelism": job.num_machines,
        **_time_limit(job),
        # The first task decides; parameter servers would run on.
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": template,
    }


def _time_limit(job):
    if job.time_limit_hours is None:
        return {}
    return {"activeDeadlineSeconds": round(job.time_limit_hours * 3600)}


def _queued(job):
    metadata = _metadata(job)
    if "queue" in job.options:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = job.options["queue"]
    return metadata


# Pods that Kubernetes evicts or preempts.
_DISRUPTED = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _ended_with(*codes):
    return {"onExitCodes": {"operator": "In", "values": list(codes)}}


def _pod(job):
    """Returns the template of a pod."""
    claim = job.options.get("claim")
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}] if claim else []
    if job.machine.num_devices > 1:  # NCCL needs more shared memory than the 64 MiB of a container
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory"}})
    paths = {"runs": job.options.get("mount", "/runs"), "shared-memory": "/dev/shm"}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_seconds,
        # A program is then not process 1, which ignores SIGTERM unless it handles it.
        "shareProcessNamespace": True,
        "automountServiceAccountToken": "service_account" in job.options,
        "enableServiceLinks": False,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        **_nodes(job),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(job)},
            }
        ],
        "containers": [_container(job, {each["name"]: paths[each["name"]] for each in volumes})],
    }
    if volumes:
        spec["volumes"] = volumes
    if "service_account" in job.options:
        spec["serviceAccountName"] = job.options["service_account"]
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _container(job, mounts):
    command = job.arguments()
    if job.setup:
        command = ["sh", "-c", f'set -e\n{job.setup}\nexec "$@"\n', "task", *command]
    memory = {"memory": job.options.get("memory", "8Gi")}
    cores = job.options.get("cpu")
    # All GPUs of a machine are requested, so its cores are not shared; a part of them is for the
    # node's own pods.
    cores = cores or (f"{job.machine.cores * 800}m" if job.machine.cores else "1")
    gpus = {"nvidia.com/gpu": job.machine.num_devices} if job.machine.num_devices else {}
    token = {"name": _secret(job), "key": "token", "optional": True}
    container = {
        "name": "task",
        "image": job.image,
        "command": command,
        "env": [
            *({"name": name, "value": text} for name, text in job.variables.items()),
            {"name": TOKEN_VARIABLE, "valueFrom": {"secretKeyRef": token}},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": {"cpu": cores, **memory}, "limits": {**memory, **gpus}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if mounts:
        container["volumeMounts"] = [
            {"name": name, "mountPath": path} for name, path in mounts.items()
        ]
    return container


def _nodes(job):
    """Returns the labels and taints of the nodes."""
    machine = job.machine
    labels = {
        "node.kubernetes.io/instance-type": machine.name if machine.cloud else "",
        "topology.kubernetes.io/region": machine.region if machine.cloud else "",
    }
    tolerations = []
    if machine.num_devices:
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists"})
        if machine.cloud == "gcp":
            labels["cloud.google.com/gke-accelerator"] = _GKE_GPUS.get(machine.device, "")
    if job.spot and machine.cloud in _SPOT_LABELS:
        key, value = _SPOT_LABELS[machine.cloud]
        labels[key] = value
        tolerations.append({"key": key, "operator": "Exists"})
    own = (part.partition("=") for part in job.options.get("selector", "").split(",") if part)
    labels |= {label: value for label, _, value in own}
    chosen = {label: value for label, value in labels.items() if value}
    found: dict[str, Any] = {"nodeSelector": chosen} if chosen else {}
    return {**found, "tolerations": tolerations} if tolerations else found


def _json(command):
    return json.loads(call(command) or "{}")


def _get(flavor, name):
    """Returns the object of a job of kdist, or {}."""
    command = ["kubectl", "get", f"{_RESOURCES[flavor]}/{name}", "--ignore-not-found", "-o", "json"]
    try:
        found = _json(command)
    except RuntimeError as error:
        if "the server doesn't have a resource type" in str(error):
            return {}  # a flavor whose operator is not installed
        raise
    labels = found.get("metadata", {}).get("labels", {})
    return found if labels.get(_MANAGER_LABEL) == "kdist" else {}


def _conditions(found):
    conditions = found.get("status", {}).get("conditions") or ()
    return [each for each in conditions if each.get("status") == "True"]


_STATES = {
    "Complete": "done",
    "Completed": "done",
    "Succeeded": "done",
    "SuccessCriteriaMet": "running",
    "Failed": "failed",
}


def _is_end(condition):
    return _STATES.get(condition["type"]) in ("done", "failed")


def _status(found):
    status = found.get("status", {})
    for condition in _conditions(found):
        if _is_end(condition):
            words = [condition.get("reason", ""), condition.get("message", "")]
            return Status(_STATES[condition["type"]], ": ".join(filter(None, words)))
    restarts = status.get("restarts", status.get("failed"))
    running = status.get("active") or status.get("replicatedJobsStatus") or _conditions(found)
    ready = status.get("ready")
    if found["spec"].get("suspend") or not running or ready == 0:
        return Status("pending", "no pod is ready yet", restarts)
    pods = f"{ready} of {_num_pods(found['spec'])} pods are ready" if ready is not None else ""
    return Status("running", pods, restarts)


def _num_pods(spec):
    """Returns the number of pods of a Job, JobSet, or TFJob."""
    if "replicatedJobs" in spec:
        return sum(each["template"]["spec"]["completions"] for each in spec["replicatedJobs"])
    if "tfReplicaSpecs" in spec:
        return sum(each["replicas"] for each in spec["tfReplicaSpecs"].values())
    return spec["completions"]


def _now():
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(text):
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
