"""PyTorch's DistributedDataParallel: one process per replica, gradients summed by Gloo on loopback.

Cores are divided among the processes, with one thread per core. Running statistics of BatchNorm
are not broadcast, and gradients are views of the reduction buckets: DDP's fastest settings for
such a model.
"""

import os
import socket
import sys
import time

from benchmarks.rivals import workload

if __name__ == "__main__":
    given = workload.read()  # before PyTorch is imported

import torch
import torch.multiprocessing
from torch import distributed, nn

from benchmarks.rivals import torch_models


def main():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(replica, (given, port), nprocs=given.replicas)


def replica(rank, given, port):
    """Trains one replica in its process; the first one reports."""
    torch.set_num_threads(max(1, given.cores // given.replicas))
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", world_size=given.replicas, rank=rank
    )
    try:
        trainer = Trainer(given, rank)
        trainer.run()
        distributed.barrier()
        started = time.perf_counter()
        loss = trainer.run()
        distributed.barrier()
        seconds = time.perf_counter() - started
    finally:
        distributed.destroy_process_group()
    if rank == 0:
        workload.report(given, seconds, loss, {"PyTorch": torch.__version__})
    sys.stdout.flush()
    # Sometimes a process of PyTorch 2.15 with Gloo aborts at exit: "terminate called without an
    # active exception".
    os._exit(0)


class Trainer:
    """One replica's model, optimizer, and data."""

    def __init__(self, given, rank):
        self._given = given
        self._layout = torch.channels_last if given.channels_last else torch.contiguous_format
        model = torch_models.BUILDERS[given.model]().to(memory_format=self._layout)
        self._model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, static_graph=True
        )
        if given.compiled:
            self._model = torch.compile(self._model)
        self._optimizer = torch.optim.SGD(self._model.parameters(), workload.LEARNING_RATE)
        self._cross_entropy = nn.CrossEntropyLoss()
        self._batches = [self._batch(*arrays) for arrays in zip(*given.arrays(rank), strict=True)]

    def run(self):
        """Runs the steps and returns this replica's mean loss."""
        loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.int64)
        for step in range(self._given.steps):
            images, labels = self._batches[step % len(self._batches)]
            loss, logits = self._step(images, labels)
            loss_sum += loss.detach()
            correct += (logits.detach().argmax(1) == labels).sum()
        return loss_sum.item() / self._given.steps

    def _step(self, images, labels):
        self._optimizer.zero_grad()
        reduced = self._given.precision == "bfloat16"
        with torch.autocast("cpu", torch.bfloat16, enabled=reduced):
            logits = self._model(images)
            loss = self._cross_entropy(logits, labels)
        loss.backward()
        self._optimizer.step()
        return loss, logits

    def _batch(self, images, labels):
        images = torch.from_numpy(images).permute(0, 3, 1, 2)
        images = images.contiguous(memory_format=self._layout)
        return images, torch.from_numpy(labels).long()


if __name__ == "__main__":
    main()
