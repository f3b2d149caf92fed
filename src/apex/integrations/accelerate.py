"""`prepare` fuses models and optimizers before `Accelerator.prepare` wraps them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .._fuse import fuse

__all__ = ["prepare"]


def prepare(accelerator: Any, *objects: Any, verbose: bool = False, **options: Any) -> Any:
    """Fuse the models and optimizers among `objects`, and return `accelerator.prepare(*objects, **options)`.

    `apex.fuse` comes first, because `Accelerator.prepare` replaces the forward of models and wraps optimizers. The
    reports of `apex.fuse` are printed if `verbose` is set.
    """
    if not callable(getattr(accelerator, "prepare", None)):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not a {type(accelerator).__name__}")
    for item in objects:
        if isinstance(item, nn.Module | torch.optim.Optimizer):
            fuse(item, verbose=verbose)
    return accelerator.prepare(*objects, **options)
