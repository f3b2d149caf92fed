"""Rules for language models: gated linear units and cross-entropy."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contrib.xentropy import SoftmaxCrossEntropyLoss
from ..ops._library import autocast_dtype
from ..ops.glu import bias_glu, glu_pair
from ..ops.glu.reference import ACTIVATIONS, activated
from .rule import FusionRule, has_hooks, in_mode, names_used, random_input, unless_overridden


class _GatedNames(NamedTuple):
    """The names of a gated MLP's layers in one family of models, and other names that its forward uses."""

    gate: str
    value: str  # "" if one layer computes gate and value together
    activation: str
    down: str
    others: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.gate, self.value, self.activation, self.down} - {""})


_T5_NAMES = frozenset({"dropout", "isinstance", "weight", "torch", "Tensor", "dtype", "int8", "to"})
_FAMILIES = (
    _GatedNames("gate_proj", "up_proj", "act_fn", "down_proj"),  # Llama, Qwen, Mistral, Gemma
    _GatedNames("gate_up_proj", "", "activation_fn", "down_proj", frozenset({"chunk"})),  # Phi-3
    _GatedNames("wi_0", "wi_1", "act", "wo", _T5_NAMES),  # T5
)


def _has_layers(module: Any, family: _GatedNames) -> bool:
    return all(hasattr(module, name) for name in family.names)


def activation_name(activation: Any) -> str | None:
    """Return the name of the activation of gated units that a function or module computes; None if it is none.

    The function is tried in training and in evaluation mode, on numbers up to 4 and on larger and tiny ones of both
    signs.
    """
    if isinstance(activation, nn.Module) and (has_hooks(activation) or any(True for _ in activation.parameters())):
        return None
    host = torch.Generator().device
    small = torch.linspace(-4, 4, 65, dtype=torch.float32, device=host)
    sizes = torch.logspace(-6, 4, 41, dtype=torch.float32, device=host)
    x = torch.cat((small, sizes, -sizes))
    modules = activation if isinstance(activation, nn.Module) else nn.Identity()
    results = []
    for training in (True, False):
        with torch.no_grad(), in_mode(modules, training):
            results.append(activation(x))
    for name in ACTIVATIONS:
        if all(torch.allclose(y, activated(x, name), atol=1e-5) for y in results):
            return name
    return None


def _glu_settings(module: Any) -> tuple[_GatedNames, str | None, Any]:
    """Return the names of a gated MLP's layers, the name of its activation, and the activation's identity."""
    family = next(family for family in _FAMILIES if _has_layers(module, family))
    activation = getattr(module, family.activation)
    return family, activation_name(activation), _activation_identity(activation)


def _activation_identity(activation: Any) -> Any:
    """Return an object that changes if the activation is replaced: its class or function; None if it has hooks."""
    if not isinstance(activation, nn.Module):
        return activation
    return None if has_hooks(activation) else type(activation)


def _glu_reason(module: Any) -> str:
    family, activation, _ = _glu_settings(module)
    used = set(names_used(type(module).forward))
    if not family.names <= used <= family.names | family.others:
        return "its forward uses other names: " + ", ".join(sorted(used ^ family.names))
    if not hasattr(getattr(module, family.gate), "in_features"):
        return f"the width of {family.gate} is not known, so that it cannot be tried"
    return "" if activation else f"its activation is none of {', '.join(ACTIVATIONS)}"


def _glu_probe(module: Any) -> Tensor:
    return random_input(module, 2, getattr(module, _glu_settings(module)[0].gate).in_features)


def glu_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Compute down(activation(gate(x)) * value(x)) of a gated MLP."""
    family, activation, identity = self.fused_settings
    if _activation_identity(getattr(self, family.activation)) is not identity:
        return self.fused_from.forward(self, hidden_states)
    gate = getattr(self, family.gate)(hidden_states)
    if family.value:
        value = getattr(self, family.value)(hidden_states)
        dtype = torch.promote_types(gate.dtype, value.dtype)
        hidden = glu_pair(gate.to(dtype), value.to(dtype), activation)
    else:
        hidden = bias_glu(gate, None, activation)
    down = getattr(self, family.down)
    if "dropout" in family.others:
        hidden = self.dropout(hidden)
        weight = down.weight
        if isinstance(weight, Tensor) and weight.dtype not in (hidden.dtype, torch.int8):
            hidden = hidden.to(weight.dtype)
    return down(hidden)


def cross_entropy_forward(self: Any, input: Tensor, target: Tensor) -> Tensor:
    # Inductor fuses PyTorch's own operators with the cast of the logits before them.
    if input.dim() != 2 or target.dim() != 1 or target.is_floating_point() or torch.compiler.is_compiling():
        return self.fused_from.forward(self, input, target)
    losses = SoftmaxCrossEntropyLoss.apply(input, target, self.label_smoothing, self.ignore_index)
    if self.reduction != "none":
        losses = losses.sum()
        if self.reduction == "mean":
            losses = losses / (target != self.ignore_index).sum()
    return losses if autocast_dtype(input) is not None else losses.to(input.dtype)


RULES = [
    FusionRule(
        "gated MLP",
        lambda module: any(_has_layers(module, family) for family in _FAMILIES),
        _glu_reason,
        lambda original: glu_forward,
        _glu_probe,
        _glu_settings,
    ),
    FusionRule(
        "cross-entropy",
        lambda module: isinstance(module, nn.CrossEntropyLoss),
        unless_overridden(
            nn.CrossEntropyLoss, lambda module: "classes have weights" if module.weight is not None else ""
        ),
        lambda original: cross_entropy_forward,
    ),
]
