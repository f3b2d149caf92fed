"""A score for pruning that knows how large the inputs of a layer are: Wanda, https://arxiv.org/abs/2306.11695."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .sparse_masklib import create_mask


class WandaMask:
    """A `mask_calculator` for ASP: weights count by their absolute value times the norm of the input they are for.

    Norms are those of the inputs that linear layers and convolutions get inside the `with` block:

        with WandaMask(model) as calculator:
            model(batch)
        ASP.init_model_for_pruning(model, calculator)

    Other parameters, and layers that got no input, are pruned by absolute value.
    """

    def __init__(self, model: nn.Module, pattern: str = "m4n2_1d") -> None:
        self.pattern = pattern
        self._layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)]
        self._squares: dict[Tensor, Tensor] = {}

    def __enter__(self) -> WandaMask:
        self._hooks = [layer.register_forward_pre_hook(self._see) for layer in self._layers]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _see(self, layer: Any, inputs: tuple[Tensor, ...]) -> None:
        """Adds the squares of a layer's inputs, shaped so that they broadcast to its weight."""
        weight, groups = layer.weight, getattr(layer, "groups", 1)
        squares = inputs[0].detach().float().square().movedim(1 - weight.dim(), 0).flatten(1).sum(1).view(groups, -1)
        if groups > 1:
            squares = squares.repeat_interleave(len(weight) // groups, 0)
        squares = squares.view(*squares.shape, *(1,) * (weight.dim() - 2))
        self._squares[weight] = self._squares.get(weight, 0) + squares

    def __call__(self, param: Tensor) -> Tensor:
        """The mask of a parameter."""
        squares = next((each for key, each in self._squares.items() if key.data_ptr() == param.data_ptr()), None)
        return create_mask(param if squares is None else param.float() * squares.sqrt(), self.pattern)

    def tied_tensors(self, param: Tensor) -> list[Tensor]:
        """What ASP permutes with the channels of a parameter."""
        return [self._squares[param]] if param in self._squares else []
