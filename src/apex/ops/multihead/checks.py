"""Bad arguments of multihead attention, refused in clear words before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_heads(embed_dim: int, heads: int) -> None:
    if heads < 1 or embed_dim % heads:
        raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={heads}")


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")


def check_self(inputs: Tensor, input_weights: Tensor, output_weights: Tensor, heads: int, dropout: float) -> None:
    width = _check_inputs("query", inputs)
    check_heads(width, heads)
    check_dropout(dropout)
    _check_weights("input_weights", input_weights, 3 * width, width)
    _check_weights("output_weights", output_weights, width, width)


def check_encdec(inputs_q: Tensor, inputs_kv: Tensor, weights: Sequence[Tensor], heads: int, dropout: float) -> None:
    """`weights` are those of the queries, of keys and values, and of the outputs."""
    width = _check_inputs("query", inputs_q)
    _check_inputs("key", inputs_kv)
    if inputs_q.shape[1:] != inputs_kv.shape[1:]:
        raise ValueError(
            f"query {list(inputs_q.shape)} and key {list(inputs_kv.shape)} must agree in batch and embedding"
        )
    check_heads(width, heads)
    check_dropout(dropout)
    for name, weight, rows in zip(
        ("input_weights_q", "input_weights_kv", "output_weights"), weights, (1, 2, 1), strict=True
    ):
        _check_weights(name, weight, rows * width, width)


def _check_inputs(name: str, tensor: Tensor) -> int:
    """The size of the embedding."""
    if tensor.dim() != 3:
        raise ValueError(f"the {name} has shape {list(tensor.shape)}, expected [length, batch, embed_dim]")
    return tensor.shape[2]


def _check_weights(name: str, weights: Tensor, rows: int, columns: int) -> None:
    if weights.shape != (rows, columns):
        raise ValueError(f"{name} has shape {list(weights.shape)}, expected {[rows, columns]} for this query")
