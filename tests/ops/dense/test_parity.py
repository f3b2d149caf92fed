"""The dense layers against the float64 reference, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library, dense
from apex.ops._tolerance import excess, tensor_core_error
from apex.ops.dense import config, parts, reference
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("relu", "sigmoid", "gelu")


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(device=device, dtype=dtype)


def weights_of(sizes: list[int], dtype: torch.dtype, device: str) -> tuple[list[Tensor], list[Tensor]]:
    weights = [random(o, i, dtype=dtype, device=device, scale=max(1, i) ** -0.5) for i, o in itertools.pairwise(sizes)]
    return weights, [random(o, dtype=dtype, device=device) for o in sizes[1:]]


def leaves(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().clone().requires_grad_() for t in tensors]


def wide(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.detach().double() for t in tensors]


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "gelu"])
def test_reference_is_what_autograd_computes(activation: str) -> None:
    z = (4 * torch.randn(50, 7, dtype=torch.float64)).requires_grad_()
    dy = torch.randn(50, 7, dtype=torch.float64)
    formulas = {
        "none": lambda x: x,
        "relu": functional.relu,
        "sigmoid": torch.sigmoid,
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    }
    expected = formulas[activation](z)
    output = reference.activate(z, activation)
    assert_close(output, expected)
    (expected_dz,) = torch.autograd.grad(expected, z, dy)
    assert_close(reference.activation_backward(dy, z if activation == "gelu" else output, activation), expected_dz)


# How programs share rows and columns does not depend on what they compute of an element.
GRADIENTS = [
    *itertools.product([(1, 1), (64, 256), (70, 37)], DTYPES, ACTIVATIONS),
    *((shape, *pair) for shape in ((3, 300), (2100, 9)) for pair in zip(DTYPES, ACTIVATIONS, strict=True)),
]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    ("shape", "dtype", "activation"), GRADIENTS, ids=lambda value: name(value) if value in DTYPES else str(value)
)
def test_gradients_of_activation_and_bias(
    shape: tuple[int, int], dtype: torch.dtype, activation: str, route: Route
) -> None:
    dy, saved = random(*shape, dtype=dtype, device=route.device), random(*shape, dtype=dtype, device=route.device)
    before = dy.clone(), saved.clone()
    with _library.implementation(route.implementation):
        dz, dbias = parts.activation_backward(dy, saved, activation, True)
        alone, nothing = parts.activation_backward(dy, saved, activation, False)
        again = parts.activation_backward(dy.clone(), saved, activation, True, in_place=True)
        if activation == "gelu":
            *again, active = parts.gelu_backward(dy.clone(), saved, True)
            assert_close(active, reference.activate(saved.double(), "gelu"))
    assert_equal_bits((dy, saved), before)
    assert nothing is None
    assert_equal_bits((dz, dz, dbias), (alone, *again))
    assert dz.dtype == dbias.dtype == dtype
    exact = reference.activation_backward(*wide(dy, saved), activation)
    assert_close(dz, exact)
    # PyTorch's operators round before anything is added; its sigmoid does it in every step, so ours widens first.
    summed = dz.double() if str(route) == "cuda-torch" and activation != "sigmoid" else exact
    assert_close(dbias, summed.sum(0), reduction=shape[0])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("tickets", [parts.TICKETS, 0], ids=["one launch", "two launches"])
def test_bias_gradients_of_several_programs(tickets: int, route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, constant, value in (
        *((config, name, 0) for name in ("FEW_ROWS", "SMALL_MATRIX")),
        *((parts, "UNION", 2), (parts, "TICKETS", tickets)),
    ):
        monkeypatch.setattr(module, constant, value)
    dy, saved = random(100, 150, device=route.device), random(100, 150, device=route.device)
    with _library.implementation(route.implementation):
        found, again = (parts.activation_backward(dy, saved, "relu", True) for _ in range(2))
    assert_equal_bits(found, again)
    exact = reference.activation_backward(*wide(dy, saved), "relu")
    assert_close(found[0], exact)
    assert_close(found[1], exact.sum(0), reduction=100)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("shape", [(1, 1), (16, 256), (70, 37)], ids=str)
def test_gelu(shape: tuple[int, int], dtype: torch.dtype, route: Route) -> None:
    values = random(*shape, dtype=dtype, device=route.device, scale=2)
    with _library.implementation(route.implementation):
        for x in (values, values.t()):
            for output in (parts.gelu(x), reference.gelu_by_sigmoid(x)):
                assert output.dtype == dtype
                assert_close(output, reference.activate(x.double(), "gelu"))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("activation", reference.ACTIVATIONS[4:])
def test_activations_like_gelu(activation: str, dtype: torch.dtype, route: Route) -> None:
    """Their input is saved, and the backward pass gives their output again."""
    dy, x = (random(70, 36, dtype=dtype, device=route.device, scale=2) for _ in range(2))
    leaf = x.double().requires_grad_()
    expected = reference.activate(leaf, activation)
    (gradient,) = torch.autograd.grad(expected, leaf, dy.double())
    with _library.implementation(route.implementation):
        assert_close(parts.gelu(x, activation), expected.detach())
        dz, dbias, active = parts.gelu_backward(dy.clone(), x, True, activation)
        alone, _ = parts.activation_backward(dy, x, activation, False)
    assert_close(active, expected.detach())
    assert_close(dz, gradient)
    assert_equal_bits(dz, alone)
    # PyTorch has an operator for the first alone, which rounds before anything is added.
    is_rounded = str(route) == "cuda-torch" and activation == "gelu_erf"
    assert_close(dbias, (dz.double() if is_rounded else gradient).sum(0), reduction=70)
    assert_close(reference.activation_backward(dy.double(), x.double(), activation), gradient)


@pytest.mark.parametrize("route", routes())
def test_gelu_far_out(route: Route) -> None:
    """Where the terms of its derivative overflow, it is 0 or 1; what is not a number stays none. So for its output."""
    saved = torch.tensor([[-1e30, -300.0, -20.0, 0.0, 20.0, 300.0, 1e30, math.nan]], device=route.device)
    if route.implementation == "torch":
        saved = saved[:, 1:6]  # beyond, PyTorch's operator gives NaN
    with _library.implementation(route.implementation):
        dz, _ = parts.activation_backward(torch.ones_like(saved), saved, "gelu", False)
        *_, output = parts.gelu_backward(torch.ones_like(saved), saved, False)
    expected = [0, 0, 0.5, 1, 1] if route.implementation == "torch" else [0, 0, 0, 0.5, 1, 1, 1, math.nan]
    torch.testing.assert_close(dz.cpu(), torch.tensor([expected]), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(output, saved.where(~(saved < 0), 0), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("route", routes())
def test_strided_and_unaligned(route: Route) -> None:
    dy = torch.randn(40, 9, device=route.device).t()
    saved = torch.randn(9, 41, device=route.device)[:, 1:]
    unaligned = torch.randn(1 + 9 * 40, device=route.device)[1:].view(9, 40)
    kept = dy.clone()
    with _library.implementation(route.implementation):
        for gradient, value in ((dy, saved), (unaligned, saved), (torch.ones(1, 1, device=route.device), saved)):
            expanded = gradient.expand(9, 40)
            for _ in range(2):  # the second call takes the launcher's cached path
                dz, dbias = parts.activation_backward(expanded, value, "gelu", True)
            exact = reference.activation_backward(*wide(expanded, value), "gelu")
            assert_close(dz, exact)
            assert_close(dbias, exact.sum(0), reduction=9)
    assert torch.equal(dy, kept)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("leading", [(3, 2, 2), ()], ids=str)
def test_more_and_fewer_dimensions(leading: tuple[int, ...], route: Route) -> None:
    x = torch.randn(*leading, 8, device=route.device, requires_grad=True)
    (w1, w2), (b1, b2) = weights_of([8, 16, 4], torch.float32, route.device)
    with _library.implementation(route.implementation):
        outputs = dense.dense_gelu_dense(x, w1, b1, w2, b2), dense.mlp(x, [w1, w2], [b1, b2], "sigmoid")
        gradients = [torch.autograd.grad(output.sum(), x)[0] for output in outputs]
    exact_x, w1, b1, w2, b2 = wide(x, w1, b1, w2, b2)
    exact_x.requires_grad_()
    exact = (
        reference.dense_gelu_dense(exact_x, w1, b1, w2, b2),
        reference.mlp(exact_x, (w1, w2), (b1, b2), "sigmoid"),
    )
    for output, gradient, expected in zip(outputs, gradients, exact, strict=True):
        assert_close(output, expected, reduction=16)
        assert_close(gradient, torch.autograd.grad(expected.sum(), exact_x)[0], reduction=16)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("total_dtype", [None, torch.float32], ids=["same", "float32"])
@pytest.mark.parametrize("shape", [(50, 20, 30), (1, 1, 1), (40, 70, 33)], ids=str)
def test_weight_gradient_is_added(
    shape: tuple[int, int, int], total_dtype: torch.dtype | None, dtype: torch.dtype, route: Route
) -> None:
    rows, ins, outs = shape
    x, dy = random(rows, ins, dtype=dtype, device=route.device), random(rows, outs, dtype=dtype, device=route.device)
    start = random(outs, ins, dtype=total_dtype or dtype, device=route.device)
    exact = start.double() + dy.double().t() @ x.double()
    with _library.implementation(route.implementation):
        for total in (start.clone(), torch.zeros(ins, outs, dtype=start.dtype, device=route.device).t() + start):
            given = total.clone() if total.is_contiguous() else total
            assert dense.wgrad_gemm_accum(x, dy, given) is None
            assert_close(given, exact, reduction=rows)
        several = start.clone()
        dense.wgrad_gemm_accum(x.expand(2, rows, ins), dy.expand(2, rows, outs), several)
    assert_close(several, exact + exact - start.double(), reduction=2 * rows)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("rows", "ins", "outs"), [(0, 3, 4), (5, 0, 4), (5, 3, 0)])
def test_empty(rows: int, ins: int, outs: int, route: Route) -> None:
    x = torch.randn(rows, ins, device=route.device, requires_grad=True)
    (w1, w2), (b1, b2) = weights_of([ins, 6, outs], torch.float32, route.device)
    w1.requires_grad_()
    with _library.implementation(route.implementation):
        for output in (dense.dense_gelu_dense(x, w1, b1, w2, b2), dense.mlp(x, [w1, w2], [b1, b2])):
            assert output.shape == (rows, outs)
            gradients = torch.autograd.grad(output.sum(), (x, w1))
            assert [g.shape for g in gradients] == [x.shape, w1.shape]
            assert all(g.isfinite().all() for g in gradients)
        total = torch.ones(outs, ins, device=route.device)
        dense.wgrad_gemm_accum(x.half(), torch.ones(rows, outs, device=route.device).half(), total)
    assert_close(total, 1 + x.half().double().sum(0).expand(outs, ins), reduction=5)


def test_bad_arguments_are_named() -> None:
    x, (w1, w2), (b1, b2) = torch.randn(5, 3), *weights_of([3, 6, 4], torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"weight1 has shape \[4, 6\], expected \[out, 3\]"):
        dense.dense_gelu_dense(x, w2, b1, w2, b2)
    with pytest.raises(ValueError, match=r"bias2 has shape \[6\], expected \[4\] beside weight2"):
        dense.dense_gelu_dense(x, w1, b1, w2, b1)
    with pytest.raises(TypeError, match=r"weight2 is torch.float16, bias2 torch.float32 and the input torch.float32"):
        dense.dense_gelu_dense(x, w1, b1, w2.half(), b2)
    with pytest.raises(ValueError, match="activation 'tanh' is not known; use one of gelu, "):
        dense.dense_gelu_dense(x, w1, b1, w2, b2, "tanh")
    with pytest.raises(ValueError, match="activation 'tanh' is not known; use none, relu or sigmoid"):
        dense.mlp(x, [w1, w2], [b1, b2], "tanh")
    with pytest.raises(ValueError, match="got 2 weights and 1 biases"):
        dense.mlp(x, [w1, w2], [b1])
    with pytest.raises(ValueError, match=r"weight 1 has shape \[6, 3\], expected \[out, 6\]"):
        dense.mlp(x, [w1, w1], [b1, b1])
    with pytest.raises(ValueError, match="floating dtype"):
        dense.dense(x.long(), w1, b1)
    with pytest.raises(TypeError, match="outside of autocast"):
        dense.dense(x.half(), w1, b1)
    total = torch.zeros(6, 3)
    with pytest.raises(ValueError, match=r"d_weight has shape \[6, 3\]"):
        dense.wgrad_gemm_accum(x, torch.randn(5, 4), total)
    with pytest.raises(TypeError, match="float32 beside half precision"):
        dense.wgrad_gemm_accum(x, torch.randn(5, 6), total.half())
    assert not total.any()


@pytest.mark.gpu
def test_accumulation_by_pytorch_and_by_the_kernel_agree() -> None:
    x, dy = (torch.randn(3000, 520, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    totals = []
    for implementation in ("auto", "triton"):
        total = torch.ones(520, 520, device="cuda")
        with _library.implementation(implementation):
            dense.wgrad_gemm_accum(x, dy, total)
        # Tensor cores add in a little less than float32.
        expected = 1 + dy.double().t() @ x.double()
        assert (total.double() - expected).norm() <= 1e-5 * expected.norm()
        totals.append(total)
    assert (totals[0].double() - totals[1].double()).norm() <= 1e-5 * totals[1].double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["auto", "triton"])
def test_accumulation_is_as_exact_as_tensor_cores_are(implementation: str) -> None:
    """Element by element in float32: a product that was rounded to bfloat16 would be off by 0.1."""
    x, dy = (torch.randn(8192, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    total = torch.ones(512, 512, device="cuda")
    with _library.implementation(implementation):
        dense.wgrad_gemm_accum(x, dy, total)
    expected = 1 + dy.double().t() @ x.double()
    assert excess(total, expected, reduction=8192, slack=tensor_core_error(8192)) <= 1


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = (1 << 31) // 4096 + 3, 4096
    dy = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    saved = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    last = slice(rows - 2, rows)
    expected = reference.activation_backward(dy[last].double(), saved[last].double(), "relu")
    sums = sum(
        reference.activation_backward(a.double(), b.double(), "relu").sum(0)
        for a, b in zip(dy.split(1 << 16), saved.split(1 << 16), strict=True)
    )
    with _library.implementation("triton"):
        dz, dbias = parts.activation_backward(dy, saved, "relu", True, in_place=True)
    assert_close(dz[last], expected)
    assert_close(dbias, sums, reduction=rows)
