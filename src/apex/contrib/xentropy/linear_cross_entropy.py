"""Losses and log-probabilities of a linear layer's outputs that never materialise all logits; not upstream names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.xentropy import TokenOutputs, linear_cross_entropy, linear_log_probs
from . import _parallel  # noqa: F401, teaches these functions to use process groups

__all__ = ["LinearCrossEntropyLoss", "TokenOutputs", "linear_cross_entropy", "linear_log_probs"]


class LinearCrossEntropyLoss(nn.Module):
    """A module that calls `linear_cross_entropy` with fixed options, in the manner of `torch.nn.CrossEntropyLoss`.

    The weight and the bias belong to the caller, who often shares them with an embedding. Class weights are a buffer.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        class_weight: Tensor | None = None,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        temperature: float = 1.0,
        z_loss: float = 0.0,
        token_scaling: bool = False,
        outputs: Sequence[str] = (),
        accumulation_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
        group: Any = None,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.ignore_index, self.reduction = label_smoothing, ignore_index, reduction
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options: dict[str, Any] = {
            "logit_scale": logit_scale,
            "softcap": softcap,
            "temperature": temperature,
            "z_loss": z_loss,
            "token_scaling": token_scaling,
            "outputs": tuple(outputs),
            "accumulation_dtype": accumulation_dtype,
            "chunk_rows": chunk_rows,
            "group": group,
        }

    def forward(self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return linear_cross_entropy(
            input,
            weight,
            target,
            bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            class_weight=self.class_weight,
            **self.options,
        )

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
