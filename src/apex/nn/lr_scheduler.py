"""Learning rate schedulers with linear warm-up, then a linear, cosine, polynomial or constant rate.

All of them count steps (or epochs, depending on where `step()` is called) e = 0, 1, 2, ... up to `total_steps`, and
keep their last value after that. In the first `warmup_steps` steps the rate is base * (e + 1) / (warmup_steps + 1) in
the linear and constant schedules, and base * (e + 1) / warmup_steps in the cosine and polynomial schedules, as in
Colossal-AI.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch.optim import lr_scheduler as _torch
from torch.optim.lr_scheduler import LRScheduler


def _warn_of_ignored(scheduler: Any, arguments: dict[str, Any]) -> None:
    """Warn of keyword arguments without effect; Colossal-AI's schedulers take any, so clients pass some."""
    if arguments:
        names = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        warnings.warn(f"{type(scheduler).__name__} ignores {names}", stacklevel=3)


class _WarmupLR(LRScheduler):
    """Base of the schedulers; a subclass defines the rate after the warm-up."""

    # Whether the last step of the warm-up has the base rate already. Else the first step after the warm-up has it.
    _warmup_ends_at_base = False

    def __init__(self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1) -> None:
        for name, value in (("total_steps", total_steps), ("warmup_steps", warmup_steps)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, not {value!r}")
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the rates of the present step, one for each parameter group."""
        if self.last_epoch < self.warmup_steps:
            steps = self.warmup_steps if self._warmup_ends_at_base else self.warmup_steps + 1
            return [base * (self.last_epoch + 1) / steps for base in self.base_lrs]
        # If the warm-up takes all steps or more, the rate then has its final value.
        span = self.total_steps - self.warmup_steps
        part = min(1.0, (self.last_epoch - self.warmup_steps) / span) if span > 0 else 1.0
        return [self._after_warmup(base, part) for base in self.base_lrs]

    def _after_warmup(self, base: Any, part: float) -> Any:
        """Return the rate after the share `part`, 0 to 1, of the steps that follow the warm-up."""
        raise NotImplementedError


class LinearWarmupLR(_WarmupLR):
    """A rate that falls linearly after the warm-up, to 0 after `total_steps`."""

    def __init__(
        self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        _warn_of_ignored(self, kwargs)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        return base * (1.0 - part)


class CosineAnnealingWarmupLR(_WarmupLR):
    """A rate that falls along half a cosine after the warm-up, to `eta_min` after `total_steps`."""

    _warmup_ends_at_base = True

    def __init__(
        self, optimizer: Any, total_steps: int, warmup_steps: int = 0, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * part)) / 2


class CosineAnnealingLR(CosineAnnealingWarmupLR):
    """`CosineAnnealingWarmupLR` without a warm-up."""

    def __init__(
        self, optimizer: Any, total_steps: int, eta_min: float = 0.0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        _warn_of_ignored(self, kwargs)
        super().__init__(optimizer, total_steps, 0, eta_min, last_epoch)


class PolynomialWarmupLR(_WarmupLR):
    """A rate that falls as a power of the remaining steps after the warm-up, to `end_lr` after `total_steps`."""

    _warmup_ends_at_base = True

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored(self, kwargs)
        self.end_lr, self.power = end_lr, power
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        return self.end_lr + (base - self.end_lr) * (1.0 - part) ** self.power


class PolynomialLR(PolynomialWarmupLR):
    """`PolynomialWarmupLR` without a warm-up."""

    def __init__(self, optimizer: Any, total_steps: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(optimizer, total_steps, 0, *args, **kwargs)


class ConstantWarmupLR(_WarmupLR):
    """A rate that equals the optimizer's after the warm-up."""

    def __init__(
        self, optimizer: Any, total_steps: int = 0, warmup_steps: int = 0, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        _warn_of_ignored(self, kwargs)
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        return base


class FlatAnnealingWarmupLR(_WarmupLR):
    """A rate that stays for the share `pct_start` of the steps after the warm-up, then falls along half a cosine."""

    _warmup_ends_at_base = True

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored(self, kwargs)
        if not 0.0 <= pct_start <= 1.0:
            raise ValueError(f"pct_start={pct_start} must be from 0 to 1")
        span = max(0, total_steps - warmup_steps)
        self.eta_min, self._flat = eta_min, int(span * pct_start) / span if span else 0.0
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        fallen = max(0.0, part - self._flat) / (1 - self._flat) if self._flat < 1 else 0.0
        return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * fallen)) / 2


class FlatAnnealingLR(FlatAnnealingWarmupLR):
    """`FlatAnnealingWarmupLR` without a warm-up."""

    def __init__(
        self, optimizer: Any, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **kwargs: Any
    ) -> None:
        _warn_of_ignored(self, kwargs)
        super().__init__(optimizer, total_steps, 0, pct_start, 0.0, last_epoch)


class MultiStepWarmupLR(_WarmupLR):
    """A rate that is multiplied by `gamma` at each of the `milestones` that are not within the warm-up."""

    _warmup_ends_at_base = True

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: list[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored(self, kwargs)
        if not milestones:
            raise ValueError(f"milestones={milestones!r} must be a list of at least one step")
        self.milestones, self.gamma = sorted(milestones), gamma
        super().__init__(optimizer, total_steps, warmup_steps, last_epoch)

    def _after_warmup(self, base: Any, part: float) -> Any:
        passed = sum(self.warmup_steps <= step <= self.last_epoch for step in self.milestones)
        return base * self.gamma**passed


class MultiStepLR(MultiStepWarmupLR):
    """`MultiStepWarmupLR` without a warm-up."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        milestones: list[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        _warn_of_ignored(self, kwargs)
        super().__init__(optimizer, total_steps, 0, milestones, gamma, last_epoch)


class OneCycleLR(_torch.OneCycleLR):
    """PyTorch's OneCycleLR with the optimizer's rates as the highest rates."""

    def __init__(self, optimizer: Any, total_steps: int, pct_start: float = 0.3, *args: Any, **kwargs: Any) -> None:
        # The arguments after these two are PyTorch's, in its order: it has epochs and steps_per_epoch before pct_start.
        highest = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, highest, total_steps, None, None, pct_start, *args, **kwargs)


class StepLR(_torch.StepLR):
    """PyTorch's StepLR; `total_steps` has no effect."""

    def __init__(
        self, optimizer: Any, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(_torch.ExponentialLR):
    """PyTorch's ExponentialLR; `total_steps` has no effect."""

    def __init__(self, optimizer: Any, total_steps: int, gamma: float = 1.0, last_epoch: int = -1) -> None:
        super().__init__(optimizer, gamma, last_epoch)


class LambdaLR(_torch.LambdaLR):
    """PyTorch's LambdaLR; `total_steps` has no effect."""

    def __init__(self, optimizer: Any, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)


class MultiplicativeLR(_torch.MultiplicativeLR):
    """PyTorch's MultiplicativeLR; `total_steps` has no effect."""

    def __init__(self, optimizer: Any, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch)
