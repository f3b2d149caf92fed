"""FusedAdagrad: Adagrad in one pass over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import FusedOptimizer, LossScaling, Options, compiled_function, state_dtype
from ._buckets import Group, UpdateBucket


class FusedAdagrad(FusedOptimizer):
    """Adagrad with weight decay added to the gradient (L2) or, with `adagrad_w_mode`, decoupled from it.

    In L2 mode it computes the same numbers as `torch.optim.Adagrad`, and each loads the other's state dicts, including
    a decay of the learning rate. `FusedOptimizer` describes the keyword options.
    """

    _counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        **options: Unpack[Options],
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        super().__init__(
            params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none=set_grad_none, **options
        )

    multi_tensor_adagrad = compiled_function("multi_tensor_adagrad")

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the options that `torch.optim.Adagrad` needs to load it."""
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.setdefault("lr_decay", 0)
            group.setdefault("initial_accumulator_value", 0)
        return saved

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("sum",)

    def _initial_state(self, name: str, param: Tensor, group: dict[str, Any]) -> Tensor:
        # A group loaded from torch.optim.Adagrad has the initial value of the sums.
        start = group.get("initial_accumulator_value", 0)
        return torch.full_like(param, start, dtype=state_dtype(param), memory_format=torch.preserve_format)

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        decoupled = bool(self.adagrad_w_mode)
        lr = group["lr"]
        if group.get("lr_decay"):
            lr = lr / (1 + (step - 1) * group["lr_decay"])
        bucket.lists.apply(
            rules.ADAGRAD,
            {"lr": lr, "eps": group["eps"], "weight_decay": group["weight_decay"], "decoupled": decoupled},
            (decoupled,),
            **scaling.arguments,
            seed=seed,
        )
