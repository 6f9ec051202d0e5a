"""Ends a job in which a task hangs, if no launcher reads the heartbeats of its tasks.

    watch(cluster, collector, limit=60)              # in the first task
    attend(cluster, port, token, ending(cluster))    # in the others

The heartbeats of all tasks arrive at the collector of the first task. That task names the one that
hangs, by the rules of `kdist.launch.supervision`, and commands all tasks to end with exit code 75.
The engine then restarts the job. A process that is stopped does not hear the command; its engine
ends it.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from kdist.cluster import Cluster, heartbeat
from kdist.exit_codes import PEER_HANGS
from kdist.launch.supervision import LIMIT_VARIABLE, SupervisedTask, Supervision
from kdist.telemetry.devices.collector import Collector
from kdist.training.strategy_setup import abort_steps

_logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
# Time to release files and copies after the steps have been aborted, and that of the task that
# hangs, which rarely gets to it.
_SECONDS_TO_END, _SECONDS_TO_END_HUNG = 30.0, 5.0


def watch(cluster: Cluster, collector: Collector, limit: float):
    """Starts to supervise all tasks of a job in its first task, in a background thread.

    Args:
        cluster: The job, as seen by its first task.
        collector: Collector of the first task, which the others connect to.
        limit: Limit of a step and of silence in seconds, see `Supervision`; 0 for none.
    """
    if not limit or cluster.is_alone:
        return
    tasks = {task.name: SupervisedTask(task) for task in cluster.all_tasks()}

    def note(name, beat):
        if name not in tasks:
            return
        if beat is None:  # disconnected: its own error, or its engine, ends the job
            tasks[name].returncode = 0
        else:
            tasks[name].note_beat(beat)

    heartbeat.add_receiver(tasks[cluster.name].note_beat)
    collector.pass_heartbeats(note)
    supervision = Supervision(list(tasks.values()), limit)

    def end(hung, reason):
        collector.end_tasks(hung, reason)
        end_process(cluster, hung, reason)

    threading.Thread(
        target=_supervise, args=(supervision, end), name="kdist-hangs", daemon=True
    ).start()


def ending(cluster: Cluster) -> Callable[[str, str], None]:
    """Returns the function that ends this task once the first one has found a task that hangs."""
    return lambda hung, reason: end_process(cluster, hung, reason)


def _supervise(supervision, end):
    found = None
    while found is None:
        time.sleep(_POLL_SECONDS)
        for line in supervision.news():
            _logger.warning("%s", line)
        found = supervision.hung()
    task, reason = found
    end(task.name, reason)


def end_process(cluster: Cluster, hung: str, reason: str):
    """Ends this process with exit code 75, within half a minute.

    Args:
        cluster: The job, as seen by this task.
        hung: Name of the task that hangs. If it is this one, its stack is printed.
        reason: What it did, such as "was between steps, after step 5 for 60 s".
    """
    message = f"{hung} hung: it {reason} (more time: {LIMIT_VARIABLE})"
    _logger.error("%s; ending %s", message, cluster.name)
    is_this = hung == cluster.name
    if is_this and sys.__stderr__ is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
            faulthandler.dump_traceback(sys.__stderr__)
    try:
        abort_steps(message)
        time.sleep(_SECONDS_TO_END_HUNG if is_this else _SECONDS_TO_END)
    finally:
        os._exit(PEER_HANGS)
