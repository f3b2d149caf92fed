"""`apex.fuse` of nn.MultiheadAttention: the same numbers where it takes a call, PyTorch's own forward elsewhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex._fuse import attention

S, T, B, E, H = 5, 7, 2, 8, 2
PADDING = torch.arange(T) >= torch.tensor([[T], [4]])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(S)
CALLS: dict[str, tuple[bool, dict[str, Any]]] = {  # to itself or not, options
    "itself": (True, {}),
    "itself, causal": (True, {"attn_mask": CAUSAL, "is_causal": True}),
    "itself, causal and padding": (
        True,
        {"attn_mask": CAUSAL.bool(), "is_causal": True, "key_padding_mask": PADDING[:, :S]},
    ),
    "itself, a mask for each head": (True, {"attn_mask": torch.randn(B * H, S, S)}),
    "another": (False, {}),
    "another, padding": (False, {"key_padding_mask": PADDING}),
    "another, both": (False, {"key_padding_mask": torch.zeros(B, T), "attn_mask": torch.randn(S, T)}),
}


def pair(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(E, H, **options)
    if plain.in_proj_bias is not None:
        nn.init.normal_(plain.in_proj_bias)
    module = copy.deepcopy(plain)
    assert [row.reason for row in apex.fuse(module, verbose=False)] == [""]
    return module, plain


def results(module: nn.Module, itself: bool, **options: Any) -> list[Any]:
    torch.manual_seed(1)
    first = module.batch_first
    query, key = (torch.randn((B, n, E) if first else (n, B, E), requires_grad=True) for n in (S, T))
    inputs = (query, query, query) if itself else (query, key, key)
    output, weights = module(*inputs, need_weights=False, **options)
    assert weights is None
    leaves = [query, *([] if itself else [key]), *module.parameters()]
    return [output, *torch.autograd.grad(output, leaves, torch.randn(output.shape))]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_the_same_numbers(call: str, batch_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    itself, options = CALLS[call]
    module, plain = pair(batch_first=batch_first, bias=call != "another", dropout=0.5 * (call == "itself"))
    wanted = results(plain, itself, **options)
    monkeypatch.setattr(nn.MultiheadAttention, "forward", None)  # it is not PyTorch's
    torch.testing.assert_close(results(module, itself, **options), wanted, rtol=1e-4, atol=1e-5)


def test_other_calls_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    module, plain = pair(batch_first=True)
    monkeypatch.setattr(attention, "dot_product_attention", None)
    x, y = torch.randn(B, S, E), torch.randn(B, S, E)
    for inputs, options in (
        ((x, x, x), {}),  # with weights
        ((x, y, x), {"need_weights": False}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
    ):
        torch.testing.assert_close(module(*inputs, **options), plain(*inputs, **options))
    for wrong in ({"is_causal": True}, {"attn_mask": torch.zeros(S, S + 1)}, {"key_padding_mask": torch.zeros(1, S)}):
        with pytest.raises((RuntimeError, AssertionError)):
            module(x, x, x, need_weights=False, **wrong)
    with pytest.raises((RuntimeError, AssertionError)):
        module(x, y[:1], y[:1], need_weights=False)  # which would be broadcast
    with torch.no_grad():  # PyTorch's inference in one operator
        found, wanted = (each.eval()(x, x, x, need_weights=False) for each in (module, plain))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_layer_trains_checks_compiles_and_infers(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True).train(training)
    plain, x = copy.deepcopy(layer), torch.randn(B, S, E)
    report = apex.fuse(layer, check=(x, None, None), verbose=False)
    assert {row.rule: row.reason for row in report} == {"attention without weights": "", "layer norm": ""}
    for function in (layer, torch.compile(layer, backend="eager", fullgraph=True)):
        torch.testing.assert_close(function(x), plain(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64, 200])
def test_on_a_gpu(length: int, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    plain = nn.MultiheadAttention(128, 4, batch_first=True, **options)
    module, x = copy.deepcopy(plain), torch.randn(4, length, 128, requires_grad=True, **options)
    apex.fuse(module, verbose=False)
    hidden = torch.arange(length, device="cuda").repeat(4, 1) >= length - 5
    found = []
    for each in (module, plain):
        output = each(x, x, x, need_weights=False, key_padding_mask=hidden)[0]
        found.append([output, *torch.autograd.grad(output.float().square().sum(), [x, *each.parameters()])])
    close = {"rtol": 1e-3, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-1}
    torch.testing.assert_close(*found, **close)
