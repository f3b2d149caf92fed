"""Rules for norms: torch.nn's classes, and RMS norms that libraries write in Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import norm
from ..ops._library import autocast_dtype
from ..ops._tolerance import TOLERANCES
from ..ops.group_norm import group_norm
from .rule import FusionRule, names_reached, random_input, unless_overridden


def norm_dtype(module: Any, input: Tensor) -> torch.dtype:
    """Return the output dtype of PyTorch's norms: float32 under autocast except on CPUs, else the input's dtype.

    A module whose `keeps_dtype` is set gives the input's dtype under autocast, too.
    """
    if getattr(module, "keeps_dtype", False):
        return input.dtype
    is_low = input.dtype in (torch.float16, torch.bfloat16)
    if is_low and input.device.type != "cpu" and autocast_dtype(input) is not None:
        return torch.float32
    return input.dtype


# PyTorch 2.12 and later, not 2.11, compute RMS norms in float32 under autocast.
_RMS_NORM_AUTOCASTS = torch.__version__ >= "2.12"


@functools.cache
def _default_eps(dtype: torch.dtype) -> float:
    """Return the default eps of this PyTorch's RMS norm: for half precision float32's, the dtype's in old releases."""
    small = torch.full((1,), 1e-3, dtype=dtype, device=torch.Generator().device)
    is_wide = dtype.itemsize == 2 and bool(nn.functional.rms_norm(small, (1,)) > 0.5)
    return torch.finfo(torch.float32 if is_wide else dtype).eps


def layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    dtype = norm_dtype(self, input)
    return norm.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps, out_dtype=dtype)


def rms_norm_forward(self: Any, input: Tensor) -> Tensor:
    eps = self.fused_settings[input.dtype] if self.eps is None else self.eps
    dtype = norm_dtype(self, input) if _RMS_NORM_AUTOCASTS else input.dtype
    return norm.rms_norm(input, self.normalized_shape, self.weight, eps, out_dtype=dtype)


def group_norm_forward(self: Any, input: Tensor, activation: str = "") -> Tensor:
    return group_norm(input.to(norm_dtype(self, input)), self.num_groups, self.weight, self.bias, self.eps, activation)


# Names of an epsilon, and all names that the forward of a norm written in Python may use. Any other operation (a clamp)
# or attribute (`training`) may change the results for inputs that no trial draws.
_EPSILONS = ("variance_epsilon", "eps", "epsilon")
_WRITTEN_NAMES = frozenset({
    *_EPSILONS, "weight", "with_scale", "torch", "Tensor", "nn", "functional", "F", "rms_norm", "mean", "pow", "square",
    "sqrt", "rsqrt", "sum", "shape", "size", "mul", "to", "type", "type_as", "dtype", "float", "float16", "bfloat16",
    "float32",
    # layer norms, of timm and ConvNeXt as well
    "bias", "layer_norm", "normalized_shape", "permute", "super", "forward", "data_format",
    "_fast_norm", "fast_layer_norm", "fast_rms_norm",
    # Nemotron's
    "device", "_cast_if_autocast_enabled", "maybe_autocast", "autocast", "amp", "enabled",
})  # fmt: skip


def written_rms_norm(offset: float) -> Callable[[type], Callable[..., Any]]:
    """Return a rule's `forward` for RMS norms that multiply by `offset` + weight, in float32 if the offset is not 0.

    The module's `fused_settings` is the name of its epsilon, which is read at every call.
    """

    def plain(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight
        keeps_dtype = getattr(self, "keeps_dtype", False)
        dtype = hidden_states.dtype if keeps_dtype else torch.promote_types(weight.dtype, hidden_states.dtype)
        return norm.rms_norm(hidden_states, weight.shape, weight, getattr(self, self.fused_settings), out_dtype=dtype)

    def shifted(self: Any, hidden_states: Tensor) -> Tensor:
        weight = offset + (self.weight if self.weight.dtype == torch.float64 else self.weight.float())
        return norm.rms_norm(hidden_states, weight.shape, weight, getattr(self, self.fused_settings))

    return lambda original: shifted if offset else plain


def rms_norm_without_weight(self: Any, hidden_states: Tensor) -> Tensor:
    return norm.rms_norm(hidden_states, hidden_states.shape[-1:], None, getattr(self, self.fused_settings))


def written_layer_norm(offset: float, is_channels_first: bool = False) -> Callable[[type], Callable[..., Any]]:
    """Return a rule's `forward` for layer norms of the last dimension, or of the channels of images, by their dtype.

    The weight is `offset` + the module's. The module's `fused_settings` is the name of its epsilon.
    """

    def make(original: type) -> Callable[..., Any]:
        used = names_reached(original)
        # PyTorch's function gives float32 under autocast. Nemotron casts to autocast's dtype, others to the input's.
        keeps_dtype = not used & {"layer_norm", "super"} or "float" in used or "float32" in used
        casts = "_cast_if_autocast_enabled" in used

        def forward(self: Any, input: Tensor) -> Tensor:
            weight, eps = self.weight, getattr(self, self.fused_settings)
            if offset:
                weight = offset + weight
            if casts:
                dtype = autocast_dtype(input) or input.dtype
            else:
                dtype = input.dtype if keeps_dtype else norm_dtype(self, input)
            x = input.permute(0, 2, 3, 1) if is_channels_first else input
            x = norm.layer_norm(x, weight.shape, weight, getattr(self, "bias", None), eps, out_dtype=dtype)
            return x.permute(0, 3, 1, 2) if is_channels_first else x

        return forward

    return make


def _written_eps(module: Any) -> str | None:
    """Return the name of a module's epsilon, None if it has none or several."""
    names = [name for name in _EPSILONS if hasattr(module, name)]
    return names[0] if len(names) == 1 and isinstance(getattr(module, names[0]), (int, float)) else None


def _is_written_rms_norm(module: Any) -> bool:
    if isinstance(module, nn.RMSNorm) or type(module).__module__.startswith("apex."):  # T5 takes apex's norm
        return False
    name = type(module).__name__.lower()
    return name.endswith("rmsnorm") or name == "t5layernorm"


def _is_written_layer_norm(module: Any) -> bool:
    if type(module).__module__.startswith("apex."):
        return False
    name = type(module).__name__.lower()
    is_named = any(part in name for part in ("layernorm", "layer_norm")) and name != "t5layernorm"
    overrides = isinstance(module, nn.LayerNorm) and type(module).forward is not nn.LayerNorm.forward
    return overrides or (is_named and not isinstance(module, nn.LayerNorm) and hasattr(module, "weight"))


def _has_weighted_rms_norm(module: Any) -> bool:
    return _is_written_rms_norm(module) and next(module.parameters(), None) is not None


def _has_no_weight(module: Any) -> bool:
    return _is_written_rms_norm(module) and next(module.parameters(), None) is None


def _written_reason(module: Any) -> str:
    names = [name for name, _ in module.named_parameters()]
    if names and (names not in (["weight"], ["weight", "bias"]) or module.weight.dim() != 1):
        return "it has other parameters than one vector named weight"
    if _written_eps(module) is None:
        return "its epsilon is not found"
    if getattr(module, "_fast_norm", False):
        return "timm's fast norm is enabled, which rounds to autocast's dtype"
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return "its forward takes more than one tensor"
    others = names_reached(type(module)) - _WRITTEN_NAMES
    return "its forward also uses " + ", ".join(sorted(others)) if others else ""


def _probe(module: Any) -> Tensor:
    return random_input(module, 2, 3, module.weight.shape[0])


def _image_probe(module: Any) -> Tensor:
    return random_input(module, 2, module.weight.shape[0], 3, 2)


RULES = [
    FusionRule(
        "layer norm",
        lambda module: isinstance(module, nn.LayerNorm),
        unless_overridden(nn.LayerNorm),
        lambda original: layer_norm_forward,
    ),
    FusionRule(
        "RMS norm",
        lambda module: isinstance(module, nn.RMSNorm),
        unless_overridden(nn.RMSNorm),
        lambda original: rms_norm_forward,
        settings=lambda module: {dtype: _default_eps(dtype) for dtype in TOLERANCES},
    ),
    FusionRule(
        "group norm",
        lambda module: isinstance(module, nn.GroupNorm),
        unless_overridden(nn.GroupNorm),
        lambda original: group_norm_forward,
    ),
    *(
        FusionRule(name, matches, _written_reason, forward, probe, _written_eps)
        for name, matches, forward, probe in (
            ("RMS norm of weight", _has_weighted_rms_norm, written_rms_norm(0.0), _probe),
            ("RMS norm of 1 + weight", _has_weighted_rms_norm, written_rms_norm(1.0), _probe),
            (
                "RMS norm without weight",
                _has_no_weight,
                lambda original: rms_norm_without_weight,
                lambda module: random_input(module, 2, 3, 16),
            ),
        )
    ),
    *(
        FusionRule(name, _is_written_layer_norm, _written_reason, forward, probe, _written_eps)
        for name, forward, probe in (
            ("layer norm written in Python", written_layer_norm(0.0), _probe),
            ("layer norm of 1 + weight", written_layer_norm(1.0), _probe),
            ("layer norm of channels", written_layer_norm(0.0, True), _image_probe),
        )
    ),
]
