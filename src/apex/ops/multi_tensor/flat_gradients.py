"""Gradients of many parameters in one flat buffer, so that one operator serves all of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from .flat import FlatBuffer, flat
from .tables import lie_at


class FlatGradients(FlatBuffer):
    """A flat buffer with a view for the gradient of each of `members`: parameters of one dtype and device.

    A user may replace a gradient at any time (`param.grad = ...`); `gather` copies such gradients back to the buffer.
    """

    def __init__(self, members: list[Tensor], offsets: Sequence[int] | None = None, size: int = 0) -> None:
        super().__init__(members, offsets, size)
        self.members = members
        self._addresses = list(map(Tensor.data_ptr, self.views))

    @functools.cached_property
    def parts(self) -> list[Tensor]:
        """Return the views as 1-D tensors."""
        return list(map(flat, self.views))

    def holds_all(self, gradients: list[Tensor | None]) -> bool:
        """Return whether every member has a gradient, and all of them have the addresses of their views."""
        try:
            return lie_at(gradients, self._addresses)  # type: ignore[arg-type]
        except (TypeError, RuntimeError):  # a gradient is None or sparse
            return False

    def gather(self, gradients: Sequence[Tensor | None]) -> list[int]:
        """Copy dense gradients to their views, and zeros for None; return the indices of the copied gradients."""
        storage = self.values.untyped_storage().data_ptr()
        copied, values = [], []
        for index, gradient in enumerate(gradients):
            if gradient is not None and not self.holds(index, gradient):
                value = gradient.detach()
                copied.append(index)
                # Cloned first: two gradients may have been exchanged.
                values.append(value.clone() if value.untyped_storage().data_ptr() == storage else value)
        missing = [view for view, gradient in zip(self.views, gradients, strict=True) if gradient is None]
        if missing:
            torch._foreach_zero_(missing)
        if copied:
            torch._foreach_copy_([self.views[index] for index in copied], values)
        return copied

    def attach(self, has_gradient: Sequence[bool]) -> None:
        """Make the views the members' gradients, or set None for members without a gradient."""
        for member, view, has in zip(self.members, self.views, has_gradient, strict=True):
            member.grad = view if has else None

    def outside(self) -> list[Tensor]:
        """Return the members whose gradient lies outside of the buffer."""
        members = [(index, member) for index, member in enumerate(self.members) if member.grad is not None]
        return [member for index, member in members if member.numel() and not self.holds(index, member.grad)]
