"""The device for parameters and buffers of a split model."""

from __future__ import annotations

import torch

from ...ops._host import default_device


def parameter_device() -> torch.device:
    """Return torch's default device if it is not the CPU, else the current GPU, else the CPU."""
    device = default_device()
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
