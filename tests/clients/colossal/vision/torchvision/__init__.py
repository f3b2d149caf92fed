"""A stand-in for torchvision: random images in the shape of CIFAR-10, and a tiny convolutional network."""

from . import datasets, models, transforms  # noqa: F401
