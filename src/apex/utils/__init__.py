"""Small functions with Colossal-AI's names."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from .._lazy import lazy_subpackages
from .._random import seed_host
from ..accelerator import get_accelerator
from ..multi_tensor_apply import multi_tensor_applier
from .timer import MultiTimer, Timer

__all__ = ["MultiTimer", "Timer", "conditional_context", "get_current_device", "multi_tensor_applier", "set_seed"]


def get_current_device() -> torch.device:
    """Return the accelerator of this process, or the host without one."""
    return get_accelerator().get_current_device()


def set_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and PyTorch."""
    seed_host(seed)


def conditional_context(context_manager: Any, enable: bool = True) -> Any:
    """Return the context manager if `enable` is set, else one that does nothing."""
    return context_manager if enable else contextlib.nullcontext()


__getattr__, __dir__ = lazy_subpackages(__name__, ())
