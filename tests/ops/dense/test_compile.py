"""The dense layers under opcheck and torch.compile."""

from __future__ import annotations

import pytest
import torch

from apex.fused_dense import FusedDenseGeluDense
from apex.mlp import MLP
from apex.ops import _library, dense
from tests.support.harness import Route, assert_close, opcheck, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_opcheck_of_the_gradient(activation: str, route: Route) -> None:
    dy, saved = (torch.randn(6, 20, device=route.device) for _ in range(2))
    with _library.implementation(route.implementation):
        for bias_grad in (True, False):
            opcheck(route, torch.ops.apex.activation_backward.default, (dy, saved, activation, bias_grad))
            if activation == "gelu":
                opcheck(route, torch.ops.apex.gelu_backward.default, (dy, saved, bias_grad))


@pytest.mark.parametrize("route", routes())
def test_opcheck_of_accumulation(route: Route) -> None:
    x, dy = (torch.randn(6, width, device=route.device, dtype=torch.float16) for width in (20, 30))
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.wgrad_gemm_accum.default, (x, dy, torch.ones(30, 20, device=route.device)))


def test_the_operator_refuses_a_derivative() -> None:
    dy = torch.randn(6, 20, requires_grad=True)
    dz, _ = torch.ops.apex.activation_backward(dy, dy.detach(), "gelu", True)
    with pytest.raises(RuntimeError, match="has no derivative"):
        dz.sum().backward()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("kind", ["gelu", "relu", "sigmoid"])
def test_compiled_without_graph_breaks(kind: str, route: Route) -> None:
    module = FusedDenseGeluDense(16, 40, 8) if kind == "gelu" else MLP([16, 40, 8], activation=kind)
    module.to(route.device)
    x = torch.randn(2, 6, 16, device=route.device, requires_grad=True)
    total = torch.zeros(8, 16, device=route.device)
    inputs = (x, *module.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        output = module(x)
        dense.wgrad_gemm_accum(x.detach(), output.detach(), total)
        return output

    # Generated C++ would need a compiler; on a GPU the generated code is Triton.
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected = step(x)
        expected_gradients = torch.autograd.grad(expected.sin().sum(), inputs)
        added = total.clone()
        compiled = torch.compile(step, fullgraph=True, backend=backend)(x)
        gradients = torch.autograd.grad(compiled.sin().sum(), inputs)
    assert_close(compiled, expected.double(), reduction=40)
    assert_close(total, 2 * added.double(), reduction=12)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        assert_close(actual, wanted.double(), reduction=40)
