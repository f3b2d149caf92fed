"""Behaviour of gated linear units that `tests/ops/test_examples.py` does not test."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from apex.ops import _device, _library, glu
from apex.ops.glu import reference
from apex.ops.glu.op import launch_backward
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

_HALF, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# shape, dtype, bias dtype, activation: dtypes that differ, and other numbers of dimensions than two
CASES = [
    ((7, 2, 64), _F32, None, "silu"),
    ((9, 192), _HALF, _F32, "gelu"),
    ((6, 96), _F32, _BF16, "relu"),
    ((64,), _F32, _F32, "silu"),
]


def formula(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """The definition, written out."""
    x, value = (input if bias is None else input + bias).chunk(2, -1)
    cdf = {
        "silu": lambda: 1 / (1 + torch.exp(-x)),
        "gelu": lambda: (1 + torch.erf(x / math.sqrt(2))) / 2,
        "gelu_tanh": lambda: (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
        "relu": lambda: (x > 0).to(x.dtype),
    }[activation]()
    return x * cdf * value


def tensors(shape, dtype, bias_dtype, device) -> tuple[Tensor, Tensor | None, Tensor]:
    input = torch.randn(shape).to(device, dtype).requires_grad_()
    bias = None if bias_dtype is None else torch.randn(shape[-1]).to(device, bias_dtype).requires_grad_()
    return input, bias, torch.randn(*shape[:-1], shape[-1] // 2).to(device, dtype)


def run(input: Tensor, bias: Tensor | None, dy: Tensor, activation: str) -> list[Tensor]:
    output = glu.bias_glu(input, bias, activation)
    return [output.detach(), *torch.autograd.grad(output, [t for t in (input, bias) if t is not None], dy)]


def expected(input: Tensor, bias: Tensor | None, dy: Tensor, activation: str) -> list[Tensor]:
    wide = [None if t is None else t.detach().double().cpu().requires_grad_() for t in (input, bias)]
    output = reference.forward(*wide, activation)
    gradients = torch.autograd.grad(output, [t for t in wide if t is not None], dy.double().cpu())
    return [output.detach(), *gradients]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
def test_reference_is_the_definition(activation: str, bias: bool) -> None:
    input, offset, _ = tensors((5, 12), _F64, _F64 if bias else None, "cpu")
    torch.testing.assert_close(reference.forward(input, offset, activation), formula(input, offset, activation))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, route: Route) -> None:
    shape, dtype, bias_dtype, activation = case
    input, bias, dy = tensors(shape, dtype, bias_dtype, route.device)
    with _library.implementation(route.implementation):
        found = run(input, bias, dy, activation)
        again = run(input, bias, dy, activation)
    assert found[0].dtype == found[1].dtype == dtype
    assert bias is None or found[2].dtype == bias_dtype
    rows = math.prod(shape[:-1])
    for name, actual, wanted, terms in zip(
        ("output", "dinput", "dbias"), found, expected(input, bias, dy, activation), (1, 1, rows), strict=False
    ):
        assert_close(actual, wanted, reduction=terms, what=name)
    assert_equal_bits(found, again)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    rows, columns = (1 << 31) // 8192 + 3, 8192
    input = torch.randn(rows, columns, device="cuda", dtype=_BF16)
    bias = torch.randn(columns, device="cuda", dtype=_BF16)
    (output,) = glu.GLU.run(input, bias, "silu")
    dinput, dbias = glu.GLU.run_backward((output,), (input, bias), ("silu",), (True, True))
    last = slice(rows - 2, rows)
    wanted = expected(input[last], bias, output[last], "silu")
    assert_close(output[last], wanted[0])
    assert_close(dinput[last], wanted[1])
    whole = sum(torch.sum(part, 0, dtype=_F64) for part in dinput.split(16384))
    # The kernel sums what is not rounded to bfloat16 yet.
    assert float((dbias.double() - whole).norm() / whole.norm()) < 1e-2


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("activation", glu.ACTIVATIONS)
def test_special_values_are_those_of_pytorch(route: Route, activation: str) -> None:
    gate = torch.tensor([float("nan"), float("inf"), 0.0, -0.0, -200.0, 200.0, -3e38], device=route.device)
    input = torch.cat((gate, torch.ones_like(gate))).requires_grad_()
    # Of float32 PyTorch's gelu makes NaN of infinity on some CPUs; kernels do not.
    value = input.detach().to(_F32 if route.implementation == "torch" else _F64, copy=True).requires_grad_()
    with _library.implementation(route.implementation):
        output = glu.bias_glu(input, None, activation)
        (dinput,) = torch.autograd.grad(output.sum(), input)
    wanted = reference.activated(value[:7], activation) * value[7:]
    (wanted_dinput,) = torch.autograd.grad(wanted.sum(), value)
    torch.testing.assert_close(output, wanted.float(), equal_nan=True)
    # Beyond these PyTorch's own devices disagree about the slope.
    torch.testing.assert_close(dinput[2:6], wanted_dinput[2:6].float())


def test_a_frozen_bias_costs_no_launch() -> None:
    pytest.importorskip("triton")
    from apex.ops._launch import record_launches

    input, dy, bias = (torch.empty(shape, device="meta") for shape in ((4, 32), (4, 16), (32,)))
    for bias_grad, kernels in ((True, ["glu_backward", "sum_bias_partials"]), (False, ["glu_backward"])):
        with _device.pretend(_device.INTERPRETER), record_launches() as collected:
            launch_backward(dy, input, bias, "silu", (True, bias_grad))
        assert [launch.prepared.kernel.name for launch in collected] == kernels


@pytest.mark.parametrize("route", [route for route in routes() if route.values[0].implementation == "triton"])
def test_nothing_but_the_input_and_the_bias_is_kept(route: Route) -> None:
    input, bias, _ = tensors((4, 24), _F32, _F32, route.device)
    kept: list[int] = []
    with (
        _library.implementation(route.implementation),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t),
    ):
        glu.bias_glu(input, bias)
    assert kept == [input.data_ptr(), bias.data_ptr()]


@pytest.mark.parametrize("route", routes())
def test_autocast(route: Route) -> None:
    """A linear layer under autocast gives bfloat16, its bias stays float32: the output is bfloat16."""
    linear = torch.nn.Linear(16, 24, bias=False, device=route.device)
    bias = torch.randn(24, device=route.device, requires_grad=True)
    x = torch.randn(5, 16, device=route.device)
    with _library.implementation(route.implementation), torch.autocast(route.device, _BF16):
        projected = linear(x)
        output = glu.bias_glu(projected, bias)
        output.sum().backward()
    assert output.dtype == _BF16
    assert_close(output, reference.forward(projected.detach().double(), bias.detach().double(), "silu"))
    assert bias.grad.dtype == linear.weight.grad.dtype == _F32


def test_the_operator_refuses_a_second_derivative() -> None:
    input, _, _ = tensors((4, 24), _F32, None, "cpu")
    output = torch.ops.apex.glu(input, None, "silu")
    (first,) = torch.autograd.grad(output.square().sum(), input, create_graph=True)
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(first.square().sum(), input)


def test_bad_arguments_are_named() -> None:
    input = torch.randn(4, 24)
    with pytest.raises(ValueError, match="activation='swish' is not known; use one of silu"):
        glu.bias_glu(input, None, "swish")
    with pytest.raises(ValueError, match=r"must be even.*\[4, 7\]"):
        glu.bias_glu(torch.randn(4, 7))
    with pytest.raises(ValueError, match="must be even"):
        glu.bias_glu(torch.tensor(1.0))
    with pytest.raises(TypeError, match=r"floating-point input, got torch\.int64"):
        glu.bias_glu(torch.ones(4, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"bias has shape \[12\], expected \[24\]"):
        glu.bias_glu(input, torch.randn(12))
    with pytest.raises(ValueError, match="bias is on meta, the input on cpu"):
        glu.bias_glu(input, torch.randn(24, device="meta"))
    with pytest.raises(TypeError, match=r"bias must be floating-point, got torch\.int32"):
        glu.bias_glu(input, torch.ones(24, dtype=torch.int32))


def test_a_pair_that_is_not_alike_is_refused() -> None:
    with pytest.raises(ValueError, match="must be alike"):
        glu.glu_pair(torch.zeros(2, 4), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="activation='tanh'"):
        glu.glu_pair(torch.zeros(2), torch.zeros(2), "tanh")
