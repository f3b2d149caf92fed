"""The rule for the head of a language model: the last linear layer and its loss, without ever holding the logits.

The model's own forward runs on a stand-in for the model, whose head returns a `_Logits`: an object that keeps the
hidden states and records what the forward does with the logits (a scale, a soft cap). The loss is computed from it.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..contrib.xentropy import linear_cross_entropy
from .rule import FusionRule, has_hooks, names_used, with_functions

_LOSS = "CrossEntropyLoss"  # T5 makes one
_ADDED = "final_logits_bias"  # a buffer of BART
_KINDS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MarianMTModel")
# Attribute names of heads, and of the language model inside an image model, which computes the loss (Llama 4).
_HEADS = ("lm_head", "proj_out", "output_projection", "embed_out", "generator_lm_head")
_INNER = "language_model"
_CAUSAL, _MASKED = "ForCausalLMLoss", "ForMaskedLMLoss"  # loss functions of transformers; the second does not shift
_PROJECTION = "out_proj"  # the linear layer of a head that is a module of its own (T5Gemma)

# Names that the forward of a language model may use: `_Logits` records every operation on logits among them.
_NAMES = {
    # backbones and their outputs
    *("model", "transformer", "gpt_neox", "decoder", "encoder", "get_decoder", "last_hidden_state", "hidden_states"),
    *("attentions", "cross_attentions", "past_key_values", "image_hidden_states", "rope_deltas", "router_logits"),
    *("encoder_last_hidden_state", "encoder_hidden_states", "encoder_attentions", "decoder_hidden_states"),
    *("decoder_attentions", "video_hidden_states", "audio_hidden_states"),
    # settings
    *("config", "text_config", "get_text_config", "vocab_size", "output_attentions", "output_hidden_states"),
    *("use_return_dict", "return_dict", "use_cache", "model_dim", "scale_decoder_outputs", "tie_word_embeddings"),
    # the head, and operations on logits
    *(*_HEADS, "loss_function", "slice_logits_to_keep", "CrossEntropyLoss", "contiguous", "float", "view", "size"),
    *("nn", "shape", "reshape", "dtype", "generator_predictions"),
    *("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier"),
    *("torch", "tanh"),
    # a router's loss, which is added to the model's loss
    *("output_router_logits", "load_balancing_loss_func", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("router_aux_loss_coef", "aux_loss", "aux_loss_coef", "is_moe", "math", "floor", "sqrt"),
    # Python, T5
    *("slice", "isinstance", "int", "len", "getattr", "Tensor", "to", "device", "_shift_right", "BaseModelOutput"),
    *("logger", "warning", "warning_once", "warn", "warnings", "FutureWarning", "num_layers", "num_decoder_layers"),
    *("model_parallel", "cuda", "set_device", "first_device", "weight", "training", "_attn_implementation"),
    *("original_max_position_embeddings", "rope_scaling"),
    # image models before transformers 5
    *("vision_feature_layer", "vision_feature_select_strategy", "vision_config"),
    # BART and its relatives
    *("shift_tokens_right", "pad_token_id", "decoder_start_token_id", _ADDED),
    *("encoder_global_attentions", "encoder_router_logits", "decoder_router_logits"),
    # speech: labels and masks of audio
    *("max_target_positions", "ValueError", "pop", "tuple", "list", "attention_mask", "labels"),
    # the language model inside an image model, and the assembly of its inputs
    *(_INNER, "get_input_embeddings", "get", "get_image_features", "get_placeholder_mask", "masked_scatter"),
    *("multi_modal_projector", "deepstack_features", "image_pooler_output", "video_pooler_output", "shared_kv_states"),
    # other names of backbones and of their states
    *("biogpt", "cpmant", "electra", "gpt_neox_japanese", "led", "backbone", "cache_params"),
    # Bamba's second loss; Udop, Marian, T5Gemma 2
    *("z_loss_coefficient", "logsumexp", "pow", "mean", "d_model"),
    *("decoder_vocab_size", "prepare_decoder_input_ids_from_labels"),
}
_PATTERNS = re.compile(
    r"\w*CausalLMOutput(WithPast|WithCrossAttentions)?|\w*Seq2Seq(LM|MoE)Output|\w+__HEAD_MASK_WARNING_MSG"
)


class _UnsupportedError(TypeError):
    """An error of `_Logits`: the forward does something with logits that cannot be recorded."""


class _Logits:
    """Logits that are not computed: scale * head(hidden), or cap * tanh(scale * head(hidden) / cap).

    `added` is a buffer of the model, one value per class, that is added to head(hidden), as BART has it.
    """

    added: Tensor | None = None

    def __init__(self, hidden: Tensor, head: nn.Linear, scale: float = 1.0, is_tanh: bool = False, cap: float = 0.0):
        self.hidden, self.head, self.scale, self.is_tanh, self.cap = hidden, head, scale, is_tanh, cap
        self.device, self.dtype, self.shape = hidden.device, hidden.dtype, (*hidden.shape[:-1], head.out_features)

    def __mul__(self, factor: float) -> _Logits:
        if self.cap or self.added is not None or not isinstance(factor, (int, float)):
            raise _UnsupportedError("a factor that is a tensor, or after a soft cap")
        if self.is_tanh:
            return _Logits(self.hidden, self.head, self.scale * factor, True, factor)
        return _Logits(self.hidden, self.head, self.scale * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> _Logits:
        return self * (1 / divisor)

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> _Logits:
        if function is not torch.tanh or args[0].is_tanh or args[0].added is not None:
            raise _UnsupportedError(str(function))
        logits = args[0]
        return _Logits(logits.hidden, logits.head, logits.scale, True)

    def _refuse(self, *operands: Any) -> _Logits:
        raise _UnsupportedError("another operator")

    def __add__(self, other: Any) -> _Logits:
        if not isinstance(other, _Buffer) or self.scale != 1.0 or self.is_tanh or self.added is not None:
            raise _UnsupportedError("another sum than with the model's buffer")
        logits = _Logits(self.hidden, self.head)
        logits.added = other.tensor.reshape(-1)
        return logits

    __radd__ = __sub__ = __rsub__ = __neg__ = __pow__ = __matmul__ = __rtruediv__ = _refuse

    def __getitem__(self, index: Any) -> _Logits:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() < len(self.shape)
        if not is_mask and (not isinstance(index, tuple) or index[0] is not Ellipsis or index[-1] != slice(None)):
            raise _UnsupportedError("a part of the classes")
        logits = _Logits(self.hidden[index], self.head, self.scale, self.is_tanh, self.cap)
        logits.added = self.added
        return logits

    def __getattr__(self, name: str) -> Any:
        raise _UnsupportedError(name)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def float(self) -> _Logits:
        return self

    def contiguous(self) -> _Logits:
        return self

    def view(self, *shape: int) -> _Logits:
        return self

    reshape = view

    def to(self, device: Any) -> _Logits:
        return self

    def cross_entropy(self, target: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy of the logits; `target` has one class for each row of hidden states."""
        if self.is_tanh and not self.cap:
            raise _UnsupportedError("a loss of tanh(logits)")
        rows = self.hidden.shape[:-1]
        if target.numel() != rows.numel():
            raise ValueError(f"labels of the shape {(*target.shape,)} do not fit logits for {(*rows,)} tokens")
        target = target.to(self.device).reshape(rows)
        scales = {"logit_scale": float(self.scale), "softcap": float(self.cap) or None}
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction, **scales}
        bias: Any = self.head.bias
        if self.added is not None:
            added = self.added.to(self.head.weight.dtype)
            bias = added if bias is None else bias + added
        return linear_cross_entropy(self.hidden, self.head.weight, target, bias, **options)


class _Buffer:
    """A replacement of the buffer that is added to the logits. Dynamo does not call `_Logits.__add__` with tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> _Buffer:
        return self


class _Head:
    """A replacement of the head that returns logits that are not computed; its attributes are the layer's."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer

    def __call__(self, hidden_states: Tensor) -> _Logits:
        return _Logits(hidden_states, self.layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class _CrossEntropyLoss(nn.CrossEntropyLoss):
    """A replacement of the loss that a model's forward makes, for logits that are not computed."""

    def forward(self, input: Any, target: Tensor) -> Tensor:
        if isinstance(input, _Logits):
            return input.cross_entropy(target, self.ignore_index, self.reduction)
        return super().forward(input, target)


class _Settings(NamedTuple):
    """How a model computes its loss.

    - `head`: the name of the head; "" if it belongs to an inner language model, whose settings are `inner`;
    - `is_wrapped`: whether the head is a module that only calls its linear layer;
    - `loss`: the name of the model's `loss_function`, "" if its forward makes a loss of torch.nn;
    - `takes_shifted`: whether `loss_function` has the argument `shift_labels` (not in older transformers).
    """

    head: str
    is_wrapped: bool
    loss: str
    takes_shifted: bool
    inner: Any = None


class _StandIn:
    """A replacement of `self` in a language model's forward; its attributes are the model's, except head and loss."""

    def __init__(self, model: Any, settings: _Settings) -> None:
        self.owner, self.settings = model, settings
        if settings.inner is None:
            setattr(self, settings.head, _Head(_layer(model, settings)))
        else:
            self.language_model = _Inner(model._modules[_INNER], settings.inner)
        if _ADDED in model._buffers:
            self.final_logits_bias = _Buffer(model._buffers[_ADDED])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def loss_function(
        self,
        logits: _Logits,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the next-token loss, or the loss of masked tokens; the signature is transformers'."""
        target, count = shift_labels if self.settings.takes_shifted else None, num_items_in_batch
        if self.settings.loss == _MASKED:
            target = labels
        elif target is None:
            target = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = logits.cross_entropy(target, ignore_index, "mean" if count is None else "sum")
        if count is None:
            return loss
        return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


class _Inner:
    """A replacement of the language model inside an image model; a call returns logits that are not computed."""

    def __init__(self, model: Any, settings: _Settings) -> None:
        self.owner, self.settings = model, settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _plain_class(self.owner).forward(_StandIn(self.owner, self.settings), *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)


def _plain_class(module: Any) -> Any:
    """Return the class that a module had before it was fused."""
    return getattr(type(module), "fused_from", type(module))


def _layer(model: Any, settings: _Settings) -> Any:
    """Return the linear layer of a model's head."""
    head = model._modules[settings.head]
    return head._modules.get(_PROJECTION) if settings.is_wrapped else head


def _head_name(module: Any) -> str:
    return next((name for name in _HEADS if name in module._modules), "")


def _has_head(module: Any) -> bool:
    """Return whether a module is a language model with a head, or has one inside. A PeftModel is none of these."""
    if not type(module).__name__.endswith(_KINDS):
        return False
    inner = module._modules.get(_INNER)
    return bool(_head_name(module)) or (inner is not None and _has_head(inner) and _calls_loss(_plain_class(module)))


def _calls_loss(kind: Any) -> bool:
    """Return whether the forward of a class computes a loss from logits."""
    return "loss_function" in names_used(kind.forward) or bool(_losses(kind))


def _losses(kind: Any) -> dict[str, Any]:
    """Return replacements of globals for a forward that makes a loss of torch.nn; {} if it calls `loss_function`."""
    used, names = names_used(kind.forward), getattr(inspect.unwrap(kind.forward), "__globals__", {})
    if _LOSS not in used:
        return {}
    changes: dict[str, Any] = {_LOSS: _CrossEntropyLoss} if names.get(_LOSS) is nn.CrossEntropyLoss else {}
    if "nn" in used and names.get("nn") is nn:  # `_NAMES` allows no other attribute of torch.nn
        changes["nn"] = SimpleNamespace(CrossEntropyLoss=_CrossEntropyLoss)
    return changes


def _reason(module: Any) -> str:
    kind: Any = _plain_class(module)
    used = set(names_used(kind.forward))
    others = {name for name in used - _NAMES if not _PATTERNS.fullmatch(name)}
    if others:
        return "its forward also uses " + ", ".join(sorted(others))
    head = _head_name(module) or _INNER
    if head not in used or not _calls_loss(kind):
        return f"its forward does not call {head} and loss_function"
    if _method(kind) is None:
        return "its forward is wrapped by a decorator"
    inner = _reason(module._modules[_INNER]) if head == _INNER else ""
    return inner or _obstacle(module, _settings(module))


def _obstacle(module: Any, settings: _Settings) -> str:
    """Return the reason why a model's loss cannot be computed without its logits at this time, "" if it can."""
    if settings.loss and (
        settings.loss not in (_CAUSAL, _MASKED) or getattr(module.loss_function, "__name__", "") != settings.loss
    ):
        return f"its loss_function is another one than {_CAUSAL} and {_MASKED}"
    owner = module
    if settings.inner is not None:
        owner, settings = module._modules[_INNER], settings.inner
        if has_hooks(owner):
            return f"{_INNER} has hooks and must be called"
    head, layer = owner._modules[settings.head], _layer(owner, settings)
    if getattr(type(layer), "forward", None) is not nn.Linear.forward or has_hooks(layer) or has_hooks(head):
        return f"{settings.head} is {type(head).__name__}, or has hooks, and must be called"
    if type(layer.weight) not in (nn.Parameter, Tensor):
        return f"the weight of {settings.head} is a tensor of another class (sharded?)"
    return ""


# Arguments that keep the model's own setting of `use_cache`. Without a cache, transformers treats positions that
# restart at 0 as separate packed sequences, which do not attend to each other.
_KEEP_CACHE = ("use_cache", "past_key_values", "position_ids")


def _settings(module: Any) -> _Settings:
    name = _head_name(module)
    is_wrapped = bool(name) and names_used(type(module._modules[name]).forward) == (_PROJECTION,)
    inner = None if name else _settings(module._modules[_INNER])
    if _losses(_plain_class(module)):
        return _Settings(name, is_wrapped, "", False, inner)
    function = module.loss_function
    takes_shifted = "shift_labels" in inspect.signature(function).parameters
    return _Settings(name, is_wrapped, getattr(function, "__name__", "unknown"), takes_shifted, inner)


@functools.cache
def _method(kind: Any) -> Any:
    """Return the forward of a class, changed to make losses that take `_Logits`; None if it cannot be changed."""
    return with_functions(kind.forward, changes) if (changes := _losses(kind)) else kind.forward


def _head_forward(original: Any) -> Callable[..., Any]:
    method, changed = original.forward, _method(original)
    names = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)  # trainers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels, settings = kwargs.get("labels"), self.fused_settings
        if not self.training or labels is None or settings is None or _obstacle(self, settings):
            return method(self, *args, **kwargs)
        arguments = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        if "use_cache" in names and not any(arguments.get(name) is not None for name in _KEEP_CACHE):
            kwargs["use_cache"] = False  # a training step does not read the cache, which copies all keys and values
        try:
            outputs = changed(_StandIn(self, settings), *args, **kwargs)
        except _UnsupportedError:
            self.fused_settings = None  # from now on the logits are computed
            return method(self, *args, **kwargs)
        if isinstance(outputs, tuple):
            return outputs[0], None, *outputs[2:]
        return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})

    return forward


RULES = [
    FusionRule(
        "linear layer + cross-entropy",
        _has_head,
        _reason,
        _head_forward,
        settings=_settings,
        omitted=("logits", "1"),
    )
]
