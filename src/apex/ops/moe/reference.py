"""Experts of a mixture in PyTorch operators: the definition, and the implementation when no kernel runs.

Letters: T tokens, E experts, K experts per token, H hidden size, F width of an expert, N = T K rows. Row n = t K + k is
token t at its k-th expert. `order` has the rows sorted by expert, and row n is at position `inverse[n]` in it. Expert e
has the sorted rows `offsets[e]` to `offsets[e + 1]`. Rows without an expert, whose index is E, come after all others.

Runs on any device in any floating dtype. Products are in the dtype of the tensors; gated unit and sum over a token's
experts in float32 for half precision. The loop over experts asks the device for their numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._library import compute_dtype
from ..glu import reference as glu

CLAMPED = "clamped"
ACTIVATIONS = (*glu.ACTIVATIONS, CLAMPED)
LIMIT, RATE = 7.0, 1.702  # of the clamped unit


def sort_rows(index: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return `order` [N], `inverse` [N] and `offsets` [E + 1], all int32; a stable sort by expert."""
    flat = index.reshape(-1)
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    ordered, order = flat.sort(stable=True)
    bounds = torch.arange(experts + 1, dtype=flat.dtype, device=flat.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    numbers = torch.arange(flat.shape[0], dtype=torch.int32, device=flat.device)
    return order.int(), torch.empty_like(numbers).index_copy(0, order, numbers), offsets


def unit(pre: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Return the gated unit of [N, 2F]: [N, F], in the dtype of `pre`. See `moe_experts` for the formulas."""
    gate, value = _halves(pre, interleaved)
    if activation == CLAMPED:
        gate, value = gate.clamp(max=LIMIT), value.clamp(-LIMIT, LIMIT)
        return (value + 1) * gate * torch.sigmoid(RATE * gate)
    return glu.activated(gate, activation) * value


def unit_backward(dactive: Tensor, pre: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Return the gradient of `pre` [N, 2F] from the gradient of the gated unit [N, F]."""
    gate, value = _halves(pre, interleaved)
    if activation == CLAMPED:
        low, bounded = gate.clamp(max=LIMIT), value.clamp(-LIMIT, LIMIT)
        s = torch.sigmoid(RATE * low)
        dgate = dactive * (bounded + 1) * (s + RATE * low * s * (1 - s)) * (gate <= LIMIT)
        dvalue = dactive * low * s * (value.abs() <= LIMIT)
    else:
        dvalue = dactive * glu.activated(gate, activation)
        dactivated = dactive * value
        if activation == "silu":
            dgate = torch.ops.aten.silu_backward(dactivated, gate)
        elif activation == "relu":
            dgate = torch.ops.aten.threshold_backward(dactivated, gate, 0)
        else:
            form = "tanh" if activation == "gelu_tanh" else "none"
            dgate = torch.ops.aten.gelu_backward(dactivated, gate, approximate=form)
    return torch.stack((dgate, dvalue), -1).flatten(-2) if interleaved else torch.cat((dgate, dvalue), -1)


def _halves(pre: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return pre[..., ::2], pre[..., 1::2]
    gate, value = pre.chunk(2, -1)
    return gate, value


def _bounds(offsets: Tensor, rows: int) -> list[int]:
    """Return the bounds of each expert's rows; for meta tensors, which have no values, the first has all rows."""
    return [0, *[rows] * (offsets.numel() - 1)] if offsets.is_meta else offsets.tolist()


def forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    interleaved: bool,
    transposed: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the output [T, H], the values before the gated unit [N, 2F] and the three results of `sort_rows`."""
    (tokens, chosen), wide = index.shape, compute_dtype(x)
    width = gate_up.shape[2 if transposed else 1] // 2
    order, inverse, offsets = sort_rows(index, gate_up.shape[0])
    bounds = _bounds(offsets, tokens * chosen)
    rows = x[order.long() // max(1, chosen)]

    def product(values: Tensor, weights: Tensor, biases: Tensor | None, columns: int) -> Tensor:
        """Multiply each expert's rows by its matrix; rows without an expert are zeros."""
        matrices = weights.unbind() if transposed else weights.transpose(1, 2).unbind()
        vectors = None if biases is None else biases.unbind()
        parts = []
        for expert, matrix in enumerate(matrices):
            if bounds[expert] < bounds[expert + 1]:
                part = values[bounds[expert] : bounds[expert + 1]] @ matrix
                parts.append(part if vectors is None else part + vectors[expert].to(part.dtype))
        parts.append(values.new_zeros(values.shape[0] - bounds[-1], columns))
        return torch.cat(parts)

    pre = product(rows, gate_up, gate_up_bias, 2 * width)
    active = unit(pre.to(wide), activation, interleaved).to(x.dtype)
    results = product(active, down, down_bias, x.shape[1])[inverse.long()].view(tokens, chosen, x.shape[1])
    output = (results.to(wide) * weight.to(wide)[:, :, None]).sum(1).to(x.dtype)
    return output, pre, order, inverse, offsets


def backward(
    dy: Tensor,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    index: Tensor,
    weight: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    pre: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    activation: str,
    interleaved: bool,
    transposed: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, gate_up, down, weight and both biases; None for gradients that are not `wanted`.

    With a the gated unit, p the weight of a row and dy its token's gradient: da = W2^T dy, dp = <a, da> + <b2, dy>,
    dW2 = sum of p dy a^T, dz the gradient of the unit for p da, dW1 = sum of dz x^T, dx = sum of W1^T dz.
    """
    (tokens, chosen), wide = index.shape, compute_dtype(x)
    bounds, token = _bounds(offsets, tokens * chosen), order.long() // max(1, chosen)
    want_x, want_gate_up, want_down, want_weight, want_bias, want_down_bias = wanted

    def by_expert(function: Callable[[int, slice], None]) -> None:
        for expert in range(gate_up.shape[0]):
            if bounds[expert] < bounds[expert + 1]:
                function(expert, slice(bounds[expert], bounds[expert + 1]))

    dy_rows, p = dy[token], weight.reshape(-1)[order.long()].to(wide)[:, None]
    active = unit(pre.to(wide), activation, interleaved)
    dactive, dx_rows = pre.new_zeros(active.shape, dtype=wide), torch.zeros_like(dy_rows)
    dp = p.new_zeros(p.shape[0])
    dgate_up = torch.zeros_like(gate_up) if want_gate_up else None
    ddown = torch.zeros_like(down) if want_down else None
    dbias = torch.zeros_like(gate_up_bias) if want_bias and gate_up_bias is not None else None
    ddown_bias = torch.zeros_like(down_bias) if want_down_bias and down_bias is not None else None

    def before_unit(expert: int, rows: slice) -> None:
        dactive[rows] = (dy_rows[rows] @ (down[expert].t() if transposed else down[expert])).to(wide)
        dp[rows] = (active[rows] * dactive[rows]).sum(1)
        if down_bias is not None:
            dp[rows] += dy_rows[rows].to(wide) @ down_bias[expert].to(wide)
        if ddown is not None:
            product = dy_rows[rows].t() @ (p[rows] * active[rows]).to(x.dtype)
            ddown[expert] = product.t() if transposed else product
        if ddown_bias is not None:
            ddown_bias[expert] = (p[rows] * dy_rows[rows].to(wide)).sum(0)

    by_expert(before_unit)
    dpre = unit_backward(p * dactive, pre.to(wide), activation, interleaved)

    def after_unit(expert: int, rows: slice) -> None:
        dz = dpre[rows].to(x.dtype)
        if want_x:
            dx_rows[rows] = dz @ (gate_up[expert].t() if transposed else gate_up[expert])
        if dgate_up is not None:
            product = dz.t() @ x[token[rows]]
            dgate_up[expert] = product.t() if transposed else product
        if dbias is not None:
            dbias[expert] = dpre[rows].sum(0)

    by_expert(after_unit)
    at = inverse.long()
    return (
        dx_rows[at].view(tokens, chosen, x.shape[1]).sum(1, dtype=wide).to(x.dtype) if want_x else None,
        dgate_up,
        ddown,
        dp[at].view(tokens, chosen).to(weight.dtype) if want_weight else None,
        dbias,
        ddown_bias,
    )
