"""The host: its device, and the test whether a tensor is on it."""

from __future__ import annotations

import torch
from torch import Tensor

# The device of numbers that Python reads; explicit because a user may have set another default device.
HOST = torch.device("cpu")


def on_host(tensor: Tensor) -> bool:
    """Return whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"
