"""Optuna studies whose trials are processes of their own, which share out the devices of a host.

    study = optuna.create_study(direction="maximize")
    kdist.tuning.optuna.optimize(study, objective, "runs/search", num_trials=40, workers=2)

A trial is this module as a program, `python -m kdist.tuning.optuna DESCRIPTOR CALL`. CALL is a file
with the pickled objective. The objective's trial forwards each call through a pipe, DESCRIPTOR, to
the process of the study, which alone uses the sampler, the pruner, and the storage. TensorFlow is
imported in the trials only.
"""

import contextlib
import logging
import math
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from kdist.cluster import Cluster
from kdist.hardware import VISIBLE_DEVICES, find_gpus
from kdist.launch.function_job import with_module_paths
from kdist.launch.local_engine import share_gpus, share_threads
from kdist.launch.task_group import signal_name
from kdist.launch.watchdog import MARKS_VARIABLE, Watchdog, signal_group, tied_command, with_mark
from kdist.run_directory import FileLock, RunDirectory, check_local

try:
    import optuna
    from optuna.trial import TrialState
except ImportError as error:
    raise ImportError(
        f"kdist.tuning.optuna needs Optuna: pip install 'kdist[optuna]' ({error})"
    ) from error

__all__ = ["optimize"]

# User attributes of a trial: its run directory, and why it failed. A trial that failed without a
# reason was interrupted, and is repeated.
RUN_DIRECTORY, FAILURE = "run_directory", "failure"

_logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
# Time that a trial has to exit after its objective has returned, such as for uploads.
_EXIT_SECONDS = 30.0
_END = "end"  # first part of the last message of a trial


def optimize(
    study: "optuna.Study",
    objective: Callable[[Any], Any],
    directory: str | os.PathLike,
    num_trials: int,
    *,
    workers: int = 1,
    share_gpus: bool = False,
    trial_seconds: float | None = None,
    search_seconds: float | None = None,
) -> None:
    """Runs trials of an Optuna study, each in a process of its own.

    A trial that raises, crashes, is killed, or runs out of memory fails, and the search continues.
    Trials that run at the same time share out the GPUs and the cores of this host. Call it again
    after the search was killed, with a study in a storage on disk: it runs the missing trials, and
    first repeats those that were interrupted. A sampler that has tried everything, such as
    `GridSampler`, ends the search.

    Each trial has a run directory, `DIRECTORY/trial-0007`, for `kdist.callbacks.Telemetry`. It gets
    the output of the trial, `trial.log`, and its parameters and result. `kdist report DIRECTORY`
    compares the trials.

    Args:
        study: study with its sampler, pruner, and storage.
        objective: function that receives a trial and returns its value, or values. It is pickled,
            with the variables that it uses. The trial has the methods and properties of
            `optuna.Trial`, and its run directory as `trial.user_attrs["run_directory"]`.
        directory: directory of the run directories of this study; created if missing.
        num_trials: number of trials of the study that shall have ended, with those of earlier
            calls.
        workers: number of trials that run at the same time. Defaults to 1.
        share_gpus: whether several trials may share one GPU. Defaults to False.
        trial_seconds: time after which a trial is killed, and fails. Defaults to None, no limit.
        search_seconds: time after which no further trial starts; those that run finish. Defaults
            to None, no limit.

    Raises:
        RuntimeError: If all trials of this call failed.
        ValueError: If there are more workers than GPUs without `share_gpus`, or none, or if the
            directory is a URL.
        FileExistsError: If another search uses the directory, or if it has trials of another study.

    Example:

        def objective(trial):
            rate = trial.suggest_float("rate", 1e-4, 1, log=True)
            return train(rate, run_directory=trial.user_attrs["run_directory"])

        study = optuna.create_study(storage="sqlite:///a.db", study_name="a", load_if_exists=True)
        kdist.tuning.optuna.optimize(study, objective, "runs/a", num_trials=40, workers=2)
        print(study.best_params)
    """
    if workers < 1:
        raise ValueError(f"workers={workers}; a search needs at least one")
    check_local(directory)
    parent = pathlib.Path(directory).resolve()
    parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    shares = _shares(workers, share_gpus)
    for share in shares:
        share[MARKS_VARIABLE] = with_mark(os.environ, mark)
    with _locked(parent), tempfile.TemporaryDirectory(prefix="kdist-") as scratch:
        call = pathlib.Path(scratch) / "call"
        call.write_bytes(cloudpickle.dumps(objective))
        _check_trials(study, parent)
        _repeat_interrupted(study, parent)
        with Watchdog(mark) as watchdog:
            search = _Search(study, parent, call, watchdog, trial_seconds, search_seconds)
            search.run(shares, num_trials)


def _deadline(seconds):
    return math.inf if seconds is None else time.monotonic() + seconds


def _shares(workers, may_share_gpus):
    """Returns the environment of each worker, with its share of the GPUs and the cores."""
    # Nothing listens at the addresses.
    addresses = [f"127.0.0.1:{place + 1}" for place in range(workers)]
    tasks = Cluster({"worker": addresses}).all_tasks()
    gpus = share_gpus(tasks, find_gpus(os.environ), may_share_gpus)
    environment = {**with_module_paths(), **share_threads(tasks, os.environ)}
    return [
        environment | ({VISIBLE_DEVICES: gpus[task.name]} if task.name in gpus else {})
        for task in tasks
    ]


@contextlib.contextmanager
def _locked(directory):
    try:
        lock = FileLock(directory)
    except BlockingIOError as error:
        raise FileExistsError(
            f"another search uses {directory}; wait for it, or use another directory"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _name(number):
    """Returns the name of the run directory of a trial."""
    return f"trial-{number:04d}"


def _check_trials(study, parent):
    """Checks that all trials in a directory belong to the study, whose numbers are their names."""
    started = study.get_trials(deepcopy=False)
    own = {_name(trial.number) for trial in started if RUN_DIRECTORY in trial.user_attrs}
    for path in sorted(parent.glob("trial-[0-9]*")):
        if path.name not in own:
            raise FileExistsError(
                f"{path} is a trial of another study; use another directory, or continue that "
                "study: create it with a storage on disk and load_if_exists=True"
            )


def _repeat_interrupted(study, parent):
    """Ends trials that a killed search left running, and queues their parameters again."""
    if study.get_trials(deepcopy=False):
        study.sampler.reseed_rng()  # a seeded sampler would suggest the first values again
    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if pathlib.Path(trial.user_attrs.get(RUN_DIRECTORY, "")).parent != parent:
            continue
        with _calling(study, lambda: None):
            ended = study.tell(trial.number, state=TrialState.FAIL)
        _record(study, ended, "interrupted")
        # With parameters of a queued trial that the objective had not read yet, and the notes of
        # the sampler, such as the point of a grid.
        parameters = trial.system_attrs.get("fixed_params", {}) | trial.params
        if parameters:
            notes = {**trial.system_attrs, "fixed_params": parameters}
            study.add_trial(optuna.create_trial(state=TrialState.WAITING, system_attrs=notes))


@contextlib.contextmanager
def _calling(study, stop):
    """Lets samplers that have tried everything call `stop`.

    Optuna's own method, which they call, raises outside of `Study.optimize`.
    """
    study.stop = stop
    try:
        yield
    finally:
        del study.stop


class _Search:
    """The loop that starts trials and answers them."""

    def __init__(self, study, parent, call, watchdog, trial_seconds, search_seconds):
        self._study, self._parent, self._call = study, parent, call
        self._watchdog, self._trial_seconds = watchdog, trial_seconds
        self._deadline = _deadline(search_seconds)
        self._last_failure, self._has_succeeded = "", False

    def run(self, shares, num_trials):
        """Runs trials until the study has `num_trials`, one at a time in each share."""
        running: dict[int, _Process] = {}
        try:
            while self._fill(running, shares, num_trials):
                asking = [each.connection for each in running.values() if not each.outcome]
                ready = wait(asking, _POLL_SECONDS)
                for place, process in list(running.items()):
                    if outcome := process.step(process.connection in ready):
                        del running[place]
                        with _calling(self._study, self._stop):
                            self._end(process.trial, *outcome)
        finally:
            for process in running.values():
                process.kill()
        if self._last_failure and not self._has_succeeded:
            raise RuntimeError(f"all trials failed; the last one: {self._last_failure}")

    def _stop(self):
        # The sampler does not count queued trials, such as those that are repeated.
        if not self._study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
            self._deadline = -math.inf

    def _fill(self, running, shares, num_trials):
        """Starts as many trials as are missing and have a share; returns whether any runs."""
        trials = self._study.get_trials(deepcopy=False)
        missing = num_trials - sum(map(_counts, trials)) - len(running)
        free = [place for place in range(len(shares)) if place not in running]
        for place in free[: max(0, missing)]:
            if time.monotonic() >= self._deadline:
                break
            trial = self._study.ask()
            path = self._parent / _name(trial.number)
            trial.set_user_attr(RUN_DIRECTORY, str(path))
            process = _Process(trial, self._call, shares[place], path, self._trial_seconds)
            self._watchdog.guard(process.pid)
            running[place] = process
        return bool(running)

    def _end(self, trial, state, result):
        """Tells the study about the end of a trial, and records it in the run directory."""
        number = len(self._study.directions)
        if state is TrialState.COMPLETE and len(result) != number:
            state = TrialState.FAIL
            result = f"the objective returned {len(result)} values, and the study has {number}"
        if state is TrialState.FAIL:
            trial.set_user_attr(FAILURE, result)
            self._last_failure = f"trial {trial.number}: {result}"
            log = pathlib.Path(trial.user_attrs[RUN_DIRECTORY]) / "trial.log"
            _logger.warning("%s; its output is in %s", self._last_failure, log)
        else:
            self._has_succeeded = True
        values = result if state is TrialState.COMPLETE else None
        _record(self._study, self._study.tell(trial, values, state), state.name.lower())


def _counts(trial):
    """Returns whether a trial has ended by itself."""
    is_interrupted = trial.state is TrialState.FAIL and FAILURE not in trial.user_attrs
    return trial.state.is_finished() and not is_interrupted


def _record(study, trial, state):
    """Writes parameters and result to the run directory, where the report finds them."""
    names = study.metric_names or ["value"]
    facts = {"name": study.study_name, "trial": trial.number, "state": state}
    facts["parameters"] = trial.params
    if FAILURE in trial.user_attrs:
        facts[FAILURE] = trial.user_attrs[FAILURE]
    if len(study.directions) == 1:
        direction = study.direction.name.lower()
        facts |= {"objective": names[0], "direction": direction, "value": trial.value}
    is_complete = trial.state is TrialState.COMPLETE
    results = dict(zip(names, trial.values, strict=False)) if is_complete else None
    RunDirectory(trial.user_attrs[RUN_DIRECTORY]).record_trial(facts, results)


class _Process:
    """A trial that runs in a process of its own.

    `connection` receives its calls until it sends its `outcome`: a state, and values or a reason.
    """

    def __init__(self, trial, call, environment, path, seconds):
        self.trial = trial
        self.outcome: tuple | None = None
        self._deadline = _deadline(seconds)
        path.mkdir(parents=True, exist_ok=True)
        self.connection, theirs = multiprocessing.Pipe()
        program = [sys.executable, "-u", "-P", "-m", __name__, str(theirs.fileno()), str(call)]
        with theirs, open(path / "trial.log", "ab") as log:
            self._process = subprocess.Popen(
                tied_command(program),
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def step(self, is_ready: bool) -> tuple | None:
        """Answers a call of the trial; returns its state and result once it has ended."""
        has_ended = self._has_ended()  # before the last look at the pipe
        if self.outcome is None and (is_ready or self.connection.poll()):
            try:
                self._answer(*self.connection.recv())
                return None
            except (EOFError, OSError):
                has_ended = True
        if has_ended:
            code = self.kill()
            return self.outcome or (TrialState.FAIL, _end_of_process(code))
        if time.monotonic() > self._deadline:
            self.kill()
            return self.outcome or (TrialState.FAIL, "it took longer than trial_seconds")
        return None

    def _has_ended(self):
        # The process stays a zombie, so that no other group gets its id before `kill`.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _answer(self, name, arguments, options):
        if name == _END:
            self.outcome = arguments
            self._deadline = time.monotonic() + _EXIT_SECONDS
            return
        try:
            attribute = getattr(self.trial, name)
            answer = True, attribute(*arguments, **options) if callable(attribute) else attribute
            data = pickle.dumps(answer)
        except Exception as error:
            data = pickle.dumps((False, error))
        self.connection.send_bytes(data)

    def kill(self) -> int:
        """Ends the process and its children; returns its exit code."""
        signal_group(self.pid, signal.SIGKILL)
        self.connection.close()
        return self._process.wait()


def _end_of_process(code):
    if code >= 0:
        return f"its process ended with exit code {code}"
    return f"its process was ended by {signal_name(-code)}" + (
        ", as the kernel does when memory is exhausted" if code == -signal.SIGKILL else ""
    )


# In the process of a trial.


class _RemoteTrial:
    """A trial of a study in another process, with the interface of `optuna.Trial`."""

    def __init__(self, connection):
        self._connection = connection

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        if not callable(getattr(optuna.Trial, name)):
            return self._ask(name)
        return lambda *arguments, **options: self._ask(name, *arguments, **options)

    def _ask(self, name, *arguments, **options):
        self._connection.send((name, arguments, options))
        has_returned, value = self._connection.recv()
        if not has_returned:
            raise value
        return value


def main(descriptor: str, call: str):
    """Calls the pickled objective with a trial, and sends its result."""
    connection = Connection(int(descriptor))
    with contextlib.suppress(OSError):  # if memory is exhausted, the kernel ends the trial first
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        objective = pickle.loads(pathlib.Path(call).read_bytes())
        outcome = TrialState.COMPLETE, _values(objective(_RemoteTrial(connection)))
    except optuna.TrialPruned:
        outcome = TrialState.PRUNED, None
    except BaseException as error:  # also sys.exit() in the objective
        traceback.print_exc()
        outcome = TrialState.FAIL, f"{type(error).__name__}: {error}"
    connection.send((_END, outcome, {}))


def _values(returned):
    values = returned if isinstance(returned, list | tuple) else [returned]
    values = [float(value) for value in values]
    if any(map(math.isnan, values)):
        raise ValueError("the objective returned NaN")
    return values


if __name__ == "__main__":
    main(*sys.argv[1:])
