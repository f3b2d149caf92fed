"""The four compiled softmax modules, called as upstream's Python code calls them."""

import pytest
import torch

import generic_scaled_masked_softmax_cuda
import scaled_masked_softmax_cuda
import scaled_softmax_cuda
import scaled_upper_triang_masked_softmax_cuda
from apex.ops import _library
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

SCALE = 0.25


def expected(x: torch.Tensor, dy: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.detach().double().requires_grad_()
    logits = wide * SCALE
    output = torch.softmax(logits if mask is None else logits.masked_fill(mask, -torch.inf), -1)
    return output.detach(), torch.autograd.grad(output, wide, dy.double())[0]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("scale", [SCALE, torch.tensor(SCALE)], ids=["float", "tensor"])
def test_modules(route: Route, scale: float | torch.Tensor) -> None:
    x, dy = (torch.randn(2, 3, 8, 8, device=route.device) for _ in range(2))
    mask = torch.rand(2, 1, 8, 8, device=route.device) < 0.3
    mask[..., 1] = False
    future = torch.ones(8, 8, dtype=torch.bool, device=route.device).triu(1)
    flat = x.view(6, 8, 8), dy.view(6, 8, 8)
    modules = [
        (scaled_softmax_cuda, (x,), dy, None),
        (scaled_masked_softmax_cuda, (x, mask), dy, mask),
        (generic_scaled_masked_softmax_cuda, (x, mask.to(torch.uint8)), dy, mask),
        (scaled_upper_triang_masked_softmax_cuda, flat[:1], flat[1], future),
    ]
    for module, inputs, gradient, hidden in modules:
        wanted, wanted_dx = expected(inputs[0], gradient, hidden)
        with _library.implementation(route.implementation):
            output = module.forward(*inputs, scale)
            before = [gradient.clone(), output.clone()]
            dx = module.backward(gradient, output, scale)
        assert_close(output, wanted)
        assert_close(dx, wanted_dx)
        assert_equal_bits([gradient, output], before)  # upstream overwrites the gradient


@pytest.mark.parametrize(("keys", "rows"), [(16, 16), (32, 8), (128, 8), (1024, 4)])
def test_batch_per_block(keys: int, rows: int) -> None:
    assert scaled_masked_softmax_cuda.get_batch_per_block(128, keys, 4, 8) == rows
