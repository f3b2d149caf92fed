"""Tensors that are computed later, so that a layer's own forward can be run with fused operations.

A layer's forward runs on a stand-in for the layer. The stand-in's children return `Lazy` objects: the output of a
linear layer, its activation, an output after a layer scale, and the sum of an output and a residual. The next step
chooses the fused operation: a second linear layer after an activation computes both layers at once, a norm after a sum
adds and normalises in one pass. Any other operation on such an object gets the computed tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ops import norm
from ..ops._library import autocast_dtype
from ..ops.dense import dense_gelu_dense

_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_}


def evaluated(value: Any) -> Any:
    """Return the tensor of a `Lazy` object, computed now if need be; return other values unchanged."""
    return value.tensor() if isinstance(value, Lazy) else value


class Lazy:
    """A tensor that may not be computed yet. `compute` makes it; its attributes and operators are the tensor's."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self._tensor: Tensor | None = None

    def tensor(self) -> Tensor:
        """Return the tensor; compute it at the first call."""
        if self._tensor is None:
            self._tensor = self._compute()
        return self._tensor

    def plus(self, other: Tensor) -> Any:
        """Return the sum with a tensor of the same shape."""
        return Sum(self.tensor(), other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Scaled) and not isinstance(self, Scaled):
            self, other = other, self  # a scaled tensor computes scale and sum in one pass
        other = evaluated(other)
        if isinstance(other, Tensor) and other.shape == self.tensor_shape():
            return self.plus(other)
        return self.tensor() + other

    __radd__ = __add__

    def tensor_shape(self) -> torch.Size:
        """Return the tensor's shape."""
        return self.tensor().shape

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not kwargs and function not in (Tensor.__iadd__, Tensor.add_):
            left, right = args
            return left + evaluated(right) if isinstance(left, Lazy) else right + left
        return function(*tree_map(evaluated, args), **tree_map(evaluated, kwargs or {}))


def _forwarded(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)
    return lambda self, *others: function(evaluated(self), *map(evaluated, others))


for _name in ("sub", "mul", "truediv", "floordiv", "matmul", "pow", "neg", "getitem", "lt", "gt", "le", "ge"):
    setattr(Lazy, f"__{_name}__", _forwarded(f"__{_name}__"))
Lazy.__rmul__ = lambda self, other: evaluated(other) * self.tensor()  # type: ignore[attr-defined]
Lazy.__rsub__ = lambda self, other: evaluated(other) - self.tensor()  # type: ignore[attr-defined]


class Known(Lazy):
    """A `Lazy` whose tensor exists already: the output of a layer."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(lambda: tensor)


class Scaled(Lazy):
    """A tensor times a vector of learned factors (a layer scale); its sum with a residual takes one pass."""

    def __init__(self, input: Tensor, factors: Tensor) -> None:
        super().__init__(lambda: input * factors)
        self._input, self._factors = input, factors

    def tensor_shape(self) -> torch.Size:
        return self._input.shape

    def plus(self, other: Tensor) -> Any:
        if self._tensor is not None or not self._input.dtype == self._factors.dtype == other.dtype:
            return super().plus(other)
        return Known(torch.addcmul(other, self._input, self._factors))


class Sum(Lazy):
    """The sum of an output and a residual; a norm of it takes one pass."""

    def __init__(self, output: Tensor, residual: Tensor) -> None:
        super().__init__(lambda: residual + output)
        self._output, self._residual = output, residual

    def tensor_shape(self) -> torch.Size:
        return self._output.shape

    def normalised(
        self, weight: Any, bias: Any, eps: float, subtract_mean: bool, keeps_dtype: bool = False
    ) -> Tensor | None:
        """Return the norm of the sum; None if one pass cannot compute sum and norm.

        All tensors must have one dtype, except a weight that is not a parameter (1 + weight, in float32). If the norm
        keeps the dtype of activations, under autocast too, its parameters may have another one.
        """
        tensors = [self._output, self._residual]
        if not keeps_dtype:
            tensors += [bias] if bias is not None else []
            tensors += [weight] if isinstance(weight, nn.Parameter) else []
        widens = not keeps_dtype and autocast_dtype(self._output) is not None
        if self._tensor is not None or len({t.dtype for t in tensors}) > 1 or widens:
            return None
        output, self._tensor = norm.add_norm(
            *(self._output, self._residual, None, weight.shape, weight, bias, eps), subtract_mean=subtract_mean
        )
        return output


class Hidden(Lazy):
    """The output of the first of two linear layers, not computed yet."""

    def __init__(self, input: Tensor, layer: Any) -> None:
        super().__init__(lambda: layer(input))
        self._input, self._layer = input, layer

    def activated(self, activation: str, function: Any) -> Lazy:
        """Return the activation of this output as a `Lazy`; `function` computes it if it is not fused."""
        if self._tensor is not None:
            return Known(function(self._tensor))
        return Active(self._input, self._layer, activation, function)


class Active(Lazy):
    """The activation between two linear layers, not computed yet."""

    def __init__(self, input: Tensor, layer: Any, activation: str, function: Any) -> None:
        super().__init__(lambda: function(layer(input)))
        self._input, self._layer, self._activation = input, layer, activation

    def through(self, layer: Any) -> Tensor:
        """Return the second linear layer's output; one fused operation computes both layers if possible."""
        first, second = linear_parameters(self._layer), linear_parameters(layer)
        dtypes = {t.dtype for t in (self._input, *first, *second) if t is not None}
        if self._tensor is not None or (len(dtypes) > 1 and autocast_dtype(self._input) is None):
            return layer(self.tensor())
        return dense_gelu_dense(self._input, *first, *second, self._activation)


def linear_parameters(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return weight [out, in] and bias of a linear layer, or of a Conv1D of transformers, whose weight is [in, out]."""
    return layer.weight if isinstance(layer, nn.Linear) else layer.weight.t(), layer.bias
