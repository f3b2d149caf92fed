"""Max pooling against PyTorch's in float64, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.max_pool import max_pool2d
from tests.support.harness import Route, assert_close, opcheck, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# images, channels, height, width; window, stride, padding: windows that overlap, that leave gaps, a rest at the edge
CASES = [
    ((2, 8, 9, 12), (3, 2, 1)),
    ((1, 70, 10, 7), (2, 2, 0)),
    ((3, 5, 8, 8), (3, 1, 1)),
    ((2, 3, 13, 11), (2, 3, 1)),
    ((1, 4, 12, 12), (5, 2, 2)),
]


def image(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Values of which many are equal, as behind a ReLU, so that it shows which of them gets the gradient."""
    values = torch.randint(-4, 5, shape).relu().to(device, dtype)
    return values.to(memory_format=torch.channels_last).requires_grad_()


def exact(x: Tensor, dy: Tensor, settings: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    wide = x.detach().double().cpu().requires_grad_()
    output = functional.max_pool2d(wide, *settings)
    return output.detach(), torch.autograd.grad(output, wide, dy.double().cpu())[0]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("shape", "settings"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_like_pytorch(shape, settings, dtype, route: Route) -> None:
    x = image(shape, dtype, route.device)
    with _library.implementation(route.implementation):
        output = max_pool2d(x, *settings)
        dy = torch.randn_like(output)
        (dx,) = torch.autograd.grad(output, x, dy)
    wanted, wanted_dx = exact(x, dy, settings)
    assert torch.equal(output.detach().double().cpu(), wanted)
    assert_close(dx, wanted_dx, reduction=9)
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("route", routes())
def test_nan_and_infinity(route: Route) -> None:
    """NaN is the largest value; of a window of -inf a value in the image gets the gradient."""
    x = torch.full((1, 2, 4, 4), -torch.inf, device=route.device).to(memory_format=torch.channels_last)
    x[0, 1, 1, 1] = torch.nan
    x.requires_grad_()
    with _library.implementation(route.implementation):
        output = max_pool2d(x, 3, 2, 1)
        (dx,) = torch.autograd.grad(output, x, torch.ones_like(output))
    assert output[0, 1].isnan().all()
    assert (output[0, 0] == -torch.inf).all()
    assert torch.equal(dx.sum((2, 3)), torch.full((1, 2), 4.0, device=route.device))


@pytest.mark.parametrize("route", routes())
def test_compiled_and_differentiated_twice(route: Route) -> None:
    x, settings = image((2, 8, 9, 12), torch.float32, route.device), (3, 2, 1)
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        backend = "inductor" if route.device == "cuda" else "aot_eager"
        compiled = torch.compile(max_pool2d, fullgraph=True, backend=backend)
        results = []
        for function in (compiled, max_pool2d):
            output = function(x, *settings)
            results.append((output.detach(), torch.autograd.grad(output.square().sum(), x)[0]))
        (first,) = torch.autograd.grad(max_pool2d(x, *settings).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        windows = x.detach().permute(0, 2, 3, 1)
        opcheck(route, torch.ops.apex.max_pool.default, (windows, *settings, 9, 12))
    for actual, wanted in zip(*results, strict=True):
        assert torch.equal(actual, wanted)
    taken = torch.autograd.grad(functional.max_pool2d(x, *settings).sum(), x)[0]
    assert_close(second, 2 * taken.double(), reduction=9)


def test_what_pytorch_does() -> None:
    """Other layouts, large windows, transforms of functions; and errors that name the argument."""
    x = torch.randn(1, 2, 14, 14)
    assert torch.equal(max_pool2d(x, 3, 2, 1), functional.max_pool2d(x, 3, 2, 1))
    last = x.to(memory_format=torch.channels_last)
    assert torch.equal(max_pool2d(last, 12), functional.max_pool2d(last, 12))
    over = functools.partial(max_pool2d, kernel_size=3)
    assert torch.equal(torch.vmap(over)(last[None])[0], functional.max_pool2d(last, 3))
    for arguments, message in [((0,), "kernel_size=0"), ((3, 2, 2), "padding=2"), ((3, 0), "stride=0")]:
        with pytest.raises(ValueError, match=message):
            max_pool2d(last, *arguments)
    with pytest.raises(ValueError, match="four dimensions"):
        max_pool2d(x[0], 3)
    with pytest.raises(TypeError, match="floating-point"):
        max_pool2d(last.int(), 3)


@pytest.mark.gpu
def test_the_stem_of_a_resnet() -> None:
    x = image((8, 64, 112, 112), torch.bfloat16, "cuda")
    output = max_pool2d(x, 3, 2, 1)
    dy = torch.randn_like(output)
    wanted, wanted_dx = exact(x, dy, (3, 2, 1))
    assert torch.equal(output.detach().double().cpu(), wanted)
    assert_close(torch.autograd.grad(output, x, dy)[0], wanted_dx, reduction=4)
