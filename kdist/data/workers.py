"""Data workers: processes, such as on other machines, that prepare the batches of a training.

    kdist launch --data_workers=2 -- kdist train …        # two processes of this machine

    kdist data_worker --port=5050 --allow_remote          # on each of other machines
    kdist train … --data_workers=cpu1:5050,cpu2:5050

Each is a service of tf.data. Worker i of n prepares the batches i, i + n, i + 2n, … of a pipeline,
and the training reads them in turn. Batch number s is a function of the seed and s alone, so that
a training has the same batches, each once, with any number of data workers.
"""

import dataclasses
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import tensorflow as tf

from kdist.cluster.remote_access import check_remote_access, restrict_to_loopback
from kdist.data.worker_addresses import addresses_of, check_answers, wait_until_answers
from kdist.exit_codes import PEER_HANGS

_logger = logging.getLogger(__name__)

_CHECK_SECONDS = 5.0
# A data worker that has not answered for this long is reported.
_SILENCE_SECONDS = 30.0
# Whether the process then ends, as in `kdist train`, which resumes. TensorFlow would wait forever.
ends_on_silence = False


def start(
    host: str, port: int, allow_remote: bool, batch_port: int | None = None
) -> tf.data.experimental.service.WorkerServer:
    """Starts a data worker in this process, at two ports.

    Args:
        host: this machine's name or address, as trainings reach it.
        port: port that trainings connect to.
        allow_remote: whether other machines may connect. TensorFlow's services have no
            authentication, so only the machines of the job should be able to.
        batch_port: port that batches are read from. Defaults to `port` + 1.

    Returns:
        The server; its `join()` waits until it ends.

    Raises:
        ValueError: other machines can reach `host`, and may not connect.
        RuntimeError: a port is in use.
    """
    service = tf.data.experimental.service
    first = addresses_of(host, port, batch_port)
    second = dataclasses.replace(first, index=1)
    check_remote_access(first, allow_remote)
    batch_port = batch_port or port + 1
    for each in (port, batch_port):
        try:
            socket.create_server(("", each)).close()
        except OSError as error:
            reason = os.strerror(error.errno or 0)
            raise RuntimeError(f"port {each}: {reason}; choose another --port") from None
    with restrict_to_loopback(first):
        dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    with restrict_to_loopback(second):
        config = service.WorkerConfig(first.address, second.address, batch_port)
        server = service.WorkerServer(config)
    server._kdist_dispatcher = dispatcher  # lives as long as the worker
    return server


def divided(
    batches: Callable[[tf.data.Dataset], tf.data.Dataset],
    first: int,
    last: int,
    addresses: Sequence[str],
) -> tf.data.Dataset:
    """Returns the batches of steps `first` to `last` - 1, in order, prepared by data workers.

    Args:
        batches: from a dataset of step numbers to the batches of these steps, in graph code.
        first: the first step.
        last: the step after the last one.
        addresses: addresses of the data workers.

    Raises:
        ConnectionError: a data worker does not answer.
    """
    service, count = tf.data.experimental.service, len(addresses)
    parts = []
    for number, address in enumerate(addresses):
        wait_until_answers(address)
        steps = tf.data.Dataset.range(first + number, last, count)
        parts.append(
            batches(steps).apply(
                service.distribute(
                    service.ShardingPolicy.OFF, f"grpc://{address}", compression=None
                )
            )
        )
    turns = tf.data.Dataset.range(count).repeat()
    dataset = tf.data.Dataset.choose_from_datasets(parts, turns, stop_on_empty_dataset=True)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(last - first))
    _watch(dataset, addresses)
    return dataset


def _watch(dataset, addresses):
    """Reports data workers that die, for as long as the dataset is in use."""
    is_over = threading.Event()
    weakref.finalize(dataset, is_over.set).atexit = False
    threading.Thread(
        target=_report_silence, args=(addresses, is_over), name="data workers", daemon=True
    ).start()


def _report_silence(addresses, is_over):
    answered = dict.fromkeys(addresses, time.monotonic())
    while not is_over.wait(_CHECK_SECONDS):
        for address in addresses:
            try:
                check_answers(address)
            except ConnectionError:
                silence = time.monotonic() - answered[address]
                if silence > _SILENCE_SECONDS:
                    _logger.error(
                        "the data worker %s has not answered for %.0f s, and the training waits "
                        "for it. Start it again; the same command then continues the training",
                        address,
                        silence,
                    )
                    if ends_on_silence:
                        os._exit(PEER_HANGS)
            else:
                answered[address] = time.monotonic()
