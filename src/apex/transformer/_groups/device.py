"""The device for parameters and buffers of a split model."""

from __future__ import annotations

import torch


def parameter_device() -> torch.device:
    """Return torch's default device if it is not the CPU, else the current GPU, else the CPU."""
    # torch.get_default_device of PyTorch 2.6 does not see `with torch.device(...)`.
    device = torch.nn.Parameter(torch.empty(0)).device
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device
