"""Rules for language models: gated linear units, rotary embeddings, cross-entropy, and a head with its loss."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from ..ops._library import autocast_dtype
from ..ops.glu import bias_glu, glu_pair
from ..ops.glu.reference import ACTIVATIONS, activated
from ..ops.rope import rotary_embedding_pair
from .rule import Rule, has_hooks, names_used, random_input, unless_overridden


class _Gated(NamedTuple):
    """Names of the layers of an MLP with a gate, in the words of one family of models, and all names it uses."""

    gate: str
    value: str  # "" where one layer gives gate and value together
    activation: str
    down: str
    others: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        return frozenset({self.gate, self.value, self.activation, self.down} - {""})


_T5_NAMES = frozenset({"dropout", "isinstance", "weight", "torch", "Tensor", "dtype", "int8", "to"})
_FAMILIES = (
    _Gated("gate_proj", "up_proj", "act_fn", "down_proj"),  # Llama, Qwen, Mistral, Gemma
    _Gated("gate_up_proj", "", "activation_fn", "down_proj", frozenset({"chunk"})),  # Phi-3
    _Gated("wi_0", "wi_1", "act", "wo", _T5_NAMES),  # T5
)


def _has_layers(module: Any, family: _Gated) -> bool:
    return all(hasattr(module, name) for name in family.names)


def activation_name(activation: Any) -> str | None:
    """Which activation of the gated units a function or module computes, by trying it; None if it is another one."""
    if isinstance(activation, nn.Module) and (has_hooks(activation) or any(True for _ in activation.parameters())):
        return None
    x = torch.linspace(-4, 4, 65, dtype=torch.float32, device=torch.Generator().device)
    with torch.no_grad():
        y = activation(x)
        return next((name for name in ACTIVATIONS if torch.allclose(y, activated(x, name), atol=1e-5)), None)


def _glu_settings(module: Any) -> tuple[_Gated, str | None, Any]:
    """The names, the activation, and the class or function in which it was found."""
    family = next(family for family in _FAMILIES if _has_layers(module, family))
    activation = getattr(module, family.activation)
    return family, activation_name(activation), _kind(activation)


def _kind(activation: Any) -> Any:
    """What tells that an activation is still the one that was tried; None where hooks wait for it to be called."""
    if not isinstance(activation, nn.Module):
        return activation
    return None if has_hooks(activation) else type(activation)


def _glu_reason(module: Any) -> str:
    family, activation, _ = _glu_settings(module)
    used = set(names_used(type(module).forward))
    if not family.names <= used <= family.names | family.others:
        return "its forward uses other names: " + ", ".join(sorted(used ^ family.names))
    return "" if activation else f"its activation is none of {', '.join(ACTIVATIONS)}"


def _glu_probe(module: Any) -> Tensor | None:
    width = getattr(getattr(module, _glu_settings(module)[0].gate), "in_features", None)
    return None if width is None else random_input(module, 2, width)


def glu_forward(self: Any, hidden_states: Tensor) -> Tensor:
    family, activation, kind = self.fused_settings
    if _kind(getattr(self, family.activation)) is not kind:
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


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Query and key [batch, heads, tokens, channels] rotated by tables [batch or 1, tokens, channels].

    With `unsqueeze_dim=2` they are [batch, tokens, heads, channels]. PyTorch applies tables that differ in a batch.
    """
    if cos.dim() == 3 and cos.shape[0] == 1 and unsqueeze_dim in (1, 2) and q.dim() == 4:
        tables = cos[0][:, None, None], sin[0][:, None, None]
        if unsqueeze_dim == 2:
            return rotary_embedding_pair(q, k, tables, tensor_format="bshd")
        query, key = rotary_embedding_pair(q.transpose(1, 2), k.transpose(1, 2), tables, tensor_format="bshd")
        return query.transpose(1, 2), key.transpose(1, 2)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [torch.cat((-second, first), -1) for first, second in (q.chunk(2, -1), k.chunk(2, -1))]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


_ROTATE = "apply_rotary_pos_emb"


def _rope_reason(module: Any) -> str:
    forward = type(module).forward
    function: Any = getattr(forward, "__globals__", {}).get(_ROTATE)
    if hasattr(forward, "__wrapped__") or not isinstance(forward, types.FunctionType):
        return "its forward is wrapped by a decorator"
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"its {_ROTATE} takes other arguments"
    q, k, cos, sin = (random_input(nn.Identity(), *s) for s in ((2, 3, 5, 8), (2, 1, 5, 8), (1, 5, 8), (1, 5, 8)))
    try:
        same = all(map(torch.allclose, function(q, k, cos, sin), rotate_pair(q, k, cos, sin)))
    except (RuntimeError, TypeError, ValueError):
        same = False
    return "" if same else f"its {_ROTATE} computes something else"


def _with_fused_rotation(original: type) -> Callable[..., Any]:
    """The forward of an attention with another rotation in the place of the global function that it calls.

    Its own globals are copied, not changed: other models of the same library go on as they were.
    """
    method: Any = original.forward  # type: ignore[attr-defined]
    names = {**method.__globals__, _ROTATE: rotate_pair}
    names.pop("__name__", None)  # by which torch.compile would find the module, with the function that was replaced
    made = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, method.__closure__)
    made.__kwdefaults__ = method.__kwdefaults__
    return functools.update_wrapper(made, method, updated=())


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


# What the forward of a causal language model names that does nothing with logits but give them to the loss.
_HEAD_NAMES = {
    *("model", "transformer", "config", "vocab_size", "lm_head", "loss_function", "slice_logits_to_keep"),
    *("slice", "isinstance", "int", "past_key_values", "last_hidden_state", "hidden_states", "attentions"),
    *("cross_attentions", "output_attentions", "output_hidden_states", "use_return_dict"),
    *("CausalLMOutputWithPast", "CausalLMOutputWithCrossAttentions"),
}


def _has_head(module: Any) -> bool:
    return type(module).__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(module, "lm_head")


def _head_reason(module: Any) -> str:
    used = set(names_used(type(module).forward))
    if used - _HEAD_NAMES:
        return "its forward also uses " + ", ".join(sorted(used - _HEAD_NAMES))
    if not used >= {"lm_head", "loss_function"}:
        return "its forward does not call lm_head and loss_function"
    return _head_obstacle(module)


def _head_obstacle(module: Any) -> str:
    """Why the loss of a model cannot be computed without its logits right now."""
    if type(module.lm_head).forward is not nn.Linear.forward or has_hooks(module.lm_head):
        return f"lm_head is {type(module.lm_head).__name__}, or has hooks, and must be called"
    if getattr(module.loss_function, "__name__", "") != "ForCausalLMLoss":
        return "its loss_function is another one than ForCausalLMLoss"
    if type(module.lm_head.weight) is not nn.Parameter:
        return "the weight of lm_head is a tensor of another class (sharded?)"
    return ""


class _HeadStandIn:
    """What the forward of a causal language model takes for the model: the logits it gets are hidden states."""

    def __init__(self, model: Any) -> None:
        self.config, self.vocab_size = model.config, model.config.vocab_size
        for name in ("model", "transformer"):
            if name in model._modules:
                setattr(self, name, model._modules[name])
        self.head = model._modules["lm_head"]

    def lm_head(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def loss_function(self, logits: Tensor, labels: Tensor, ignore_index: int = -100, **options: Any) -> Tensor:
        """The loss of the next token of each of the hidden states `logits`, with the options of ForCausalLMLoss."""
        target, count = options.get("shift_labels"), options.get("num_items_in_batch")
        if target is None:
            target = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "mean" if count is None else "sum"}
        loss = linear_cross_entropy(logits, self.head.weight, target.to(logits.device), self.head.bias, **how)
        if count is None:
            return loss
        return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def _head_forward(original: type) -> Callable[..., Any]:
    method: Any = original.forward  # type: ignore[attr-defined]

    @functools.wraps(method)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training or kwargs.get("labels") is None or _head_obstacle(self):
            return method(self, *args, **kwargs)
        outputs = method(_HeadStandIn(self), *args, **kwargs)
        if isinstance(outputs, tuple):
            return outputs[0], *outputs[2:]
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})

    return forward


def _uses_rotation(module: Any) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return _ROTATE in names_used(forward) and _ROTATE in getattr(forward, "__globals__", {})


RULES = [
    Rule(
        "gated MLP",
        lambda module: any(_has_layers(module, family) for family in _FAMILIES),
        _glu_reason,
        lambda original: glu_forward,
        _glu_probe,
        _glu_settings,
    ),
    Rule("rotary embedding", _uses_rotation, _rope_reason, _with_fused_rotation),
    Rule("linear layer + cross-entropy", _has_head, _head_reason, _head_forward),
    Rule(
        "cross-entropy",
        lambda module: isinstance(module, nn.CrossEntropyLoss),
        unless_overridden(
            nn.CrossEntropyLoss, lambda module: "classes have weights" if module.weight is not None else ""
        ),
        lambda original: cross_entropy_forward,
    ),
]
