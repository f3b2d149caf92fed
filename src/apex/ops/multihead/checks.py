"""Checks of the arguments of multihead attention, made before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_heads(embed_dim: int, heads: int) -> None:
    if heads < 1 or embed_dim % heads:
        raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={heads}")


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")


def check_attention(inputs: Sequence[Tensor], weights: Sequence[Tensor], heads: int, dropout: float) -> None:
    """Raise if the shapes of inputs (one, or query and key), input weights and output weights do not fit together."""
    # The lists have equal lengths: torch.compile of PyTorch 2.9 takes every zip for a strict one.
    for name, tensor in zip(("query", "key")[: len(inputs)], inputs, strict=True):
        if tensor.dim() != 3:
            raise ValueError(f"the {name} has shape {list(tensor.shape)}, expected [length, batch, embed_dim]")
    width = inputs[0].shape[2]
    names, parts = ("input_weights", "output_weights"), (3, 1)
    if len(inputs) == 2:
        names, parts = ("input_weights_q", "input_weights_kv", "output_weights"), (1, 2, 1)  # type: ignore[assignment]
        if inputs[0].shape[1:] != inputs[1].shape[1:]:
            shapes = [list(each.shape) for each in inputs]
            raise ValueError(f"query {shapes[0]} and key {shapes[1]} must agree in batch and embedding")
    check_heads(width, heads)
    check_dropout(dropout)
    for name, weight, count in zip(names, weights, parts, strict=True):
        if weight.shape != (count * width, width):
            expected = [count * width, width]
            raise ValueError(f"{name} has shape {list(weight.shape)}, expected {expected} for this query")
