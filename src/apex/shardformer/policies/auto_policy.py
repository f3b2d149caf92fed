"""get_autopolicy: a policy that refuses to divide a model."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["get_autopolicy"]


def no_policy(model: nn.Module) -> NotImplementedError:
    """Return the error about a model that no policy divides."""
    return NotImplementedError(f"no policy for {type(model).__name__}: give custom_policy(model, stage, stages)")


def get_autopolicy(model: nn.Module) -> Any:
    """Return a policy for `HybridParallelPlugin(custom_policy=...)`. It raises if the model has to be divided."""

    def policy(whole: nn.Module, stage: int, stages: int) -> Any:
        raise no_policy(model)

    return policy
