"""Runs the trials of an Optuna study in processes of their own. Imports no TensorFlow."""

import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence

import optuna
from optuna.trial import TrialState

from kdist.launch.task_group import signal_name

_logger = logging.getLogger(__name__)

# A child must not inherit TensorFlow's threads and devices.
_context = multiprocessing.get_context("spawn")


def run_trials(
    objective: Callable[[optuna.Trial], float | Sequence[float]],
    study: optuna.Study,
    trials: int,
    processes: int = 1,
    timeout_s: float | None = None,
):
    """Runs a study until it has a number of trials, each in a new process.

    A trial that raises an exception, crashes, or is killed, such as for lack of memory, is recorded
    as failed, and the search continues. Another call with the same study continues the search:
    finished trials count, also failed and pruned ones. Trials that a killed search left running are
    recorded as failed first, so only one search of a study may run at a time.

    A new process takes some seconds to import TensorFlow. Trials that run at the same time share
    the devices of the machine. Every process seeds the study's sampler again, so a seed of the
    sampler does not make the search repeatable.

    Args:
        objective: Function of an `optuna.Trial` that returns the value of the trial, or raises
            `optuna.TrialPruned`. It must be importable: defined at the top level of a module or
            script. A script calls `run_trials` below `if __name__ == "__main__":`.
        study: The study, in a storage that processes share, such as `"sqlite:///search.db"`.
        trials: Total number of trials, including finished ones.
        processes: Number of trials that run at the same time. Defaults to 1.
        timeout_s: Seconds after which no further trial starts; those that run finish. Defaults to
            None: no limit.

    Raises:
        ValueError: The study is in memory, or `processes` is less than 1.
        TypeError: The objective cannot be imported by another process, such as a lambda.

    Example:

        study = optuna.create_study(
            storage="sqlite:///search.db", study_name="lenet", load_if_exists=True
        )
        run_trials(objective, study, trials=20, processes=2)
        print(study.best_params)
    """
    if processes < 1:
        raise ValueError(f"run_trials(processes={processes}): give 1 or more")
    _check_shared(study)
    _check_importable(objective)
    for left_over in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        _logger.warning("trial %d was interrupted", left_over.number)
        study.tell(left_over.number, state=TrialState.FAIL)
    missing = trials - sum(t.state.is_finished() for t in study.get_trials(deepcopy=False))
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    running: list[tuple] = []
    try:
        while True:
            while missing > 0 and len(running) < processes and time.monotonic() < deadline:
                trial = study.ask()
                process = _context.Process(target=_run_trial, args=(objective, trial))
                process.start()
                running.append((process, trial))
                missing -= 1
            if not running:
                return
            multiprocessing.connection.wait([process.sentinel for process, _ in running])
            for ended in [each for each in running if not each[0].is_alive()]:
                running.remove(ended)
                _record_end(study, *ended)
    finally:  # after an exception, such as KeyboardInterrupt
        for process, trial in running:
            process.kill()
            _record_end(study, process, trial)


def _check_shared(study):
    storage = study._storage
    url = str(getattr(getattr(storage, "_backend", None), "url", ""))
    if isinstance(storage, optuna.storages.InMemoryStorage) or (
        url.startswith("sqlite") and (":memory:" in url or url.endswith("//"))
    ):
        raise ValueError(
            "run_trials: the study is in memory, which processes do not share. Create it with "
            f'optuna.create_study(storage="sqlite:///search.db", study_name={study.study_name!r}, '
            "load_if_exists=True)"
        )


def _check_importable(objective):
    try:
        pickle.dumps(objective)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_trials: a new process cannot import the objective {objective!r} ({error}). "
            "Define it with def at the top level of a module, not as a lambda or within a function"
        ) from error


def _run_trial(objective, trial):
    """Runs one trial in its process, and records its value."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    trial.study.sampler.reseed_rng()  # otherwise all processes draw the same parameters
    try:
        value = objective(trial)
    except optuna.TrialPruned as reason:
        _logger.info("trial %d is pruned: %s", trial.number, reason)
        trial.study.tell(trial, state=TrialState.PRUNED)
    else:
        trial.study.tell(trial, value)


def _exit_with_parent():
    """Ends this process if the search is killed, since nothing would wait for the trial."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _record_end(study, process, trial):
    """Waits for the process of a trial, and records a failure if it did not record its value."""
    process.join()
    recorded = study.get_trials(deepcopy=False)[trial.number]
    if recorded.state.is_finished():
        _logger.info("trial %d: %s %s", trial.number, recorded.state.name, recorded.values)
        return
    code = process.exitcode
    end = signal_name(-code) if code < 0 else f"exit code {code}"
    _logger.warning("trial %d failed: its process ended with %s", trial.number, end)
    study.tell(trial, state=TrialState.FAIL)
