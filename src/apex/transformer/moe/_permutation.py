"""Rows of tokens sorted by expert, and back. Letters: T tokens, E experts, K experts of a token, H hidden size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops._checks import at_hand
from ...ops._library import compute_dtype


def permute(
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the rows of tokens [T, H] sorted by expert, their `probs`, and the token of each row.

    `routing_map` is a bool [T, E]. With `num_out_tokens`, the number of rows, the host need not ask the device for it.
    `drop_and_pad` needs it, and gives each expert the same number of rows. There is one implementation, for either
    value of `fused`.
    """
    _check_map(tokens.shape[0], routing_map, probs)
    experts_first = routing_map.t().reshape(-1)
    if drop_and_pad and (num_out_tokens is None or num_out_tokens % routing_map.shape[1]):
        raise ValueError(f"drop_and_pad needs num_out_tokens, a multiple of the experts, got {num_out_tokens}")
    if num_out_tokens is not None and (
        num_out_tokens < 0 or (at_hand(routing_map) and num_out_tokens > int(routing_map.count_nonzero()))
    ):
        raise ValueError(f"num_out_tokens={num_out_tokens} must be at most the number of choices in routing_map")
    if num_out_tokens is None:
        chosen = experts_first.nonzero().squeeze(1)
    else:
        chosen = experts_first.logical_not().to(torch.uint8).sort(stable=True).indices[:num_out_tokens]
    sorted_indices = chosen % tokens.shape[0]
    own_probs = None if probs is None else probs.t().reshape(-1)[chosen]
    return tokens[sorted_indices], own_probs, sorted_indices


def unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: Sequence[int],
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    """Return tokens of `restore_shape`, each the sum of its rows, times `probs` [T, E] if given with `routing_map`.

    `sorted_indices` is the token of each row, from `permute`. Sums have the same order each time, in float32 for half
    precision. There is one implementation, for either value of `fused` and of `drop_and_pad`.
    """
    if len(restore_shape) != 2 or permuted_tokens.shape != (*sorted_indices.shape, restore_shape[1]):
        raise ValueError(
            f"permuted_tokens has shape {list(permuted_tokens.shape)}, which does not fit {sorted_indices.numel()} "
            f"sorted_indices and restore_shape={list(restore_shape)}, [tokens, hidden size]"
        )
    rows = permuted_tokens.to(compute_dtype(permuted_tokens))
    if probs is not None:
        if routing_map is None:
            raise ValueError("probs needs routing_map, the map that permute got")
        _check_map(restore_shape[0], routing_map, probs)
        experts_first = routing_map.t().reshape(-1).logical_not().to(torch.uint8)
        chosen = experts_first.sort(stable=True).indices[: sorted_indices.shape[0]]
        rows = rows * probs.t().reshape(-1)[chosen].to(rows.dtype)[:, None]
    order = sorted_indices.sort(stable=True).indices
    lengths = torch.zeros(restore_shape[0], dtype=torch.int64, device=rows.device)
    lengths = lengths.index_add(0, sorted_indices, torch.ones_like(sorted_indices))
    summed = torch.segment_reduce(rows[order], "sum", lengths=lengths, unsafe=True)
    return summed.to(permuted_tokens.dtype).view(torch.Size(restore_shape))


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Sequence[int] | Tensor,
    sorted_idxs: Sequence[int] | Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return chunks of rows of these sizes in another order, and chunks of `probs` likewise.

    There is one implementation, for either value of `fused`.
    """
    sizes, order = (x.tolist() if isinstance(x, Tensor) else list(x) for x in (split_sizes, sorted_idxs))

    if sorted(order) != list(range(len(sizes))):
        raise ValueError(f"sorted_idxs must name each of {len(sizes)} chunks once, got {order}")

    def sorted_chunks(tensor: Tensor) -> Tensor:
        chunks = tensor.split(sizes)
        return torch.cat([chunks[index] for index in order]) if order else tensor

    return sorted_chunks(input), None if probs is None else sorted_chunks(probs)


def _check_map(tokens: int, routing_map: Tensor, probs: Tensor | None) -> None:
    if routing_map.dim() != 2 or routing_map.shape[0] != tokens:
        raise ValueError(f"routing_map has shape {list(routing_map.shape)}, expected [{tokens} tokens, experts]")
    if probs is not None and probs.shape != routing_map.shape:
        raise ValueError(f"probs has shape {list(probs.shape)}, routing_map {list(routing_map.shape)}")


def count_rows(index: Tensor, experts: int) -> Tensor:
    """Return the number of rows of each expert, int64; the index E means no expert."""
    flat = index.reshape(-1)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=index.device)
    return counts.index_add(0, flat, torch.ones_like(flat))[:experts]


class RowsOfTokens(torch.autograd.Function):
    """Rows of tokens: row r is token `token[r]`, or zeros if that is T.

    `rows_of` [T, K] are the rows of each token; the number of rows stands for no row. The backward pass sums them in
    this order, without atomic additions.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, rows_of: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(token, rows_of)
        return _or_zeros(tokens, token)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return TokensOfRows.apply(gradient, *ctx.saved_tensors), None, None


class TokensOfRows(torch.autograd.Function):
    """Sums over each token's rows, in float32 for half precision; the reverse of `RowsOfTokens`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, rows_of: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(token, rows_of)
        own_rows = _or_zeros(rows, rows_of.reshape(-1)).view(*rows_of.shape, rows.shape[1])
        return own_rows.sum(1, dtype=compute_dtype(rows)).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return RowsOfTokens.apply(gradient, *ctx.saved_tensors), None, None


def _or_zeros(rows: Tensor, index: Tensor) -> Tensor:
    """Return rows by index; the index behind the last row gives zeros."""
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1]))).index_select(0, index)
