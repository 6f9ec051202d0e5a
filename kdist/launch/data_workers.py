"""Data workers of a job on this machine: processes that prepare the batches of its tasks."""

import pathlib
from collections.abc import Mapping, Sequence

from kdist.cluster import Cluster
from kdist.hardware import VISIBLE_DEVICES
from kdist.launch.task import Task


class DataWorker(Task):
    """A process of `kdist data_worker`, which serves until the tasks that train have ended.

    If it fails, the job fails: its tasks would wait for the next batch.
    """

    only_serves = True
    trains = False

    def __init__(
        self, index: int, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path
    ):
        # It is no task of the cluster, and GPUs are for those that are.
        super().__init__(Cluster(), command, {**environment, VISIBLE_DEVICES: "-1"}, log)
        self._index = index

    @property
    def name(self) -> str:
        """The name in the output, such as "data worker 1"."""
        return f"data worker {self._index}"
