"""The dense layers under opcheck and torch.compile."""

from __future__ import annotations

import pytest
import torch

from apex.ops import _library
from tests.support.harness import Route, opcheck, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_erf"])
def test_opcheck_of_the_gradient(activation: str, route: Route) -> None:
    dy, saved = (torch.randn(6, 20, device=route.device) for _ in range(2))
    with _library.implementation(route.implementation):
        for bias_grad in (True, False):
            opcheck(route, torch.ops.apex.activation_backward.default, (dy, saved, activation, bias_grad))
            if activation != "relu":
                opcheck(route, torch.ops.apex.activation_backward.default, (dy, saved, activation, bias_grad, True))


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
