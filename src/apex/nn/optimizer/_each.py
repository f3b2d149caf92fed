"""A base of optimizers that update one parameter after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...optimizers._checks import check_options


class EachParameter(torch.optim.Optimizer):
    """An optimizer whose step calls `_update` for each parameter that has a gradient."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_options(defaults)
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Perform one step and return the closure's loss."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        updated = [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if any(param.grad.is_sparse for _, param in updated):  # before any parameter changes
            raise RuntimeError(f"{type(self).__name__} takes no sparse gradients; use torch.optim.SparseAdam")
        for group, param in updated:
            self._update(group, param)
        return loss

    def _update(self, group: dict[str, Any], param: torch.Tensor) -> None:
        raise NotImplementedError
