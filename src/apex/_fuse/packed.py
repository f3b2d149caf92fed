"""Packed sequences in decoders of transformers: attention within each sequence, without a mask of tokens x tokens.

Collators that pack sequences hand their edges to the model (`cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`,
`max_length_k`). PyTorch's attention as transformers calls it does not read them, and gets a mask instead, for which
there is no flash kernel. A fused decoder marks its packed batches by a mask of a shape that attention cannot take, so
that attention that does not know it raises an error instead of mixing sequences. Fused attention reads the edges.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from .rule import FusedModule, names_used

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # transformers' table of attention functions, a global of its models
EDGES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_SHAPE = (1, 1, 2, 3)


def packed_mask(device: torch.device) -> Tensor:
    """Return the mask that marks a packed batch."""
    return torch.zeros(_SHAPE, dtype=torch.bool, device=device)


def has_edges(arguments: dict[str, Any]) -> bool:
    """Return whether a call of a decoder has the edges of packed sequences, in one row."""
    first, second, *lengths = (arguments.get(name) for name in EDGES)
    rows = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    is_given = isinstance(first, Tensor) and isinstance(second, Tensor) and all(type(n) is int for n in lengths)
    return is_given and isinstance(rows, Tensor) and rows.shape[0] == 1


class PackedInterface:
    """A replacement of transformers' table of attention functions whose "sdpa" takes packed batches."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def __getitem__(self, name: str) -> Any:
        function = self.functions[name]
        return functools.partial(attend, function) if name == "sdpa" else function

    def get_interface(self, name: str, default: Any) -> Any:
        """Return an attention function by name."""
        function = self.functions.get_interface(name, default)
        return functools.partial(attend, function) if name == "sdpa" else function


def attend(
    function: Any,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *args: Any,
    **options: Any,
) -> Any:
    """Call an attention function of transformers, or attend within packed sequences if the mask marks them.

    The parameters have the names of transformers' functions, because vision models pass the mask by name.
    """
    if attention_mask is None or attention_mask.shape != _SHAPE or options.get(EDGES[0]) is None:
        return function(module, query, key, value, attention_mask, *args, **options)
    edges, key_edges, longest, longest_key = (options[name] for name in EDGES)
    if args or options.get("is_causal") is False or not _takes_flash(query, value):
        return function(module, query, key, value, _mask_of(edges, query.shape[2]), *args, **options)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # tokens, heads, channels
    edges, key_edges = edges.to(torch.int32), key_edges.to(torch.int32)
    settings = (edges, key_edges, longest, longest_key, options.get("dropout", 0.0), True, False)
    output = torch.ops.aten._flash_attention_forward(q, k, v, *settings, scale=options.get("scaling"))[0]
    return output[None], None


def _takes_flash(query: Tensor, value: Tensor) -> bool:
    """Return whether PyTorch's flash attention for sequences of different lengths takes these tensors."""
    sizes = query.shape[-1], value.shape[-1]
    return (
        query.is_cuda
        and torch.version.hip is None
        and query.dtype.itemsize == 2
        and sizes[0] == sizes[1] <= 256
        and sizes[0] % 8 == 0
        and torch.backends.cuda.flash_sdp_enabled()
    )


def _mask_of(edges: Tensor, tokens: int) -> Tensor:
    """Return the mask of packed sequences: a token sees itself and the earlier tokens of its sequence."""
    index = torch.arange(tokens, dtype=edges.dtype, device=edges.device)
    sequence = torch.searchsorted(edges, index, right=True)
    return ((sequence[:, None] == sequence) & (index[:, None] >= index))[None, None]


def changed_interface(method: Any) -> dict[str, Any]:
    """Return the replacement of the table of attention functions, by its name, if a method uses it."""
    inner = inspect.unwrap(method)
    functions = getattr(inner, "__globals__", {}).get(INTERFACE)
    is_used = INTERFACE in names_used(inner) and functions is not None
    return {INTERFACE: PackedInterface(functions)} if is_used else {}


def takes_packed(decoder: nn.Module) -> bool:
    """Return whether all attention of a decoder reads the edges of packed sequences."""
    are_fused = []
    for module in decoder.modules():
        kind: Any = getattr(type(module), "fused_from", type(module))
        if INTERFACE in names_used(kind.forward):
            are_fused.append(isinstance(module, FusedModule) and module.fused_rule.name == "rotary embedding")
    return bool(are_fused) and all(are_fused)
