"""A multi-layer perceptron: dense layers, each followed by the same activation, including the last one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import init

from ..ops._checks import integer
from ..ops.dense import MlpFunction, mlp, split_mlp

__all__ = ["MLP", "MlpFunction", "mlp_function"]

# Indexed by the numbers that clients pass.
ACTIVATIONS = ("none", "relu", "sigmoid")


def mlp_function(bias: bool | int, activation: int, *args: Tensor) -> Tensor:
    """Compute the perceptron from its tensors: the input, the weights and, with `bias`, as many biases.

    `activation` is 0 for none, 1 for relu, 2 for sigmoid. Under autocast (and so under `apex.amp` O1) it runs in
    autocast's dtype.
    """
    if integer("activation", activation) not in (0, 1, 2):
        raise ValueError(f"activation is {activation!r}; use 0 (none), 1 (relu) or 2 (sigmoid)")
    input, weights, biases = split_mlp(bias, args)
    return mlp(input, weights, biases, ACTIVATIONS[activation])


class MLP(nn.Module):
    """A perceptron with layers of the sizes `mlp_sizes`: [1024, 512, 256] makes two, 1024 to 512 to 256 features.

    `activation` ("none", "relu" or "sigmoid") follows every layer. Parameters are named weight_0, bias_0, weight_1, ...
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise TypeError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        if len(mlp_sizes) < 2:
            raise ValueError(f"mlp_sizes must name the sizes of the input and of every layer, got {list(mlp_sizes)}")
        self.mlp_sizes = list(mlp_sizes)
        self.num_layers = len(mlp_sizes) - 1
        self.bias = 1 if bias else 0
        self.activation = ACTIVATIONS.index(activation)
        for layer, (ins, outs) in enumerate(itertools.pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{layer}", nn.Parameter(torch.empty(outs, ins)))
            if bias:
                self.register_parameter(f"bias_{layer}", nn.Parameter(torch.empty(outs)))
        self._weight_names = [f"weight_{layer}" for layer in range(self.num_layers)]
        self._bias_names = [f"bias_{layer}" for layer in range(self.num_layers)] if bias else []
        self.reset_parameters()

    @property
    def weights(self) -> list[Tensor]:
        return self._named(self._weight_names)

    @property
    def biases(self) -> list[Tensor]:
        return self._named(self._bias_names)

    def _named(self, names: list[str]) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return [getattr(self, name) for name in names]
        parameters = self._parameters
        try:
            return [parameters[name] for name in names]  # type: ignore[misc]  # faster than six getattr
        except KeyError:  # computed from other parameters, by torch.nn.utils.parametrize
            return [getattr(self, name) for name in names]

    def reset_parameters(self) -> None:
        """Draw normal values: weights of variance 2 / (in + out), biases of variance 1 / out."""
        for weight in self.weights:
            init.normal_(weight, 0.0, math.sqrt(2 / sum(weight.shape)))
        for bias in self.biases:
            init.normal_(bias, 0.0, math.sqrt(1 / len(bias)))

    def forward(self, input: Tensor) -> Tensor:
        return mlp(input, self.weights, self.biases, ACTIVATIONS[self.activation])

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={self.activation}"
