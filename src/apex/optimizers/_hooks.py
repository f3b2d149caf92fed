"""What PyTorch puts around every optimizer's step, left out where it would do nothing.

It opens a range for the profiler and calls hooks. Range and its aftermath in the caches take 20 to 50 microseconds,
as much as a third of the host's time for a step of ResNet-50's 161 parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as _hooks_of_all

_recorded = Optimizer.profile_hook_step
_profiler_runs = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_Range = torch._C._profiler._RecordFunctionFast


def unrecorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.no_grad()` as a decorator, without the three objects that it makes at every call."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        was_recording = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args)
        finally:
            torch._C._set_grad_enabled(was_recording)

    return wrapper


def hooked_step(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which is the `step` of a class of optimizers, with hooks and a range for the profiler."""
    in_full = _recorded(function)

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        self = args[0]
        if (
            torch.compiler.is_compiling()
            or _profiler_runs()
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _hooks_of_all._global_optimizer_pre_hooks
            or _hooks_of_all._global_optimizer_post_hooks
        ):
            return in_full(*args, **kwargs)
        # For observers other than the profiler; less than a microsecond where there is none.
        with _Range(f"Optimizer.step#{type(self).__name__}.step"):
            return function(*args, **kwargs)

    return step
