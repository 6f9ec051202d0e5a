"""The parts of the comparison: their trials, and the goals for their ratios."""

import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.clusters import brake
from benchmarks.clusters.jobs import Trial
from benchmarks.rivals.cluster_workload import ClusterWorkload

LOCAL_BATCH_SIZE = 32
# Its steps take long compared with its messages.
HEAVY_BATCH_SIZE = 1024
LOCAL_STEPS = 8
# After each call the workers exchange their metrics, which costs a message.
NETWORK_STEPS_PER_CALL = 16
RATE_MBIT = 100

_ALONE, _TWO_WORKERS = {"worker": 1}, {"worker": 2}
_WITH_SERVER = {"chief": 1, "worker": 2, "ps": 1}


@dataclasses.dataclass(frozen=True)
class Goal:
    """A number computed from two trials within one repetition.

    Attributes:
        what: description.
        ours, theirs: names of the trials.
        target: description of the target.
        at_least: the target; None if the number is only shown.
        quantity: the compared quantity of an answer. Rates are compared by their ratio, accuracies
            by their difference in points.
    """

    what: str
    ours: str
    theirs: str
    target: str
    at_least: float | None = None
    quantity: str = "examples_per_second"

    def value(self, ours: Mapping, theirs: Mapping) -> float:
        """Returns the number for two answers."""
        if self.quantity == "accuracy":
            return 100 * (ours["accuracy"] - theirs["accuracy"])
        return ours[self.quantity] / theirs[self.quantity]


@dataclasses.dataclass(frozen=True)
class Part:
    """One comparison.

    Attributes:
        title: a few words.
        about: what a reader of the table has to know.
        trials: trials by the names that the table shows.
        goals: goals for their numbers.
        on_hosts: whether the tasks of a trial run on two hosts with a slow link.
    """

    title: str
    about: str
    trials: Mapping[str, Trial]
    goals: Sequence[Goal]
    on_hosts: bool = False


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Amount of training.

    Attributes:
        steps: steps per epoch; None for each part's own number.
        steps_per_call: compared values, for parts that compare several.
        epochs: epochs of the part with a slow link, the first of which is not timed.
        local_steps: steps of local SGD; 0 omits it.
        rate_mbit: rate of the slow link, in Mbit/s.
    """

    steps: int | None = None
    steps_per_call: Sequence[int] = (1, 16)
    epochs: int = 3
    local_steps: int = LOCAL_STEPS
    rate_mbit: int = RATE_MBIT


def multi_worker(sizes: Sizes) -> Part:
    """Compares two processes with one process that has two devices."""
    trials, goals = {}, []
    for calls in sizes.steps_per_call:
        workload = ClusterWorkload(
            "mirrored", LOCAL_BATCH_SIZE, sizes.steps or 480, 2, calls, devices=2
        )
        ours, theirs = f"multi_worker, {calls} per call", f"mirrored, {calls} per call"
        trials[theirs] = Trial("kdist_cluster", workload, _ALONE)
        apart = dataclasses.replace(workload, strategy="multi_worker", devices=None)
        trials[ours] = Trial("kdist_cluster", apart, _TWO_WORKERS)
        what = f"multi_worker's rate relative to mirrored, {calls} per call"
        goals.append(Goal(what, ours, theirs, "≥ 0.7", 0.7))
    about = (
        f"LeNet, {LOCAL_BATCH_SIZE} × 2: two processes with a device each, on loopback, and one "
        "process with two logical CPU devices."
    )
    return Part("multi_worker and mirrored", about, trials, goals)


def parameter_server(sizes: Sizes) -> Part:
    """Compares kdist with Keras 2, the last version with parameter servers."""
    trials, goals = {}, []
    for calls in sizes.steps_per_call:
        workload = ClusterWorkload(
            "parameter_server", LOCAL_BATCH_SIZE, sizes.steps or 480, 2, calls
        )
        ours, theirs = f"kdist, {calls} per call", f"tf-keras, {calls} per call"
        trials[ours] = Trial("kdist_cluster", workload, _WITH_SERVER)
        trials[theirs] = Trial("tf_keras_cluster", workload, _WITH_SERVER)
        goals.append(Goal(f"kdist is × as fast, {calls} per call", ours, theirs, "≥ 1.5", 1.5))
    about = (
        f"LeNet, a step computes {LOCAL_BATCH_SIZE} examples on one of two workers; one parameter "
        "server, one chief, on loopback. Steps and examples are those of both workers together."
    )
    return Part("parameter_server and tf-keras", about, trials, goals)


def slowed(sizes: Sizes) -> Part:
    """Slows one of two workers fourfold."""
    apart = ClusterWorkload("parameter_server", HEAVY_BATCH_SIZE, sizes.steps or 120)
    together = dataclasses.replace(apart, strategy="multi_worker", steps=sizes.steps or 40)
    alone = dataclasses.replace(together, strategy="one_device")
    trials: dict[str, Trial] = {}
    for name, workload, tasks, victim in (
        ("a worker alone", alone, _ALONE, "worker 0"),
        ("parameter_server", apart, _WITH_SERVER, "worker 1"),
        ("multi_worker", together, _TWO_WORKERS, "worker 1"),
    ):
        trials[name] = Trial("kdist_cluster", workload, tasks)
        trials[f"{name}, slowed"] = Trial("kdist_cluster", workload, tasks, victim)
    goals = [
        Goal(f"{name}: remaining fraction of its rate", f"{name}, slowed", name, target, at_least)
        for name, target, at_least in (
            ("a worker alone", "0.25; more if other programs use the cores", None),
            ("parameter_server", "≥ 0.6", 0.6),
            ("multi_worker", "about 0.25: all workers wait for the slowest", None),
        )
    ]
    milliseconds = brake.RUNNING_SECONDS * 1000, brake.PERIOD_SECONDS * 1000
    about = (
        f"LeNet, {HEAVY_BATCH_SIZE} examples per worker. Worker 1 of two is slowed once training "
        "is warm: its process is stopped by SIGSTOP and continued by SIGCONT, so that it runs "
        f"{milliseconds[0]:.0f} ms of every {milliseconds[1]:.0f}. A worker alone shows its effect."
    )
    return Part("one of two workers slowed fourfold", about, trials, goals)


def network(sizes: Sizes) -> Part:
    """Compares synchronous training with local SGD on a slow link."""
    synchronous = ClusterWorkload(
        "multi_worker",
        LOCAL_BATCH_SIZE,
        sizes.steps,
        sizes.epochs - 1,
        NETWORK_STEPS_PER_CALL,
        dataset="fashion_mnist",
        learning_rate=0.05,
    )
    trials = {"synchronous": Trial("kdist_cluster", synchronous, _TWO_WORKERS)}
    local = f"local SGD, {sizes.local_steps} steps"
    goals = [
        Goal("local SGD is × as fast", local, "synchronous", "≥ 3", 3.0),
        Goal(
            "accuracy of local SGD minus the other's, in points",
            *(local, "synchronous", "within 0.5", -0.5, "accuracy"),
        ),
    ]
    if sizes.local_steps:
        apart = dataclasses.replace(synchronous, local_steps=sizes.local_steps)
        trials[local] = Trial("kdist_cluster", apart, _TWO_WORKERS)
    about = (
        f"LeNet on Fashion-MNIST, {LOCAL_BATCH_SIZE} × 2, {sizes.epochs} epochs, the rate without "
        "the first; two processes in network namespaces, joined by a veth pair of "
        f"{sizes.rate_mbit} Mbit/s in either direction (tc tbf)."
    )
    return Part(f"a link of {sizes.rate_mbit} Mbit/s", about, trials, goals, on_hosts=True)


PARTS = {
    "multi_worker": multi_worker,
    "parameter_server": parameter_server,
    "slowed": slowed,
    "network": network,
}
