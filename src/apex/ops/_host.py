"""The host: which tensors are there."""

from __future__ import annotations

import torch
from torch import Tensor

# Where numbers are that Python reads; named because a user may have chosen another default device.
HOST = torch.device("cpu")


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"
