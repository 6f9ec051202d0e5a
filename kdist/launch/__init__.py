"""Starting the tasks of a job: on this machine, from a terminal or from a notebook.

    python scripts/launch.py --workers=2 -- scripts/train.py --strategy=multi_worker

    result = kdist.launch.local(function, workers=2)    # function() in each task

A `Task` is a process, a `Job` the rules by which tasks begin and end together. `here` makes the job
on this machine: addresses, GPUs, threads. Nothing here imports TensorFlow.
"""

from kdist.launch.calls import TaskFailed, local

__all__ = ["TaskFailed", "local"]
