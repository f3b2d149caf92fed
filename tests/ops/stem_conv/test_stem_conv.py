"""First convolutions against PyTorch's in float64, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from apex.ops import _library
from apex.ops.stem_conv import op, stem_conv2d, stem_fits
from tests.support.harness import Route, opcheck, routes

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# channels, outputs, window, stride, padding; height and width: windows that end before the image, outputs
# beyond a tile, patches
CASES = [
    ((3, 64, (7, 7), 2, 3), (21, 30)),
    ((3, 32, (3, 3), 2, 1), (16, 17)),
    ((4, 48, (4, 4), 2, 0), (19, 16)),
    ((1, 16, (5, 3), 2, 2), (9, 20)),
    ((3, 20, (4, 4), 4, 0), (18, 12)),
]


def leaves(case: Any, size: Any, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    channels, outputs, window, *_ = case
    torch.manual_seed(0)
    input = torch.randn(2, channels, *size).to(device, dtype)
    weight = (torch.randn(outputs, channels, *window) / 8).to(device, dtype)
    bias = torch.randn(outputs).to(device, dtype)
    return input.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def results(function: Any, tensors: Any, case: Any, dy: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The gradient that was given to the output; output and gradients."""
    output = function(*tensors, *case[3:])
    dy = torch.randn_like(output) if dy is None else dy
    return dy, [output.detach(), *torch.autograd.grad(output, tensors, dy.to(output.dtype))]


def assert_like_exact(found: list[Tensor], tensors: Any, case: Any, dy: Tensor, kernels: bool = True) -> None:
    """Sums of products: errors are measured by the largest element. PyTorch's on a CPU add in half precision."""
    wide = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    _, exact = results(functional.conv2d, wide, case, dy.double().cpu())
    for name, actual, wanted in zip(("output", "dinput", "dweight", "dbias"), found, exact, strict=True):
        error = (actual.double().cpu() - wanted).abs().max() / wanted.abs().max()
        rounded = torch.finfo(actual.dtype).eps
        limit = 2e-2 if name == "dinput" or not kernels else rounded
        assert error < limit, f"{name} is off by {error:.3g}"


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("case", "size"), CASES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_like_pytorch(case, size, dtype, route: Route) -> None:
    tensors = leaves(case, size, dtype, route.device)
    with _library.implementation(route.implementation):
        dy, found = results(stem_conv2d, tensors, case)
    assert_like_exact(found, tensors, case, dy, route.implementation == "triton")


@pytest.mark.parametrize("route", routes())
def test_under_autocast_and_compiled(route: Route, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 is cast as PyTorch casts it, by kernels as well; the same numbers from a compiled function."""
    case, size = CASES[0]
    tensors = leaves(case, size, torch.float32, route.device)
    launched = []
    monkeypatch.setattr(op, "_by_kernels", lambda *a, real=op._by_kernels: launched.append(1) or real(*a))
    with _library.implementation(route.implementation), torch.autocast(route.device, torch.bfloat16):
        dy, found = results(stem_conv2d, tensors, case)
        assert found[0].dtype == torch.bfloat16
        assert len(launched) == (route.implementation == "triton")
        torch._dynamo.reset()
        backend = "inductor" if route.device == "cuda" else "aot_eager"
        _, compiled = results(torch.compile(stem_conv2d, fullgraph=True, backend=backend), tensors, case, dy)
    assert_like_exact([each.bfloat16() for each in found], tensors, case, dy, kernels=False)
    for actual, wanted in zip(compiled, found, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1.6e-2, atol=1e-2 * float(wanted.abs().max()))
    images, weight = (
        torch.randn(shape, dtype=torch.bfloat16, device=route.device) for shape in ((2, 11, 14, 4), (7, 8, 4, 16))
    )
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.stem_conv.default, (images, weight.requires_grad_()))


def test_what_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many channels, too narrow windows, other strides and dtypes, images without a batch, and errors."""
    assert stem_fits(16, 3, (1, 3), 2, 1)
    assert not stem_fits(16, 3, (5, 2), 2, 1)
    monkeypatch.setattr(op, "_by_kernels", None)
    with _library.implementation("auto"):
        for shape, weight, stride in (
            ((2, 5, 9, 9), (16, 5, 3, 3), 2),
            ((2, 3, 9, 9), (16, 3, 3, 3), 1),
            ((3, 9, 9), (16, 3, 3, 3), 2),
            ((2, 3, 9, 9), (16, 3, 3, 3), 2),
        ):
            x, w = torch.randn(shape), torch.randn(weight)
            assert torch.equal(stem_conv2d(x, w, None, stride, 1), functional.conv2d(x, w, None, stride, 1))
        with pytest.raises(RuntimeError, match="channels"):
            stem_conv2d(torch.randn(1, 3, 9, 9), torch.randn(16, 4, 3, 3))
        with pytest.raises(RuntimeError, match="greater than actual input size"):
            stem_conv2d(torch.randn(1, 3, 2, 2).bfloat16(), torch.randn(16, 3, 7, 7).bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_the_stem_of_a_resnet(layout: torch.memory_format) -> None:
    case = CASES[0][0]
    tensors = leaves(case, (224, 224), torch.bfloat16, "cuda")
    tensors = (tensors[0].detach().to(memory_format=layout).requires_grad_(), *tensors[1:])
    dy, found = results(stem_conv2d, tensors, case)
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert_like_exact(found, tensors, case, dy)
