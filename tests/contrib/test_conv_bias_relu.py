"""apex.contrib.conv_bias_relu and the compiled name fused_conv_bias_relu, against PyTorch in float64."""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fused_conv_bias_relu
from apex.contrib.conv_bias_relu import ConvBias, ConvBiasMaskReLU, ConvBiasReLU, ConvFrozenScaleBiasReLU
from apex.ops import _library
from apex.ops.conv import op
from tests.support.harness import Route, assert_close, assert_equal_bits, opcheck, routes

PADDING, STRIDE = 1, 2
needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="for Triton's interpreter")
KINDS = ("bias", "bias relu", "mask", "frozen scale")


def problem(device: str, dtype: torch.dtype, channels_last: bool = True) -> tuple[Tensor, ...]:
    """Return input, weight, bias, mask, scale and the output's gradient: halves that sum without rounding."""
    generator = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-4, 5, shape, generator=generator).float() / 4  # noqa: E731
    x, weight, dy = whole(2, 6, 9, 7), whole(10, 6, 3, 3), whole(2, 10, 5, 4)
    bias, scale = whole(1, 10, 1, 1), whole(1, 10, 1, 1)
    mask = torch.randint(0, 2, dy.shape, generator=generator).to(torch.int8)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images = [each.to(device, dtype).to(memory_format=layout) for each in (x, weight, dy)]
    return (
        *images[:2],
        bias.to(device, dtype),
        mask.to(device).to(memory_format=layout),
        scale.to(device, dtype),
        images[2],
    )


def exact(kind: str, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    z = functional.conv2d(x, weight, None, STRIDE, PADDING)
    if kind == "frozen scale":
        return (z * scale.detach() + bias.detach()).relu()
    z = z + bias
    return z if kind == "bias" else (z * mask if kind == "mask" else z).relu()


def ours(kind: str, x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, scale: Tensor) -> Tensor:
    if kind == "bias":
        return ConvBias(x, weight, bias, PADDING, STRIDE)
    if kind == "bias relu":
        return ConvBiasReLU(x, weight, bias, PADDING, STRIDE)
    if kind == "mask":
        return ConvBiasMaskReLU(x, weight, bias, mask, PADDING, STRIDE)
    return ConvFrozenScaleBiasReLU(x, weight, scale, bias, PADDING, STRIDE)


def results(function, kind: str, tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
    *given, dy = tensors
    leaves = [each.detach().clone().requires_grad_() for each in given[:3]]
    output = function(kind, *leaves, *given[3:])
    output.backward(dy)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_channels_first(kind: str, dtype: torch.dtype, route: Route) -> None:
    tensors = problem(route.device, dtype, channels_last=False)
    expected = results(exact, kind, tuple(each.double().cpu() for each in tensors))
    with _library.implementation("auto" if dtype == torch.float64 else route.implementation):
        actual, again = results(ours, kind, tensors), results(ours, kind, tensors)
    assert actual[0].dtype == dtype
    for name, result, wanted in zip(("output", "dx", "dweight", "dbias"), actual, expected, strict=True):
        assert_close(result, wanted, reduction=54, what=name)
    if route.device == "cpu":  # cuDNN chooses its own way to the gradients of a convolution
        assert_equal_bits(actual, again)


@pytest.mark.parametrize("route", routes())
def test_compiled_name(route: Route) -> None:
    x, weight, bias, mask, scale, dy = problem(route.device, torch.float32)
    calls = {
        "bias": (fused_conv_bias_relu.forward_no_relu, [bias], fused_conv_bias_relu.backward_no_relu),
        "bias relu": (fused_conv_bias_relu.forward, [bias], fused_conv_bias_relu.backward),
        "mask": (fused_conv_bias_relu.forward_mask, [bias, mask], fused_conv_bias_relu.backward),
        "frozen scale": (
            fused_conv_bias_relu.forward_cscale_cbias_relu,
            [scale, bias],
            fused_conv_bias_relu.backward_cscale_cbias_relu,
        ),
    }
    for kind, (forward, extra, backward) in calls.items():
        expected = results(exact, kind, tuple(each.double().cpu() for each in (x, weight, bias, mask, scale, dy)))
        with _library.implementation(route.implementation):
            (output,) = forward([x, weight, *extra], PADDING, STRIDE)
            saved = [] if kind == "bias" else [scale, output] if kind == "frozen scale" else [output]
            gradients = backward([x, weight, *saved, dy], PADDING, STRIDE)
        wanted = [each for each in expected if each is not None]
        for result, want in zip([output, *gradients], wanted, strict=True):
            assert_close(result, want, reduction=54, what=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bias relu", "mask"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rounded_once(kind: str, dtype: torch.dtype) -> None:
    """A sum of convolution and bias near zero reveals earlier rounding."""
    tensors = [torch.randn(shape, device="cuda") for shape in ((8, 64, 14, 14), (64, 64, 3, 3), (64,))]
    x, weight, bias = (each.to(dtype) for each in tensors)
    x, weight = (each.to(memory_format=torch.channels_last) for each in (x, weight / 24))
    mask = torch.ones(8, 64, 7, 7, dtype=torch.int8, device="cuda").to(memory_format=torch.channels_last)
    with _library.implementation("auto"):
        output = ours(kind, x, weight, bias, mask, bias)
    wide = [each.double().cpu() for each in (x, weight, bias.view(1, -1, 1, 1), mask)]
    assert_close(output, exact(kind, *wide, wide[2]), reduction=64 * 9)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind: str, dtype: torch.dtype, route: Route) -> None:
    tensors = problem(route.device, torch.float32)
    with torch.autocast(route.device, dtype=dtype), _library.implementation(route.implementation):
        output, *gradients = results(ours, kind, (*tensors[:5], tensors[5].to(dtype)))
    expected, *wanted = results(exact, kind, tuple(each.double().cpu() for each in tensors))
    assert output.dtype == dtype
    assert_close(output, expected, reduction=54)
    for actual, want in zip(gradients, wanted, strict=True):
        if actual is not None:
            assert actual.dtype == torch.float32
            assert_close(actual.to(dtype), want, reduction=54)


@pytest.fixture
def cudnn_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace cuDNN's call by PyTorch's convolution, and run kernels in Triton's interpreter."""
    pytest.importorskip("triton")

    def relu(x, weight, bias, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
        assert bias.dim() == 1
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups).relu()

    monkeypatch.setattr(op, "cudnn_does_it", lambda *tensors: True)
    monkeypatch.setattr(torch, "cudnn_convolution_relu", relu)
    with _library.implementation("triton"):
        yield


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_float64_alone(kind: str) -> None:
    tensors = problem("cpu", torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, *_ = results(ours, kind, tensors)
    torch.testing.assert_close(output, results(exact, kind, tensors)[0])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("wanted", ["xwb", "xw", "b", "w"])
@pytest.mark.parametrize("channels_last", [True, False], ids=["last", "first"])
@pytest.mark.usefixtures("cudnn_on_cpu")
def test_wanted_gradients_behind_cudnns_call(channels_last: bool, wanted: str, autocast: bool) -> None:
    """Results are right for every choice of gradients and every layout."""
    x, weight, bias, *_, dy = problem("cpu", torch.float32 if autocast else torch.float16, channels_last)
    given, dtype = (x, weight, bias), torch.bfloat16 if autocast else dy.dtype
    exact_leaves = [each.double().requires_grad_(name in wanted) for name, each in zip("xwb", given, strict=True)]
    for gradient in (dy.to(dtype), dy.to(dtype).contiguous(), dy.new_ones(1, dtype=dtype).expand(dy.shape)):
        leaves = [each.detach().requires_grad_(name in wanted) for name, each in zip("xwb", given, strict=True)]
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            output = ConvBiasReLU(*leaves, PADDING, STRIDE)
        assert output.dtype == dtype
        output.backward(gradient)
        right = exact("bias relu", *exact_leaves, None, None)
        gradients = torch.autograd.grad(right, [each for each in exact_leaves if each.requires_grad], gradient.double())
        for leaf in leaves:
            assert (leaf.grad is None) != leaf.requires_grad
        found = [each.grad for each in leaves if each.grad is not None]
        for actual, want in zip([output, *found], [right, *gradients], strict=True):
            assert_close(actual.to(dtype), want, reduction=54)
        assert all(leaf.grad.dtype == leaf.dtype for leaf in leaves if leaf.grad is not None)


@needs_interpreter
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("channels_last", [True, False], ids=["last", "first"])
@pytest.mark.usefixtures("cudnn_on_cpu")
def test_behind_cudnns_call(kind: str, channels_last: bool) -> None:
    tensors = problem("cpu", torch.float32, channels_last)
    expected = results(exact, kind, tuple(each.double() for each in tensors))
    for actual, wanted in zip(results(ours, kind, tensors), expected, strict=True):
        assert_close(actual, wanted, reduction=54)


@needs_interpreter
@pytest.mark.usefixtures("cudnn_on_cpu")
def test_second_derivatives_behind_cudnns_call_are_refused() -> None:
    x, weight, bias, *_ = problem("cpu", torch.float32)
    output = ConvBiasReLU(x.requires_grad_(), weight, bias, PADDING, STRIDE)
    (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@needs_interpreter
@pytest.mark.usefixtures("cudnn_on_cpu")
def test_arguments_are_checked_before_cudnns_call() -> None:
    x, weight, bias, *_ = problem("cpu", torch.float32)
    ConvBiasReLU(x, weight, bias, PADDING, STRIDE)
    with pytest.raises(ValueError, match="bias has shape"):
        ConvBiasReLU(x, weight, bias[:, 1:], PADDING, STRIDE)
    with pytest.raises(ValueError, match="bias is on meta"):
        ConvBiasReLU(x, weight, bias.to("meta"), PADDING, STRIDE)
    with pytest.raises(ValueError, match="stride=0"):
        ConvBiasReLU(x, weight, bias, PADDING, 0)
    with pytest.raises(ValueError, match="reach beyond images"):
        ConvBiasReLU(x[:, :, :2], weight, bias, 0, STRIDE)
    with pytest.raises(ValueError, match="images"):
        ConvBiasReLU(x[0], weight, bias, PADDING, STRIDE)


def test_nan_stays_nan() -> None:
    x, weight, bias, *_ = problem("cpu", torch.float32)
    x[0, 0, 0, 0] = float("nan")
    assert ConvBiasReLU(x, weight, bias, PADDING, STRIDE).isnan().any()


def test_a_second_derivative_is_refused() -> None:
    x, weight, bias, *_ = problem("cpu", torch.float64)
    x.requires_grad_()
    (first,) = torch.autograd.grad(ConvBiasReLU(x, weight, bias, 1, 1).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("kind", [ConvBiasReLU, ConvBiasMaskReLU, ConvFrozenScaleBiasReLU])
def test_a_gradient_penalty_is_refused(kind: Callable) -> None:
    """The gradient of a sum is constant; the gradient of the input behind it is not."""
    x, weight, bias, mask, scale, _ = problem("cpu", torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    others = {ConvBiasReLU: (bias,), ConvBiasMaskReLU: (bias, mask), ConvFrozenScaleBiasReLU: (scale, bias)}[kind]
    output = kind(x, weight, *others, PADDING, STRIDE)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (output.sum() + gradient.square().sum()).backward()


def test_bad_arguments() -> None:
    x, weight, bias, mask, scale, _ = problem("cpu", torch.float32)
    with pytest.raises(ValueError, match="bias has shape"):
        ConvBiasReLU(x, weight, bias[:, 1:], PADDING, STRIDE)
    with pytest.raises(ValueError, match="scale has shape"):
        ConvFrozenScaleBiasReLU(x, weight, scale[:, 1:], bias, PADDING, STRIDE)
    with pytest.raises(ValueError, match="mask has shape"):
        ConvBiasMaskReLU(x, weight, bias, mask[:1], PADDING, STRIDE)
    with pytest.raises(ValueError, match="bias is on meta"):
        ConvBiasReLU(x, weight, bias.to("meta"), PADDING, STRIDE)
    with pytest.raises(ValueError, match="scale is on meta"):
        ConvFrozenScaleBiasReLU(x, weight, scale.to("meta"), bias, PADDING, STRIDE)
    with pytest.raises(ValueError, match="on meta, the output"):
        ConvBiasMaskReLU(x, weight, bias, mask.to("meta"), PADDING, STRIDE)
    with pytest.raises(ValueError, match="stride=0"):
        ConvBias(x, weight, bias, PADDING, 0)
    with pytest.raises(ValueError, match="reach beyond images"):  # cuDNN's call would not look
        ConvBiasReLU(x[:, :, :2], weight, bias, 0, STRIDE)
    with pytest.raises(ValueError, match="images"):
        ConvBias(x[0], weight, bias, PADDING, STRIDE)


@pytest.mark.parametrize("route", routes())
def test_opcheck(route: Route) -> None:
    values = torch.randn(2, 6, 3, 4, device=route.device).to(memory_format=torch.channels_last)
    scale, bias = (torch.rand(6, device=route.device) for _ in range(2))
    mask = torch.randint(0, 2, values.shape, device=route.device, dtype=torch.int8)
    with _library.implementation(route.implementation):
        opcheck(route, torch.ops.apex.conv_epilogue.default, (values, scale, bias, mask))
