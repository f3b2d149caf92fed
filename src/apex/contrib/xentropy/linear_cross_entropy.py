"""Cross-entropy of a linear layer's outputs that never materialises all logits; not an upstream name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...ops.xentropy import linear_cross_entropy

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]


class LinearCrossEntropyLoss(nn.Module):
    """A module that calls `linear_cross_entropy` with fixed options, in the manner of `torch.nn.CrossEntropyLoss`.

    The weight and the bias belong to the caller, who often shares them with an embedding.
    """

    def __init__(
        self,
        *,
        label_smoothing: float = 0.0,
        ignore_index: int = -100,
        reduction: str = "mean",
        accumulation_dtype: torch.dtype | None = None,
        chunk_rows: int | None = None,
    ) -> None:
        super().__init__()
        self.label_smoothing, self.ignore_index, self.reduction = label_smoothing, ignore_index, reduction
        self.accumulation_dtype, self.chunk_rows = accumulation_dtype, chunk_rows

    def forward(self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear_cross_entropy(
            input,
            weight,
            target,
            bias,
            label_smoothing=self.label_smoothing,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            accumulation_dtype=self.accumulation_dtype,
            chunk_rows=self.chunk_rows,
        )

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}, ignore_index={self.ignore_index}, reduction={self.reduction!r}"
