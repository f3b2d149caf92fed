"""Division of an `nn.Sequential` into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn


class CutSequential(nn.Module):
    """One pipeline stage of an `nn.Sequential`; its layers keep their names.

    `layers_per_stage` lists the number of layers of each stage. By default all stages have about the same number of
    parameters.
    """

    def __init__(
        self, model: nn.Sequential, stage: int, stages: int, layers_per_stage: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        bounds = _even_bounds(model, stages) if layers_per_stage is None else [0, *accumulate(layers_per_stage)]
        if len(bounds) != stages + 1 or bounds[-1] != len(model) or min(layers_per_stage or [1]) < 1:
            raise ValueError(
                f"num_layers_per_stage={layers_per_stage} must have {stages} positive numbers, one for each stage, "
                f"whose sum is the number of layers of the Sequential, {len(model)}"
            )
        for name, layer in list(model.named_children())[bounds[stage] : bounds[stage + 1]]:
            self.add_module(name, layer)
        self._received: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        self._received = tensors[0]

    def forward(self, x: Any) -> Any:
        x = x if self._received is None else self._received
        for layer in self.children():
            x = layer(x)
        return x


def _even_bounds(model: nn.Sequential, stages: int) -> list[int]:
    """Return the index of each stage's first layer and, at the end, the number of layers.

    Stages are chosen to have about the same number of parameters.
    """
    if len(model) < stages:
        raise ValueError(f"a Sequential of {len(model)} layers cannot be cut into {stages} stages")
    sizes = [sum(param.numel() for param in layer.parameters()) + 1 for layer in model]
    bounds, parameters_before = [0], 0
    for index, layer_size in enumerate(sizes):
        parameters_before += layer_size
        stages_left = stages - len(bounds)
        # End a stage when it has its share of the parameters, or when each remaining stage needs one of the remaining
        # layers.
        if stages_left and (
            parameters_before >= sum(sizes) * len(bounds) / stages or len(model) - index - 1 == stages_left
        ):
            bounds.append(index + 1)
    return [*bounds, len(model)]
