"""Times PyTorch on the same networks. Needs PyTorch, torchvision, and NumPy only."""

import contextlib
import time

import torch
import torchvision
from torch import nn

from benchmarks.gpu import spec

_WARM_UP_STEPS = 20


class Encoder(nn.Module):
    """The transformer of `keras_training.build`: for tokens, or for patches of images."""

    def __init__(self, size, tokens):
        super().__init__()
        length = size.shape[0] if tokens else (size.shape[0] // size.patch) ** 2
        self._enter = (
            nn.Embedding(size.vocabulary, size.width)
            if tokens
            else nn.Conv2d(3, size.width, size.patch, size.patch)
        )
        self._positions = nn.Parameter(torch.zeros(1, length, size.width))
        layer = nn.TransformerEncoderLayer(
            *(size.width, size.heads, 4 * size.width, 0.0, "gelu"),
            batch_first=True,
            norm_first=True,
        )
        self._blocks = nn.TransformerEncoder(layer, size.depth, nn.LayerNorm(size.width))
        self._classify = nn.Linear(size.width, size.classes)

    def forward(self, x):
        x = self._enter(x)
        if x.ndim == 4:
            x = x.flatten(2).transpose(1, 2)
        return self._classify(self._blocks(x + self._positions).mean(1))


def main(task: spec.Task):
    """Prints a row for each variant of the task."""
    for variant in task.variants:
        try:
            milliseconds, first = _measure(task, variant)
            version = torch.__version__
            spec.print_training(task, variant, milliseconds, first_seconds=first, version=version)
        except Exception as error:  # Such as a missing compiler: later variants still run.
            spec.print_failure(task, variant, error)


def _measure(task, variant):
    device = "cpu" if task.tiny else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = variant.precision != "float32"
    torch.backends.cudnn.allow_tf32 = variant.precision != "float32"
    torch.backends.cudnn.benchmark = True
    size = task.size
    if task.model in ("resnet50", "mobilenet_v2", "pooling"):
        model = (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, size.classes))
            if task.model == "pooling"
            else getattr(torchvision.models, task.model)(num_classes=size.classes)
        )
        shape = (size.batch, size.shape[2], *size.shape[:2])
        values = torch.rand(shape).contiguous(memory_format=torch.channels_last)
        model = model.to(device, memory_format=torch.channels_last)
    else:
        tokens = task.model == "transformer"
        model = Encoder(size, tokens).to(device)
        values = (
            torch.randint(size.vocabulary, (size.batch, *size.shape))
            if tokens
            else torch.rand((size.batch, 3, *size.shape[:2]))
        )
    labels = torch.randint(size.classes, (size.batch,))
    if device == "cuda":  # So that batches are copied while the device computes.
        values, labels = values.pin_memory(), labels.pin_memory()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    if variant.compiled:
        model = torch.compile(model)

    def run(steps):
        began = time.perf_counter()
        for _ in range(steps):
            # As in the other libraries, each step copies its batch to the device.
            x, y = (each.to(device, non_blocking=True) for each in (values, labels))
            optimizer.zero_grad()
            with (
                torch.autocast(device, torch.bfloat16)
                if variant.precision == "bfloat16"
                else contextlib.nullcontext()
            ):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        loss.item()  # Waits for the device.
        return time.perf_counter() - began

    first = run(1)
    warm_up = 2 if task.tiny else _WARM_UP_STEPS
    run(warm_up)
    seconds = run(warm_up) / warm_up
    steps = max(2, int(task.seconds / seconds))
    return run(steps) / steps * 1e3, first


if __name__ == "__main__":
    main(spec.read_task())
