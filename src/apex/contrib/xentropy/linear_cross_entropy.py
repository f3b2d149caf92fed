"""Losses and log-probabilities of a linear layer's outputs that never materialise all logits; not upstream names."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from ...ops.xentropy import TokenOutputs, linear_cross_entropy, linear_log_probs
from . import _parallel  # noqa: F401, teaches these functions to use process groups

__all__ = ["LinearCrossEntropyLoss", "TokenOutputs", "linear_cross_entropy", "linear_log_probs"]

_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(linear_cross_entropy).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
}


class LinearCrossEntropyLoss(nn.Module):
    """A module that calls `linear_cross_entropy` with fixed options, in the manner of `torch.nn.CrossEntropyLoss`.

    The options are the keyword arguments of that function. The weight and the bias belong to the caller, who often
    shares them with an embedding. Class weights are a buffer.
    """

    class_weight: Tensor | None

    def __init__(self, *, class_weight: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        if unknown := sorted(options.keys() - _OPTIONS):
            raise TypeError(f"{', '.join(unknown)} is no option of linear_cross_entropy; use {', '.join(_OPTIONS)}")
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options = {**_OPTIONS, **options}
        del self.options["class_weight"]

    def forward(self, input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        return linear_cross_entropy(input, weight, target, bias, class_weight=self.class_weight, **self.options)

    def extra_repr(self) -> str:
        shown = ("label_smoothing", "ignore_index", "reduction")
        changed = [name for name, value in self.options.items() if name not in shown and value != _OPTIONS[name]]
        return ", ".join(f"{name}={self.options[name]!r}" for name in (*shown, *changed))
