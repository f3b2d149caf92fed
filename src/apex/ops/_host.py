"""The host: which tensors are there, and copies of numbers on their way to it, without waiting for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Where numbers are that Python reads; named because a user may have chosen another default device.
HOST = torch.device("cpu")


class HostCopy:
    """A copy of a small tensor that is being made in the host's memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.values = tensor
        self._event: Any = None
        if tensor.device.type == "cuda":
            self.values = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST, pin_memory=True)
            self.values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def arrived(self) -> bool:
        """Whether `values` can be read without waiting."""
        return self._event is None or self._event.query()


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor can be read without waiting for a device."""
    return tensor.device.type == "cpu"
