"""The device for parameters and buffers of a split model."""

from __future__ import annotations

import torch


def parameter_device() -> torch.device:
    """Return torch's default device if it is not the CPU, else the current GPU, else the CPU."""
    try:
        device = torch.get_default_device()
    except AttributeError:  # PyTorch 2.6 after set_default_device(None)
        device = torch.device("cpu")
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
