"""A loss scale that tolerates single overflows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._arguments import Count, checked
from ...amp._checks import checked_scale
from ...logging import get_dist_logger
from .grad_scaler import GradScaler


class HysteresisScaler(GradScaler):
    """A loss scale that is lowered after `hysteresis` overflows since its last growth, not after each overflow.

    The scale stays between `min_scale` and `max_scale`. The count of overflows is part of the state dict, like the
    count of steps without overflow.
    """

    @checked
    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: Count = 1000,
        hysteresis: Count = 2,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        verbose: bool = False,
    ) -> None:
        if not 0 < min_scale <= max_scale:
            raise ValueError(f"min_scale={min_scale} must be positive and at most max_scale={max_scale}")
        checked_scale("init_scale", init_scale)
        super().__init__(min(max(init_scale, min_scale), max_scale), growth_factor, backoff_factor, growth_interval)
        self.hysteresis, self.min_scale, self.max_scale = hysteresis, min_scale, max_scale
        self.verbose = verbose
        self._first_overflows = 0
        self._overflows: Tensor | None = None

    def update(self, new_scale: Any = None) -> None:
        flags = [
            flag for state in self._per_optimizer_states.values() for flag in state["found_inf_per_device"].values()
        ]
        if new_scale is not None or self._scale is None or not flags:  # PyTorch sets the scale or raises
            super().update(new_scale)
            return
        scale = self._scale
        overflowed = torch.stack([flag.to(scale.device).reshape(()) for flag in flags]).amax() > 0
        old_scale = scale.clone()
        super().update()
        if self._overflows is None:
            self._overflows = torch.full((), self._first_overflows, dtype=torch.int32, device=scale.device)
        self._overflows += overflowed
        keeps_scale = overflowed & (self._overflows < self.hysteresis)
        scale.copy_(torch.where(keeps_scale, old_scale, scale).clamp(self.min_scale, self.max_scale))
        has_grown = ~overflowed & (self._growth_tracker == 0).reshape(())  # type: ignore[union-attr]
        self._overflows *= ~has_grown
        if self.verbose and bool(overflowed):  # waits for the device, because the message needs the value
            get_dist_logger().info(f"gradients overflowed; the step was skipped, the loss scale is {scale.item()}")

    def state_dict(self) -> dict[str, Any]:
        count = self._first_overflows if self._overflows is None else int(self._overflows)
        return {**super().state_dict(), "overflows": count}

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        overflows = int(state_dict.pop("overflows", 0))
        super().load_state_dict(state_dict)  # may refuse it
        self._first_overflows, self._overflows = overflows, None
