"""Rules for language models: gated linear units, rotary embeddings, cross-entropy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..contrib.xentropy import SoftmaxCrossEntropyLoss
from ..ops._library import autocast_dtype
from ..ops.glu import bias_glu, glu_pair
from ..ops.glu.reference import ACTIVATIONS, activated
from ..ops.rope import rotary_embedding_pair
from .rule import FusionRule, has_hooks, in_mode, names_used, random_input, unless_overridden, with_functions


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


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, heads_first: bool) -> tuple[Tensor, Tensor]:
    """Return query and key of shape (batch, heads, tokens, channels), rotated by tables (1 or batch, tokens, width).

    Rotates the first `width` channels. If not `heads_first`, query and key have the shape (batch, tokens, heads,
    channels).
    """
    if heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    query, key, tables = q, k, (cos.flatten(0, 1)[:, None, None], sin.flatten(0, 1)[:, None, None])
    if cos.shape[0] > 1:  # one sequence of all tokens, each with a row of the tables
        query, key = q.flatten(0, 1)[None], k.flatten(0, 1)[None]
    query, key = rotary_embedding_pair(query, key, tables, tensor_format="bshd")
    if cos.shape[0] > 1:
        query, key = query.view(q.shape), key.view(k.shape)
    return (query.transpose(1, 2), key.transpose(1, 2)) if heads_first else (query, key)


def _doubled(table: Tensor) -> Tensor:
    """Return a table for both halves of the channels, made of a table for one half."""
    return torch.cat((table, table), -1)


_ROTATE = "apply_rotary_pos_emb"


@functools.cache
def _rotates_alike(function: Callable[..., Any], width: int, widen: Callable[[Tensor], Tensor] | None = None) -> bool:
    """Return whether `function` computes the same as `rotate_pair`, for tables of `width` and 8 channels.

    Compares outputs and gradients for queries and keys of usual size, large and tiny, for a table that all rows of a
    batch share and for a table per row. `widen` is applied to the tables of `rotate_pair`.
    """
    for rows, scale in ((1, 1.0), (2, 1.0), (1, 2.0**10), (1, 2.0**-10)):
        shapes = ((2, 3, 5, 8), (2, 1, 5, 8), (rows, 5, width), (rows, 5, width))
        q, k, cos, sin = (random_input(nn.Identity(), *shape) for shape in shapes)
        q, k = ((scale * tensor).requires_grad_() for tensor in (q, k))
        tables = (cos, sin) if widen is None else (widen(cos), widen(sin))
        results = []
        try:
            with torch.enable_grad():
                for rotated in (function(q, k, cos, sin), rotate_pair(q, k, *tables, True)):
                    gradients = torch.autograd.grad(rotated, (q, k), (q.detach().cos(), k.detach().cos()))
                    results.append([*rotated, *gradients])
        except Exception:  # a foreign function may raise anything
            return False
        sizes = (scale, scale, 1.0, 1.0)  # of two outputs and two gradients
        for one, other, size in zip(*results, sizes, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, atol=1e-6 * size):
                return False
    return True


def _rope_reason(module: Any) -> str:
    forward = type(module).forward
    function: Any = getattr(inspect.unwrap(forward), "__globals__", {}).get(_ROTATE)
    if with_functions(forward, {}) is None:
        return "its forward is wrapped by a decorator"
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"its {_ROTATE} takes other arguments"
    same = _rotates_alike(function, 8) or _rotates_alike(function, 4, _doubled)
    return "" if same else f"its {_ROTATE} computes something else"


def _fused_rotation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an `apply_rotary_pos_emb` that uses `rotate_pair` if it can, and `function` otherwise.

    `function` serves calls with further arguments, or with tables for only some of the tokens. Trials tell for which
    widths of the tables the two agree: all channels, the first channels, or half of them (GPT-OSS).
    """
    extras = list(inspect.signature(function).parameters.values())[4:]
    defaults = {parameter.name: parameter.default for parameter in extras}
    names, usual_dim = list(defaults), defaults.get("unsqueeze_dim", 1)
    takes_full, takes_narrow = _rotates_alike(function, 8), _rotates_alike(function, 4)
    takes_half = _rotates_alike(function, 4, _doubled)

    def rotate(q: Any, k: Any = None, cos: Any = None, sin: Any = None, *rest: Any, **options: Any) -> Any:
        further = {**dict(zip(names[: len(rest)], rest, strict=True)), **options}
        dim = further.pop("unsqueeze_dim", usual_dim)
        if (
            all(value is None for value in further.values())
            and k is not None
            and dim in (1, 2)
            and q.dim() == k.dim() == 4
            and cos.dim() == 3
            and cos.shape[0] in (1, q.shape[0])
            and cos.shape[1] == q.shape[3 - dim] == k.shape[3 - dim]
        ):
            width, channels = cos.shape[2], q.shape[3]
            if takes_half and 2 * width == channels:
                return rotate_pair(q, k, _doubled(cos), _doubled(sin), dim == 1)
            if (takes_full and width == channels) or (takes_narrow and width < channels):
                return rotate_pair(q, k, cos, sin, dim == 1)
        return function(q, k, cos, sin, *rest, **options)

    return rotate


def _with_fused_rotation(original: type) -> Callable[..., Any]:
    """Return the forward of an attention class with a fused rotation instead of its global function."""
    method: Any = original.forward  # type: ignore[attr-defined]
    function = inspect.unwrap(method).__globals__[_ROTATE]
    return with_functions(method, {_ROTATE: _fused_rotation(function)})


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


def _uses_rotation(module: Any) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return _ROTATE in names_used(forward) and _ROTATE in getattr(forward, "__globals__", {})


RULES = [
    FusionRule(
        "gated MLP",
        lambda module: any(_has_layers(module, family) for family in _FAMILIES),
        _glu_reason,
        lambda original: glu_forward,
        _glu_probe,
        _glu_settings,
    ),
    FusionRule("rotary embedding", _uses_rotation, _rope_reason, _with_fused_rotation),
    FusionRule(
        "cross-entropy",
        lambda module: isinstance(module, nn.CrossEntropyLoss),
        unless_overridden(
            nn.CrossEntropyLoss, lambda module: "classes have weights" if module.weight is not None else ""
        ),
        lambda original: cross_entropy_forward,
    ),
]
