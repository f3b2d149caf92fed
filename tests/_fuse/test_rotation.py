"""Rotations of libraries: each spelling becomes the fused one, with the same outputs and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import apex
from apex._fuse import rotation


def swapped_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def swapped_neighbours(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    width = cos.shape[-1]
    rotated = (t[..., :width] * cos + swapped_halves(t[..., :width]) * sin for t in (q, k))
    return tuple(torch.cat((r, t[..., width:]), -1) for r, t in zip(rotated, (q, k), strict=True))


def of_half_tables(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    halves = (t.chunk(2, -1) for t in (q, k))
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves)


def of_neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(t * cos + swapped_neighbours(t) * sin for t in (q, k))


def of_neighbours_by_first_half(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    cos, sin = (table.chunk(2, -1)[0].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for table in (cos, sin))
    width = cos.shape[-1]
    rotated = (t[..., :width] * cos + swapped_neighbours(t[..., :width]) * sin for t in (q, k))
    return tuple(torch.cat((r, t[..., width:]), -1) for r, t in zip(rotated, (q, k), strict=True))


def of_neighbours_to_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    sorted_channels = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
    return of_halves(*sorted_channels, cos, sin, unsqueeze_dim)


def of_tokens_in_a_row(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return tuple(t * cos + swapped_halves(t) * sin for t in (q, k))


def of_one_tensor(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return x * cos.unsqueeze(unsqueeze_dim) + swapped_halves(x) * sin.unsqueeze(unsqueeze_dim)


def of_complex_numbers(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    numbers = (torch.view_as_complex(t.float().unflatten(-1, (-1, 2))) for t in (xq, xk))
    products = (torch.view_as_real(n * freqs_cis[:, None]).flatten(3) for n in numbers)
    return tuple(p.type_as(xq) for p in products)


def of_complex_numbers_tokens_first(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> Any:
    return tuple(t.transpose(1, 2) for t in of_complex_numbers(xq.transpose(1, 2), xk.transpose(1, 2), freqs_cis))


def of_something_else(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return of_halves(1.5 * q, k, cos, sin, unsqueeze_dim)


def attention_class(function: Callable[..., Any], name: str = "apply_rotary_pos_emb") -> type[nn.Module]:
    """Return a class whose forward calls `function` under the name that libraries give it."""
    known: dict[str, Any] = {name: function, "nn": nn}
    lines = ["class Attention(nn.Module):", "    def forward(self, *args, **kwargs):"]
    exec("\n".join([*lines, f"        return {name}(*args, **kwargs)"]), known)
    return known["Attention"]


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """Return a function with the same signature, and a list that grows with each call."""
    calls: list[int] = []

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return wrapped, calls


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


_PAIR = ((2, 4, 6, 8), (2, 2, 6, 8))
CASES: dict[str, tuple[Any, str, tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "halves": (of_halves, "apply_rotary_pos_emb", (*_PAIR, (1, 6, 8)), {}),
    "halves, part": (of_halves, "apply_rotary_pos_emb", (*_PAIR, (2, 6, 4)), {}),
    "halves, tokens first": (
        *(of_halves, "apply_rotary_pos_emb", ((2, 6, 4, 8), (2, 6, 2, 8), (1, 6, 8)), {"unsqueeze_dim": 2}),
    ),
    "tables of one half": (of_half_tables, "apply_rotary_pos_emb", (*_PAIR, (2, 6, 4)), {}),
    "neighbours": (of_neighbours, "apply_rotary_pos_emb", (*_PAIR, (2, 6, 8)), {}),
    "neighbours by the first half": (of_neighbours_by_first_half, "apply_rotary_pos_emb", (*_PAIR, (1, 6, 8)), {}),
    "neighbours, part": (of_neighbours_by_first_half, "apply_rotary_pos_emb", (*_PAIR, (2, 6, 4)), {}),
    "neighbours to halves": (*(of_neighbours_to_halves, "apply_rotary_pos_emb_interleave", (*_PAIR, (1, 6, 8)), {}),),
    "tokens in a row": (of_tokens_in_a_row, "apply_rotary_pos_emb_vision", ((6, 4, 8), (6, 4, 8), (6, 8)), {}),
    "one tensor": (of_one_tensor, "apply_rotary_pos_emb", ((2, 4, 6, 8), (1, 6, 8)), {}),
    "complex": (of_complex_numbers, "apply_rotary_emb", (*_PAIR, (1, 6, 4)), {"complex": True}),
    "complex, tokens first": (
        *(of_complex_numbers_tokens_first, "apply_rotary_emb", ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 4))),
        {"complex": True},
    ),
}


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_every_spelling_is_fused(case: str, compiles: bool) -> None:
    function, name, shapes, options = CASES[case]
    *given, cos = tensors(*shapes)
    tables = (cos, cos.roll(1, 0).sin())
    if options.get("complex"):
        tables, options = (torch.complex(*tables),), {}
    wrapped, calls = counted(function)
    module = attention_class(wrapped, name)()
    [row] = apex.fuse(module, verbose=False)
    assert (row.rule, row.reason) == ("rotary embedding", "")
    calls.clear()
    torch._dynamo.reset()
    call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiles else module
    results = []
    for each in (call, function):
        leaves = [t.clone().requires_grad_() for t in given]
        outputs = each(*leaves, *tables, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        gradients = torch.autograd.grad([t.square().sum() for t in outputs], leaves)
        results.append([*(t.detach() for t in outputs), *gradients])
    assert not calls
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_another_formula_and_other_arguments_are_refused() -> None:
    [row] = apex.fuse(attention_class(of_something_else)(), verbose=False)
    assert row.reason == "its apply_rotary_pos_emb computes something else"
    [row] = apex.fuse(attention_class(lambda query, angles: query)(), verbose=False)
    assert row.reason == "its apply_rotary_pos_emb takes other arguments"


def test_calls_that_are_not_understood_reach_the_function() -> None:
    """Tables of fewer tokens than the query has, of more channels, or a further argument."""

    def with_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None) -> Any:
        return of_halves(q, k, cos, sin) if position_ids is None else (q + position_ids, k)

    wrapped, calls = counted(with_positions)
    fused = rotation.fused_function(wrapped)
    assert fused is not None
    calls.clear()
    q, k, cos, one = tensors(*_PAIR, (1, 6, 8), (1, 1, 8))
    fused(q, k, cos, cos)
    assert not calls
    assert torch.equal(fused(q, k, cos, cos, position_ids=2)[0], q + 2)
    assert torch.equal(fused(q, k, one, one)[0], with_positions(q, k, one, one)[0])
    assert len(calls) == 2
    with pytest.raises(TypeError):
        fused(q, k, cos, cos, None, None)
