"""The networks of `kdist.models` in PyTorch; images are uint8 (B, 1, 28, 28), outputs logits."""

import torch
from torch import nn


class Scaled(nn.Sequential):
    """Layers on pixels that are scaled from 0–255 to 0–1 on the device."""

    def forward(self, images):
        return super().forward(images.to(torch.float32) * (1 / 255))


class Residual(nn.Module):
    """Two 3×3 convolutions and a shortcut, which halves the image if they do."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters, 3, stride, padding=1),
            nn.BatchNorm2d(filters),
            nn.ReLU(inplace=True),
            nn.Conv2d(filters, filters, 3, padding=1),
            nn.BatchNorm2d(filters),
        )
        self.shortcut = nn.Conv2d(channels, filters, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu_(self.body(x) + self.shortcut(x))


def mlp():
    return Scaled(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(inplace=True), nn.Linear(256, 10))


def lenet():
    return Scaled(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(inplace=True), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(inplace=True)),
        *(nn.Linear(120, 84), nn.ReLU(inplace=True), nn.Linear(84, 10)),
    )


def resnet18():
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    channels = 64
    for filters in (64, 128, 256, 512):
        layers.append(Residual(channels, filters, 1 if filters == channels else 2))
        layers.append(Residual(filters, filters, 1))
        channels = filters
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Scaled(*layers, *pool, nn.Linear(512, 10))


BUILDERS = {builder.__name__: builder for builder in (mlp, lenet, resnet18)}
