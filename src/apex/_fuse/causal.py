"""The rule for decoders of transformers: causal attention without a mask, under torch.compile and capture as well.

If a decoder is given no mask, transformers hands None to PyTorch's attention, whose flash kernels then do the causal
part. While a graph is traced or captured, transformers cannot read positions (sequences may be packed). It then builds
a mask of tokens x tokens, for which there is no flash kernel: 86 ms instead of 57 for a step of a Qwen3-like model on
an H200. If the caller gave neither mask nor positions nor a cache, the mask is plain, and no tensor needs to be read.
The fused forward is the decoder's own, but its mask functions return None for plain masks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ..ops.norm.reference import is_exporting
from .packed import has_edges, packed_mask, takes_packed
from .rule import FusedModule, FusionRule, names_used, with_functions

NAME = "causal attention without a mask"
PADDINGS = (None, "right")

# Mask functions of transformers, each with the name of the config's limit on how many tokens a query sees.
_MASKS = {
    "create_causal_mask": "",
    "create_sliding_window_causal_mask": "sliding_window",
    "create_chunked_causal_mask": "attention_chunk_size",
    "_prepare_4d_causal_attention_mask_for_sdpa": "",  # GPT-2 and others up to 4.52, if their attention is PyTorch's
}
_OLD_MASK = "_update_causal_mask"  # a method of decoders up to transformers 4.52; plain masks are never built
# Arguments of mask functions that a decoder computes itself if its caller did not give them.
_COMPUTED = {
    *("config", "inputs_embeds", "input_embeds", "past_key_values", "position_ids", "cache_position"),
    *("input_shape", "past_key_values_length"),
}
# Arguments of a decoder: if all are None, its mask is plain.
_DECISIVE = ("attention_mask", "past_key_values", "cache_position")


def _is_plain(options: dict[str, Any], limit: str, has_positions: bool) -> bool:
    """Return whether the arguments of a mask function ask for a causal mask of all tokens, for PyTorch's attention.

    If the decoder's caller gave positions (`has_positions`), sequences may be packed. Then the mask is plain only if
    the decoder keeps them from the mask function, as Qwen2-VL's decoder does with positions in three dimensions.
    """
    config: Any = options.get("config")
    if has_positions and options.get("position_ids") is not None:
        return False
    others = {name: value for name, value in options.items() if name not in _COMPUTED}
    if not others.pop("allow_is_causal_skip", True) or any(value is not None for value in others.values()):
        return False
    if config is not None and (config._attn_implementation != "sdpa" or not getattr(config, "is_causal", True)):
        return False
    if not limit:
        return True
    tokens = options.get("inputs_embeds", options.get("input_embeds")).shape[1]  # type: ignore[union-attr]
    return tokens < (getattr(config, limit, None) or 0)


def _unless_plain(function: Callable[..., Any], limit: str, has_positions: bool) -> Callable[..., Any]:
    """Return a mask function that returns None for plain masks, and calls `function` for others."""

    def create_mask(*args: Any, **options: Any) -> Any:
        is_plain = not args and _is_plain(options, limit, has_positions)
        return None if is_plain else function(*args, **options)

    return create_mask


def _packed_if_plain(function: Callable[..., Any], limit: str) -> Callable[..., Any]:
    """Return a mask function that marks packed batches, and calls `function` if the mask is not a plain one."""

    def create_mask(*args: Any, **options: Any) -> Any:
        embeds: Any = options.get("inputs_embeds", options.get("input_embeds"))
        is_plain = not args and embeds is not None and _is_plain(options, limit, False)
        return packed_mask(embeds.device) if is_plain else function(*args, **options)

    return create_mask


class DecoderSettings(NamedTuple):
    """Settings of a fused decoder: where its padding is, "" or "right", and whether its attention reads edges."""

    padding: str = ""
    takes_packed: bool = False


def _mask_functions(kind: Any) -> dict[str, Callable[..., Any]]:
    """Return the mask functions of transformers that the forward of a class calls, by name."""
    forward = inspect.unwrap(kind.forward)
    known = getattr(forward, "__globals__", {})
    functions: dict[str, Any] = {name: known.get(name) for name in names_used(forward) if name in _MASKS}
    return {name: f for name, f in functions.items() if getattr(f, "__module__", "").startswith("transformers.")}


def _is_decoder(module: Any) -> bool:
    kind = type(module)
    if not getattr(module, "is_decoder", True) or not hasattr(module, "config"):  # the encoder of T5
        return False
    if "attention_mask" not in inspect.signature(kind.forward).parameters:
        return False
    return bool(_mask_functions(kind)) or (hasattr(kind, _OLD_MASK) and _OLD_MASK in names_used(kind.forward))


def _reason(module: Any) -> str:
    attention = getattr(module.config, "_attn_implementation", "")
    if attention != "sdpa":
        return f"its attention is {attention!r}, not PyTorch's"
    return "" if _decoder_forward(type(module)) is not None else "its forward is wrapped by a decorator"


def _decoder_forward(original: Any) -> Any:
    """Return the fused forward of a decoder class, None if its forward cannot be rebuilt."""
    method, functions = original.forward, _mask_functions(original)
    without_mask = {}
    for has_positions in (False, True):
        changes = {name: _unless_plain(made, _MASKS[name], has_positions) for name, made in functions.items()}
        without_mask[has_positions] = with_functions(method, changes)
    if without_mask[False] is None:
        return None
    of_packed = with_functions(method, {name: _packed_if_plain(made, _MASKS[name]) for name, made in functions.items()})
    names = list(inspect.signature(method).parameters)[1:]

    @functools.wraps(method)  # callers read its signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names[: len(args)], args, strict=True)) | kwargs
        mask = arguments.get("attention_mask")
        settings = self.fused_settings
        if settings.padding == "right" and self.training and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # No token sees the padding behind it, and the loss ignores the padding's own rows.
            args, kwargs, arguments = (), {**arguments, "attention_mask": None}, {**arguments, "attention_mask": None}
        # An exported program may be called with other sizes, for which no mask means another attention.
        is_plain = all(arguments.get(name) is None for name in _DECISIVE) and not is_exporting()
        if is_plain and functions and settings.takes_packed and has_edges(arguments):
            return of_packed(self, *args, **kwargs)
        chosen = without_mask[arguments.get("position_ids") is not None] if is_plain else method
        return chosen(self, *args, **kwargs)

    return forward


def configure(model: nn.Module, padding: str | None) -> None:
    """Set the settings of all fused decoders of a model: where padding is, and whether attention reads edges.

    If `padding` is None, their padding setting stays. Call this when all modules are fused.
    """
    for module in model.modules():
        if isinstance(module, FusedModule) and module.fused_rule.name == NAME:
            known = module.fused_settings.padding if padding is None else padding
            module.fused_settings = DecoderSettings(known, takes_packed(module))


RULES = [FusionRule(NAME, _is_decoder, _reason, _decoder_forward, settings=lambda module: DecoderSettings())]
