"""The reference against PyTorch's own multihead attention, and against a sum written out."""

import math

import pytest
import torch
from torch import nn

from apex.ops.multihead import Mask, MaskKind, reference
from tests.ops.multihead import exact

LENGTH, KEYS, BATCH, HEADS, SIZE = 6, 4, 3, 2, 5
WIDTH = HEADS * SIZE


def wide(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def masks(kind: str) -> tuple[Mask | None, dict]:
    """Ours and what nn.MultiheadAttention calls the same."""
    if kind == "padding":
        hidden = torch.rand(BATCH, LENGTH) > 0.6
        hidden[:, 0] = False
        return Mask(MaskKind.PADDING, hidden.byte()), {"key_padding_mask": hidden}
    if kind == "additive":
        added = wide(BATCH, LENGTH)
        return Mask(MaskKind.ADDITIVE, added), {"key_padding_mask": added}
    if kind == "time":
        hidden = torch.rand(LENGTH, LENGTH) > 0.6
        hidden[:, 2] = False
        return Mask(MaskKind.TIME, hidden), {"attn_mask": hidden}
    if kind == "causal":
        return Mask(MaskKind.CAUSAL), {"attn_mask": torch.ones(LENGTH, LENGTH).triu(1).bool()}
    return None, {}


@pytest.mark.parametrize("kind", ["none", "padding", "additive", "time", "causal"])
@pytest.mark.parametrize("bias", [False, True])
def test_self_attention_is_torchs_but_for_the_order_of_rows(kind: str, bias: bool) -> None:
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=bias, dtype=torch.float64)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    x = wide(LENGTH, BATCH, WIDTH)
    # Theirs has all queries first; ours has, head after head, its queries, keys and values.
    order = torch.arange(3 * WIDTH).view(3, HEADS, SIZE).transpose(0, 1).flatten()
    mask, arguments = masks(kind)
    weights = theirs.in_proj_weight[order], theirs.out_proj.weight
    biases = (theirs.in_proj_bias[order], theirs.out_proj.bias) if bias else (None, None)
    actual = exact.attention([x], weights, biases, HEADS, mask)
    torch.testing.assert_close(actual, theirs(x, x, x, need_weights=False, **arguments)[0])


def test_encdec_attention_written_out() -> None:
    query, key = wide(LENGTH, BATCH, WIDTH), wide(KEYS, BATCH, WIDTH)
    wq, wkv, wo = wide(WIDTH, WIDTH), wide(2 * WIDTH, WIDTH), wide(WIDTH, WIDTH)
    hidden = torch.zeros(BATCH, KEYS, dtype=torch.uint8)
    hidden[1, 2] = 1
    expected = torch.zeros(LENGTH, BATCH, WIDTH, dtype=torch.float64)
    for b in range(BATCH):
        context = torch.zeros(LENGTH, WIDTH, dtype=torch.float64)
        for h in range(HEADS):
            rows = slice(h * SIZE, (h + 1) * SIZE)
            k_rows = slice(2 * h * SIZE, (2 * h + 1) * SIZE)
            v_rows = slice((2 * h + 1) * SIZE, (2 * h + 2) * SIZE)
            for i in range(LENGTH):
                q = wq[rows] @ query[i, b]
                seen = [t for t in range(KEYS) if not hidden[b, t]]
                weights = [math.exp(float(q @ (wkv[k_rows] @ key[t, b])) / math.sqrt(SIZE)) for t in seen]
                for t, weight in zip(seen, weights, strict=True):
                    context[i, rows] += weight / sum(weights) * (wkv[v_rows] @ key[t, b])
        expected[:, b] = context @ wo.T
    mask = Mask(MaskKind.PADDING, hidden)
    actual = exact.attention([query, key], [wq, wkv, wo], [None] * 3, HEADS, mask)
    torch.testing.assert_close(actual, expected)


def test_a_query_that_sees_nothing_gets_zeros_and_gives_no_gradient() -> None:
    parts = [wide(LENGTH, BATCH * HEADS, SIZE).requires_grad_() for _ in range(3)]
    hidden = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    hidden[1] = True
    output = reference.attend(*parts, HEADS, 1.0, Mask(MaskKind.TIME, hidden))
    gradients = torch.autograd.grad(output.sum(), parts)
    assert output[1].eq(0).all()
    assert output[0].ne(0).all()
    assert gradients[0][1].eq(0).all()
    assert all(gradient.isfinite().all() for gradient in gradients)
