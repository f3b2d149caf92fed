"""A mapping of layers for the package `kernels`, which transformers uses to replace the forward of a model's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._fuse.rotation import fused_function
from ..ops import norm
from ..ops._device import TRITON_DEVICES
from ..ops.glu import glu_pair

__all__ = ["mapping"]


class RMSNorm(nn.Module):
    """An RMS norm that multiplies by `weight`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self.weight
        dtype = torch.promote_types(weight.dtype, hidden_states.dtype)
        return norm.rms_norm(hidden_states, weight.shape, weight, _epsilon(self), out_dtype=dtype)


class RMSNormZeroCentered(nn.Module):
    """An RMS norm that multiplies by 1 + `weight`, rounded once."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        return norm.rms_norm(x, weight.shape, 1.0 + weight.float(), _epsilon(self), out_dtype=x.dtype)


class SwiGLUMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self
        return layers.down_proj(glu_pair(layers.gate_proj(x), layers.up_proj(x), "silu"))


class GeGLUMLP(nn.Module):
    """down(gelu(gate(x)) * up(x)), with the approximation by tanh."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        layers: Any = self
        return layers.down_proj(glu_pair(layers.gate_proj(x), layers.up_proj(x), "gelu_tanh"))


class RotaryPositionEmbedding(nn.Module):
    """A rotation of query and key, with the formula of the function that it replaces."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        kind: Any = type(self)
        if torch.compiler.is_compiling():  # Inductor fuses the function's own operators
            return kind.forward(self, q, k, cos, sin, unsqueeze_dim)
        return _rotation(kind)(q, k, cos, sin, unsqueeze_dim)


@functools.cache
def _rotation(kind: Any) -> Callable[..., Any]:
    """Return the fused counterpart of the function that a class of `kernels` wraps; the function if it has none.

    Functions of one name differ: some models rotate neighbouring channels, others the two halves.
    """
    wrapped = kind()

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        return kind.forward(wrapped, q, k, cos, sin, unsqueeze_dim)

    return fused_function(rotate) or rotate


def _epsilon(module: Any) -> float:
    """Return the epsilon of a norm, whose attribute is `variance_epsilon` or `eps`."""
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


class _Repository:
    """An entry of a mapping: `load` returns the layer. The package's own repositories are downloaded."""

    def __init__(self, name: str, layer: type[nn.Module]) -> None:
        self.layer_name, self._layer = name, layer

    def load(self) -> type[nn.Module]:
        """Return the class whose forward replaces a layer's forward."""
        return self._layer

    def __repr__(self) -> str:
        return f"apex.integrations.kernels.{self.layer_name}"


_LAYERS: dict[str, Any] = {kind.__name__: kind for kind in (RMSNorm, RMSNormZeroCentered, SwiGLUMLP, GeGLUMLP)}
_LAYERS["rotary_pos_emb"] = RotaryPositionEmbedding
_REPOSITORIES = {name: _Repository(name, layer) for name, layer in _LAYERS.items()}


def mapping(*devices: str) -> dict[str, dict[str, Any]]:
    """Return the layers of this library by the names that models have for them, for `kernels.register_kernel_mapping`.

        with kernels.use_kernel_mapping(apex.integrations.kernels.mapping()):
            model = kernels.kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

    `devices` are device types, by default "cuda" and "rocm". `kernelize` sets the forward of instances: `apex.fuse`
    does not replace these modules afterwards, and its report says so. Call `apex.fuse` alone to get all of its rules.
    The rotation is a function, which all models of one file of transformers share: `kernelize` replaces it for all of
    them. There is no loss, because transformers 5.23 marks none as a layer.
    """
    return {name: dict.fromkeys(devices or TRITON_DEVICES, layer) for name, layer in _REPOSITORIES.items()}
