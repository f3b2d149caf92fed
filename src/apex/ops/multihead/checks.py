"""Bad arguments of multihead attention, refused in clear words before anything is computed."""

from __future__ import annotations

from torch import Tensor


def check_heads(embed_dim: int, heads: int) -> None:
    if heads < 1 or embed_dim % heads:
        raise ValueError(f"embed_dim={embed_dim} must be divisible by num_heads={heads}")


def check_dropout(dropout: float) -> None:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout={dropout} must be at least 0 and less than 1")


def check_self(inputs: Tensor, input_weights: Tensor, output_weights: Tensor, heads: int, dropout: float) -> None:
    shape = inputs.shape
    if (
        len(shape) == 3
        and input_weights.shape == (3 * shape[2], shape[2])
        and output_weights.shape == (shape[2], shape[2])
        and heads > 0
        and shape[2] % heads == 0
        and 0.0 <= dropout < 1.0
    ):
        return
    _check_inputs("query", inputs)
    check_heads(shape[2], heads)
    check_dropout(dropout)
    _check_weights("input_weights", input_weights, 3 * shape[2], shape[2])
    _check_weights("output_weights", output_weights, shape[2], shape[2])


def check_encdec(
    inputs_q: Tensor,
    inputs_kv: Tensor,
    input_weights_q: Tensor,
    input_weights_kv: Tensor,
    output_weights: Tensor,
    heads: int,
    dropout: float,
) -> None:
    shape, other = inputs_q.shape, inputs_kv.shape
    if (
        len(shape) == 3
        and len(other) == 3
        and shape[1:] == other[1:]
        and input_weights_q.shape == output_weights.shape == (shape[2], shape[2])
        and input_weights_kv.shape == (2 * shape[2], shape[2])
        and heads > 0
        and shape[2] % heads == 0
        and 0.0 <= dropout < 1.0
    ):
        return
    _check_inputs("query", inputs_q)
    _check_inputs("key", inputs_kv)
    if shape[1:] != other[1:]:
        raise ValueError(f"query {list(shape)} and key {list(other)} must agree in batch and embedding")
    check_heads(shape[2], heads)
    check_dropout(dropout)
    _check_weights("input_weights_q", input_weights_q, shape[2], shape[2])
    _check_weights("input_weights_kv", input_weights_kv, 2 * shape[2], shape[2])
    _check_weights("output_weights", output_weights, shape[2], shape[2])


def _check_inputs(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 3:
        raise ValueError(f"the {name} has shape {list(tensor.shape)}, expected [length, batch, embed_dim]")


def _check_weights(name: str, weights: Tensor, rows: int, columns: int) -> None:
    if weights.shape != (rows, columns):
        raise ValueError(f"{name} has shape {list(weights.shape)}, expected {[rows, columns]} for this query")
