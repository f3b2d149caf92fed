"""Transforms of images: `Compose` makes a tensor of one, and the others do nothing."""

import enum

import numpy
import torch


class InterpolationMode(enum.Enum):
    """How images are resized."""

    BILINEAR = "bilinear"


class _Transform:
    def __init__(self, *args, **options):
        pass

    def __call__(self, image):
        """Return an image with values from -1 to 1, as channels, rows, columns."""
        return torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 127.5 - 1


Compose = Pad = RandomHorizontalFlip = RandomCrop = CenterCrop = ToTensor = Resize = Normalize = _Transform
