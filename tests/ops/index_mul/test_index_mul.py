"""Products with indexed rows against the float64 reference, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex.ops import _library, index_mul
from apex.ops.index_mul import INDEX_MUL, reference
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

_HALF, _BF16, _F32 = torch.float16, torch.bfloat16, torch.float32

# rows of in1, rows of in2, columns, dtype, index: rows without an index, in one chunk, in two and in many; columns in
# one block and in two
CASES = [
    (1, 1, 1, _F32, "random"),
    (5, 3, 7, _F32, "random"),
    (7, 100, 40, _F32, "random"),
    (40, 33, 64, _F32, "random"),
    (3, 200, 16, _F32, "skewed"),
    (1, 700, 5, _F32, "random"),
    (64, 64, 32, _F32, "once"),
    (4, 90, 20, _HALF, "random"),
    (4, 90, 20, _BF16, "skewed"),
    (3, 40, 1100, _F32, "random"),
]


def make_index(kind: str, in1_rows: int, count: int) -> Tensor:
    if kind == "once":
        return torch.randperm(in1_rows)[:count]
    index = torch.randint(in1_rows, (count,))
    if kind == "skewed":
        index[torch.rand(count) < 0.8] = in1_rows // 2
    return index


def tensors(case, device: str) -> list[Tensor]:
    """Gradients of the gradients of in1 and in2, gradient of the output, in1, in2 and the index."""
    in1_rows, count, columns, dtype, kind = case
    sizes = (in1_rows, count, count, in1_rows, count)
    floats = [torch.randn(rows, columns).to(device, dtype) for rows in sizes]
    return [*floats, make_index(kind, in1_rows, count).to(device)]


def exact(given: list[Tensor]) -> list[Tensor]:
    """Output, first and second derivatives by the reference in float64."""
    wide = [t.detach().double().cpu() for t in given[:5]]
    index = given[5].cpu()
    grad_out, in1, in2 = wide[2], *(t.requires_grad_() for t in wide[3:])
    output = reference.forward(in1, in2, index)
    gradients = torch.autograd.grad(output, (in1, in2), grad_out)
    with torch.no_grad():
        return [output.detach(), *gradients, *reference.backward_backward(*wide, index)]


def forward(in1: Tensor, in2: Tensor, index: Tensor) -> Tensor:
    return INDEX_MUL.run(in1, in2, index)[0]


def backward(grad_out: Tensor, in1: Tensor, in2: Tensor, index: Tensor, wanted=(True, True)) -> tuple:
    return INDEX_MUL.run_backward((grad_out,), (in1, in2, index), (), wanted)


def run(given: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        second = index_mul.index_mul_backward_backward(*given)
    return [forward(*given[3:]), *backward(*given[2:]), *second]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_reference_is_the_definition(device: str) -> None:
    given = tensors((5, 30, 6, torch.float64, "random"), device)
    *floats, index = (t.requires_grad_() if t.is_floating_point() else t for t in given)
    grad_grad1, grad_grad2, grad_out, in1, in2 = floats
    output = in1[index] * in2
    defined = reference.forward(in1, in2, index)
    torch.testing.assert_close(defined, output)
    gradients = torch.autograd.grad(output, (in1, in2), grad_out, create_graph=True)
    for actual, wanted in zip(torch.autograd.grad(defined, (in1, in2), grad_out), gradients, strict=True):
        torch.testing.assert_close(actual, wanted)
    wanted = torch.autograd.grad(gradients, (grad_out, in1, in2), (grad_grad1, grad_grad2))
    for actual, second in zip(reference.backward_backward(*given), wanted, strict=True):
        torch.testing.assert_close(actual, second)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, route: Route) -> None:
    given = tensors(case, route.device)
    before = [t.clone() for t in given]
    with _library.implementation(route.implementation):
        found, again = run(given), run(given)
    names = ("out", "grad_in1", "grad_in2", "grad_grad_out", "second grad_in1", "second grad_in2")
    for name, actual, wanted in zip(names, found, exact(given), strict=True):
        assert actual.dtype == case[3]
        assert_close(actual, wanted, reduction=case[1] if name.endswith("in1") else 2, what=name)
    assert_equal_bits(found, again)
    assert_equal_bits(given, before)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    count, columns = (1 << 31) // 512 + 5, 512
    in2 = torch.randn(count, columns, device="cuda", dtype=_BF16)
    in1 = torch.randn(count, columns, device="cuda", dtype=_BF16)
    index = torch.arange(count - 1, -1, -1, device="cuda")  # the last row first
    out = forward(in1, in2, index)
    grad1, grad2 = backward(out, in1, in2, index)
    for rows in ([0, 1], [count - 2, count - 1]):
        other = in1[index[rows]].double()
        assert_close(out[rows], other * in2[rows].double())
        assert_close(grad2[rows], out[rows].double() * other)
        assert_close(grad1[index[rows]], out[rows].double() * in2[rows].double())


@pytest.mark.parametrize("route", routes())
def test_strided_and_unaligned(route: Route) -> None:
    given = tensors((6, 50, 24, _F32, "random"), route.device)
    strided = [t.repeat_interleave(2, 1)[:, ::2] for t in given[:5]] + [given[5].repeat_interleave(3)[::3].int()]
    flat = torch.randn(1 + 50 * 24, device=route.device)[1:].view(50, 24)
    with _library.implementation(route.implementation):
        found = run(strided)
        unaligned = [forward(given[3], flat, given[5]) for _ in range(2)]
    for actual, wanted in zip(found, exact(given), strict=True):
        assert_close(actual, wanted, reduction=50)
    for actual in unaligned:
        assert_close(actual, reference.forward(given[3].double(), flat.double(), given[5]))


@pytest.mark.parametrize("route", routes())
def test_absent_gradients_stand_for_zero(route: Route) -> None:
    grad_grad1, grad_grad2, *given = tensors((6, 50, 24, _F32, "random"), route.device)
    grad_out, in1, in2, index = given
    none1, none2 = torch.zeros_like(grad_grad1), torch.zeros_like(grad_grad2)
    with _library.implementation(route.implementation):
        for arguments, zeros in (((grad_grad1, None), (grad_grad1, none2)), ((None, grad_grad2), (none1, grad_grad2))):
            with torch.no_grad():
                found = index_mul.index_mul_backward_backward(*arguments, *given)
            for actual, wanted in zip(found, exact([*zeros, *given])[3:], strict=True):
                assert (actual is None and not wanted.any()) or actual is not None
                if actual is not None:
                    assert_close(actual, wanted, reduction=50)
        assert index_mul.index_mul_backward_backward(None, None, *given) == (None, None, None)
        for need1, need2 in ((True, False), (False, True)):
            found = backward(grad_out, in1, in2, index, (need1, need2))
            for needed, actual, wanted in zip((need1, need2), found, exact([none1, none2, *given])[1:3], strict=True):
                assert_close(actual, wanted if needed else None, reduction=50)


@pytest.mark.parametrize("route", [route for route in routes() if route.values[0].implementation == "triton"])
def test_an_index_out_of_range_does_no_harm(route: Route) -> None:
    in1, in2, grad_out = (torch.randn(rows, 8, device=route.device) for rows in (3, 5, 5))
    index = torch.tensor([2, -1, 0, 3, 2], device=route.device)
    with _library.implementation(route.implementation):
        out = forward(in1, in2, index)
        grad1, grad2 = backward(grad_out, in1, in2, index)
    inside = torch.tensor([0, 2, 4], device=route.device)
    for result in (out, grad2):
        assert result[[1, 3]].isnan().all()
    assert_close(out[inside], reference.forward(in1.double(), in2[inside].double(), index[inside]))
    wanted = backward(grad_out[inside].double(), in1.double(), in2[inside].double(), index[inside])
    assert_close(grad1, wanted[0], reduction=2)
    assert_close(grad2[inside], wanted[1])


def test_small_inputs_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "runs_triton", lambda family, tensor: tensor.dtype != torch.float64)
    small, large = (torch.empty(rows, 1024, device="meta") for rows in (8, 8192))
    assert index_mul.prefers_operators(small)
    assert not index_mul.prefers_operators(large)
    assert index_mul.prefers_operators(large.double())
    assert not index_mul.prefers_operators(small.half())  # it would round before it adds
    with _library.implementation("triton"):
        assert not index_mul.prefers_operators(small)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_by_operators(device: str) -> None:
    given = tensors((6, 50, 24, _F32, "random"), device)
    in1, in2 = (t.requires_grad_() for t in given[3:5])
    output = index_mul.by_operators(in1, in2, given[5])
    found = [output, *torch.autograd.grad(output, (in1, in2), given[2])]
    for actual, wanted in zip(found, exact(given)[:3], strict=True):
        assert_close(actual, wanted, reduction=50)


def test_the_operator_refuses_a_second_derivative() -> None:
    in1, in2 = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    output = torch.ops.apex.index_mul(in1, in2, torch.arange(4))
    (first,) = torch.autograd.grad(output.square().sum(), in1, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(first.square().sum(), in1)


def test_bad_arguments_are_named() -> None:
    in1, in2, index = torch.randn(4, 8), torch.randn(6, 8), torch.zeros(6, dtype=torch.int64)
    for first, second in ((in1[0], in2), (in1, in2[None]), (in1, in2[:, :5])):
        with pytest.raises(ValueError, match="must be matrices with rows of the same length"):
            index_mul.check(first, second, index)
    with pytest.raises(ValueError, match=r"one index per row of in2, \[6\], got \[5\]"):
        index_mul.check(in1, in2, index[:5])
    with pytest.raises(TypeError, match="idx1 must be int64 or int32"):
        index_mul.check(in1, in2, index.float())
    with pytest.raises(TypeError, match="same floating-point dtype"):
        index_mul.check(in1, in2.half(), index)
    with pytest.raises(ValueError, match="idx1 on meta"):
        index_mul.check(in1, in2, index.to("meta"))
    with pytest.raises(ValueError, match="at most"):
        index_mul.check(torch.empty(2**31, 1, device="meta"), in2[:, :1].to("meta"), index.to("meta"))
