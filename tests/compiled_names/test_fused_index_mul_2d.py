"""The compiled module fused_index_mul_2d, called as upstream's Python code calls it."""

import pytest
import torch

import fused_index_mul_2d
from apex.ops import _library
from apex.ops.index_mul import INDEX_MUL, reference
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("kind", "dtype"), [("float", torch.float32), ("half", torch.float16)])
def test_results_go_to_the_callers_tensors(kind: str, dtype: torch.dtype, route: Route) -> None:
    def random(rows: int) -> torch.Tensor:
        return torch.randn(rows, 12, device=route.device, dtype=dtype)

    in1, in2, grad_out, grad_grad_in1, grad_grad_in2 = random(5), random(40), random(40), random(5), random(40)
    idx1 = torch.randint(5, (40,), device=route.device)
    wide = [t.double() for t in (grad_grad_in1, grad_grad_in2, grad_out, in1, in2)]
    of_in1, of_in2 = INDEX_MUL.run_backward((wide[2],), (*wide[3:], idx1), (), (True, True))
    out, grad_in2, grad_grad_out = (torch.full_like(in2, float("nan")) for _ in range(3))
    grad_in1 = torch.zeros_like(in1)
    with torch.no_grad(), _library.implementation(route.implementation):
        getattr(fused_index_mul_2d, f"{kind}_forward")(out, in1, in2, idx1)
        assert_close(out, reference.forward(*wide[3:], idx1))
        for _ in range(2):
            getattr(fused_index_mul_2d, f"{kind}_backward")(grad_in1, grad_in2, grad_out, in1, in2, idx1)
        assert_close(grad_in1, 2 * of_in1, reduction=40)
        assert_close(grad_in2, of_in2)
        grad_in1 = torch.zeros_like(in1)
        getattr(fused_index_mul_2d, f"{kind}_backward_backward")(
            grad_grad_out, grad_in1, grad_in2, grad_out, grad_grad_in1, grad_grad_in2, in1, in2, idx1
        )
    wanted = reference.backward_backward(*wide, idx1)
    for actual, gradient in zip((grad_grad_out, grad_in1, grad_in2), wanted, strict=True):
        assert_close(actual, gradient, reduction=40)


def test_results_of_another_shape_are_refused() -> None:
    in1, in2, idx1 = torch.randn(5, 12), torch.randn(40, 12), torch.zeros(40, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"out has shape \[5, 12\]"):
        fused_index_mul_2d.float_forward(in1, in1, in2, idx1)
    with pytest.raises(ValueError, match=r"grad_in1 has shape \[40, 12\]"):
        fused_index_mul_2d.float_backward(in2, in2, in2, in1, in2, idx1)
    with pytest.raises(ValueError, match=r"grad_in2 has shape \[5, 12\]"):
        fused_index_mul_2d.float_backward_backward(in2, in1, in1, in2, in1, in2, in1, in2, idx1)
