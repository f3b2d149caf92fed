"""apex.contrib.index_mul_2d as clients use it: energies, forces as gradients, and losses of both."""

import pytest
import torch

import apex
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.index_mul_2d.index_mul_2d import IndexMul2d_, IndexMul2dBackward_, index_mul_2d_backward
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


def inputs(device: str, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    in1, in2 = (torch.randn(rows, 20, device=device, dtype=dtype, requires_grad=True) for rows in (7, 90))
    return in1, in2, torch.randint(7, (90,), device=device)


def energy_and_force(product, in1, in2, idx1):
    """Compute upstream's own test: the loss contains the gradient of an energy."""
    out = product(in1, in2, idx1)
    energy = (out.to(torch.promote_types(out.dtype, torch.float32)) ** 2).sum() / out.numel()
    (force,) = torch.autograd.grad(energy, in1, create_graph=True)
    loss = energy + (force.to(energy.dtype) ** 2).sum()
    return out, torch.autograd.grad(loss, (in1, in2))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_energy_and_force(dtype: torch.dtype, route: Route) -> None:
    if dtype == torch.float64 and route.implementation == "triton":
        pytest.skip("the kernels compute in float32")
    in1, in2, idx1 = inputs(route.device, dtype)
    with _library.implementation(route.implementation):
        out, gradients = energy_and_force(index_mul_2d, in1, in2, idx1)
    wide = [t.detach().double().requires_grad_() for t in (in1, in2)]
    wanted, wanted_gradients = energy_and_force(lambda a, b, i: a[i] * b, *wide, idx1)
    assert_close(out, wanted)
    for actual, gradient in zip(gradients, wanted_gradients, strict=True):
        # Half precision rounds the force before it is squared.
        error = (actual.double() - gradient).norm() / gradient.norm()
        assert float(error) < {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)


def test_gradcheck() -> None:
    in1, in2 = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for rows in (3, 5))
    idx1 = torch.tensor([0, 2, 2, 0, 2])
    assert torch.autograd.gradcheck(lambda a, b: index_mul_2d(a, b, idx1), (in1, in2))
    assert torch.autograd.gradgradcheck(lambda a, b: index_mul_2d(a, b, idx1), (in1, in2))


def test_third_derivative() -> None:
    in1, in2 = (torch.randn(rows, 3, dtype=torch.float64, requires_grad=True) for rows in (3, 5))
    idx1 = torch.tensor([0, 2, 2, 0, 2])

    def third(product):
        value = product(in1, in2, idx1).pow(3).sum()
        (first,) = torch.autograd.grad(value, in1, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), in2, create_graph=True)
        return torch.autograd.grad(second.pow(2).sum(), (in1, in2))

    for actual, wanted in zip(third(index_mul_2d), third(lambda a, b, i: a[i] * b), strict=True):
        torch.testing.assert_close(actual, wanted)


def test_functions_that_clients_apply() -> None:
    in1, in2, idx1 = inputs("cpu")
    grad_out = torch.randn(90, 20)
    output = IndexMul2d_.apply(in1, in2, idx1)
    assert torch.equal(output, in1[idx1] * in2)
    wanted = torch.autograd.grad(output, (in1, in2), grad_out)
    for found in (index_mul_2d_backward(in1, in2, idx1, grad_out), IndexMul2dBackward_.apply(in1, in2, idx1, grad_out)):
        for actual, gradient in zip(found, wanted, strict=True):
            assert torch.equal(actual, gradient)


@pytest.mark.parametrize("route", routes())
def test_compiled_without_graph_breaks(route: Route) -> None:
    in1, in2, idx1 = inputs(route.device)

    def function(in1, in2):
        return index_mul_2d(in1, in2, idx1).sin()

    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        wanted = torch.autograd.grad(function(in1, in2).sum(), (in1, in2))
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        found = torch.autograd.grad(compiled(in1, in2).sum(), (in1, in2))
    for actual, gradient in zip(found, wanted, strict=True):
        assert_close(actual, gradient.double(), reduction=90)


@pytest.mark.gpu
def test_deterministic_by_default() -> None:
    in1, in2 = (torch.randn(rows, 64, device="cuda", requires_grad=True) for rows in (50, 40000))
    idx1 = torch.randint(50, (40000,), device="cuda")
    grad_out = torch.randn_like(in2)
    first, *others = (torch.autograd.grad(index_mul_2d(in1, in2, idx1), in1, grad_out)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def test_bad_arguments_are_refused_and_the_package_is_reachable() -> None:
    in1, in2, idx1 = inputs("cpu")
    with pytest.raises(TypeError, match="same floating-point dtype"):
        apex.contrib.index_mul_2d.index_mul_2d(in1.half(), in2, idx1)
