"""apex.contrib.fmha as BERT's training scripts use it."""

from types import SimpleNamespace

import pytest
import torch

from apex.contrib.fmha import FMHA, FMHAFun
from apex.contrib.fmha.fmha import FMHAFun as SameFMHAFun
from apex.ops import _library
from tests.ops.attention.cases import assert_close
from tests.support.harness import Route, routes

HIDDEN, HEADS = 24, 3


def module(dropout: float = 0.0) -> FMHA:
    return FMHA(SimpleNamespace(attention_probs_dropout_prob=dropout, num_attention_heads=HEADS, hidden_size=HIDDEN))


def by_hand(qkv: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    """Compute attention sequence by sequence; each row holds queries, keys and values one after the other."""
    outputs = []
    for rows in qkv.split(lengths):
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(0, 1) for part in rows.chunk(3, -1))
        weights = (query @ key.transpose(1, 2) / (HIDDEN // HEADS) ** 0.5).softmax(-1)
        outputs.append((weights @ value).transpose(0, 1).flatten(1))
    return torch.cat(outputs)


@pytest.mark.parametrize("route", routes())
def test_module(route: Route) -> None:
    lengths = (5, 1, 9)
    qkv = torch.randn(15, 3 * HIDDEN, device=route.device, requires_grad=True)
    bounds = torch.tensor([0, 5, 6, 15], dtype=torch.int32, device=route.device)
    dout = torch.randn(15, HIDDEN, device=route.device)
    with _library.implementation(route.implementation):
        output = module()(qkv, bounds, 9)
        (gradient,) = torch.autograd.grad(output, qkv, dout)
    wide = qkv.detach().double().cpu().requires_grad_()
    expected = by_hand(wide, lengths)
    assert_close(output, expected)
    assert_close(gradient, torch.autograd.grad(expected, wide, dout.double().cpu())[0])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("is_training", [True, False])
def test_function(route: Route, is_training: bool) -> None:
    """The function equals the module, also with dropout, which applies in training only."""
    assert SameFMHAFun is FMHAFun
    qkv = torch.randn(8, 3, HEADS, HIDDEN // HEADS, device=route.device, requires_grad=True)
    bounds = torch.tensor([0, 6], dtype=torch.int32, device=route.device)
    dout = torch.randn(8, HEADS, HIDDEN // HEADS, device=route.device)
    with _library.implementation(route.implementation):
        torch.manual_seed(1)
        expected = module(0.4)(qkv.flatten(1), bounds, 6, is_training, True)
        (expected_gradient,) = torch.autograd.grad(expected, qkv, dout.flatten(1))
        torch.manual_seed(1)
        output = FMHAFun.apply(qkv, bounds, 0.4, 6, is_training, True)
        (gradient,) = torch.autograd.grad(output, qkv, dout)
        plain = FMHAFun.apply(qkv, bounds, 0.0, 6, True, True)
    assert_close(output.flatten(1), expected)
    assert_close(gradient, expected_gradient)
    assert torch.equal(output, plain) is not is_training
    assert not output[6:].any()
    assert not gradient[6:].any()


def test_heads_must_divide_the_hidden_size() -> None:
    config = SimpleNamespace(attention_probs_dropout_prob=0.0, num_attention_heads=5, hidden_size=24)
    with pytest.raises(ValueError, match="hidden_size=24"):
        FMHA(config)
    config.num_attention_heads = 0
    with pytest.raises(ValueError, match="num_attention_heads=0"):
        FMHA(config)


def test_rows_are_queries_keys_and_values() -> None:
    attention, rows = module(), torch.randn(9, 3 * HIDDEN)
    bounds = torch.tensor([0, 4, 9])
    expected = attention(rows, bounds, 5)
    assert torch.equal(attention(rows.view(9, 3, HIDDEN), bounds, 5), expected)
    assert torch.equal(attention(rows.view(3, 3, 3 * HIDDEN), bounds, 5), expected)
    with pytest.raises(ValueError, match=r"qkv has shape \[27, 24\], expected \[total, 3 \* hidden_size = 72\]"):
        attention(rows.view(27, HIDDEN), bounds, 5)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="max_s=2"):
        FMHAFun.apply(torch.zeros(4, 3, 2, 8), torch.tensor([0, 4]), 0.0, 2, True, False)
