"""The host: its device, the test whether a tensor is on it, and the default device beside it."""

from __future__ import annotations

import torch
from torch import Tensor

# The device of numbers that Python reads; explicit because a user may have set another default device.
HOST = torch.device("cpu")


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def default_device() -> torch.device:
    """Return the device on which PyTorch makes new parameters.

    `torch.get_default_device` of PyTorch 2.6 does not see `with torch.device(...)`, and raises after
    `torch.set_default_device(None)`.
    """
    return torch.nn.Parameter(torch.empty(0)).device
