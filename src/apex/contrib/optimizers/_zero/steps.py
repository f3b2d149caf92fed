"""The count of steps, which skipped ones do not count in, without waiting for the device to hear of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Steps:
    """`state["step"]`: an int, or, if `capturable`, an int32 tensor [1] on the device."""

    def __init__(self, state: dict[Any, Any], device: torch.device, capturable: bool) -> None:
        self._state = state
        self._device = device
        self._capturable = capturable
        # Steps that an overflow kept from happening, which the host has not heard of yet.
        self._skipped: Tensor | None = None
        self.set(0)

    @property
    def count(self) -> Any:
        """The count so far, skipped steps that the host has not heard of included."""
        return self._state["step"]

    def next(self, noop: Tensor | None) -> Any:
        """Counts a step, unless `noop` is set: an int, or a float64 tensor."""
        if self._capturable:
            count = self._state["step"]
            count += 1 if noop is None else (noop == 0).to(torch.int32).reshape(1)
            return count.to(torch.float64).reshape(())
        if noop is None:
            self.settle()
        self._state["step"] += 1
        if noop is None:
            return self._state["step"]
        if self._skipped is None:
            self._skipped = torch.zeros((), dtype=torch.float64, device=self._device)
        step = self._state["step"] - self._skipped
        self._skipped += noop.reshape(()) != 0
        return step

    def settle(self) -> int:
        """The count, after taking skipped steps off it, which waits for the device."""
        if self._skipped is not None:
            self._state["step"] -= int(self._skipped)
            self._skipped = None
        return int(self._state["step"])

    def set(self, count: int) -> None:
        """Sets the count."""
        self._skipped = None
        if not self._capturable:
            self._state["step"] = int(count)
        elif "step" in self._state:
            self._state["step"].fill_(int(count))  # a graph that was captured goes on reading it
        else:
            self._state["step"] = torch.full((1,), int(count), dtype=torch.int32, device=self._device)
