"""Reads of divided state outside of steps, for which all workers have to meet.

Each worker has parts of the state. One that reads a whole weight alone would wait forever for those
of the others, and two that read different weights of one shape would exchange the wrong parts.
Therefore each worker publishes what it is about to read, and the first one answers.
"""

import json
import time

import tensorflow as tf

from kdist.cluster import heartbeat
from kdist.compat.tensorflow import first_replica, publish, published, withdraw
from kdist.training.scopes import num_local_replicas

# How to read what workers divide, for messages.
READ_WHOLE = (
    "in `with model.training_state.whole(): …`, which all workers call together (a keras.Model has "
    "it after kdist.Model.of(model) in strategy.scope())"
)
# Outside of steps, a worker may do other things before it reads.
_WAIT_SECONDS = 60.0
# The others wait longer for the answer of the first one, which waits for them.
_MORE_SECONDS = 5.0

_meetings = 0  # so far, equal on all workers but those that have missed some


def await_readers(strategy: tf.distribute.Strategy, what: str):
    """Returns when all workers are about to read the same state.

    Args:
        strategy: the strategy.
        what: the state, such as `"the slots of 'adam'"`.

    Raises:
        ValueError: some worker has not read it within a minute, or reads something else.
    """
    devices = num_local_replicas(strategy)
    worker, workers = first_replica(strategy) // devices, strategy.num_replicas_in_sync // devices
    with heartbeat.collective(f"reading {what}"):
        problem = _problem(worker, workers, what)
    if problem:
        raise ValueError(
            f"each worker has parts of {what}, and {problem}. Read it on all workers at the same "
            f"place of the program, or {READ_WHOLE}, or save the model by "
            "keras.callbacks.ModelCheckpoint or kdist.callbacks.EpochCheckpoint"
        )


def _problem(worker, workers, what):
    """Returns why a worker cannot read; an empty text once all read the same."""
    global _meetings
    while True:
        meeting = f"kdist_reads/{_meetings}"
        publish(f"{meeting}/{worker}", what)
        if worker == 0:
            answer = _answer(meeting, workers, what)
        else:
            text = published(f"{meeting}/answer", _WAIT_SECONDS + _MORE_SECONDS)
            if text is None:
                withdraw(f"{meeting}/{worker}")
                return f"worker 0 has not read it within {_WAIT_SECONDS:g} s"
            answer = json.loads(text)
        _meetings += 1
        if worker not in answer["missing"]:  # or else this is the read after the one it has missed
            return answer["problem"]


def _answer(meeting, workers, what):
    """Publishes, on the first worker, what has become of a meeting, and returns it."""
    deadline = time.monotonic() + _WAIT_SECONDS
    missing, problems = [], []
    for worker in range(1, workers):
        found = published(f"{meeting}/{worker}", deadline - time.monotonic())
        if found is None:
            missing.append(worker)
            problems.append(f"worker {worker} has not read it within {_WAIT_SECONDS:g} s")
        elif found != what:
            problems.append(f"worker {worker} reads {found}")
    answer = {"missing": missing, "problem": ", ".join(problems)}
    publish(f"{meeting}/answer", json.dumps(answer))
    if not missing and _meetings:  # nobody needs the one before any more
        withdraw(f"kdist_reads/{_meetings - 1}")
    return answer
