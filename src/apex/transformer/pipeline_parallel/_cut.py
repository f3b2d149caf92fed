"""Stages of a model whose layers follow each other."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class CutSequential(nn.Module):
    """A stage of an `nn.Sequential`: about as many parameters as the others have; layers keep their names."""

    def __init__(self, model: nn.Sequential, stage: int, stages: int) -> None:
        super().__init__()
        if len(model) < stages:
            raise ValueError(f"a Sequential of {len(model)} layers cannot be cut into {stages} stages")
        sizes = [sum(param.numel() for param in layer.parameters()) + 1 for layer in model]
        bounds, passed = [0], 0
        for index, layer_size in enumerate(sizes):
            passed += layer_size
            left = stages - len(bounds)
            # A stage ends where its share is reached, or where the layers that are left are needed for those to come.
            if left and (passed >= sum(sizes) * len(bounds) / stages or len(model) - index - 1 == left):
                bounds.append(index + 1)
        bounds.append(len(model))
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
