"""apex.contrib.bottleneck in one process: against plain PyTorch, by gradcheck, captured in a graph."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import Tensor

from apex.contrib.bottleneck import Bottleneck, HaloExchangerSendRecv, SpatialBottleneck
from apex.contrib.bottleneck.bottleneck import BottleneckFunction, FrozenBatchNorm2d
from apex.contrib.bottleneck.halo_exchangers import HaloPadder
from apex.contrib.peer_memory import PeerHaloExchanger1d, PeerMemoryPool
from apex.ops import _library
from apex.ops.conv.bottleneck import bottleneck_reference
from tests.contrib.spatial.problem import Case, block, images, trained
from tests.support.harness import Route, routes

STRIDES = ((1, 4), (1, 6), (2, 6), (3, 4))
LAYOUTS = ((False, False), (False, True), (True, False))


def case_of(stride: int = 1, out: int = 4, nhwc: bool = False, last: bool = True, dtype: torch.dtype = torch.float64):
    return Case(stride, out, nhwc, last, dtype, 1)


def exact(module: Bottleneck, x: Tensor, dy: Tensor, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output and gradients by autograd through PyTorch's operators, on the CPU."""
    nhwc = module.explicit_nhwc
    first = [each.detach().to("cpu", dtype) for each in (x, *module.w_conv)]
    leaves = [(each.movedim(-1, 1) if nhwc else each).requires_grad_() for each in first]
    pairs = [norm.to("cpu", dtype).get_scale_bias(False) for norm in copy.deepcopy(module)._norms()]
    scales, biases = zip(*pairs, strict=True)
    y = bottleneck_reference(leaves[0], leaves[1:], scales, biases, module.stride)
    dy = dy.to("cpu", dtype)
    found = [y.detach(), *torch.autograd.grad(y, leaves, dy.movedim(-1, 1) if nhwc else dy)]
    return [each.movedim(1, -1) if nhwc else each for each in found]


def assert_like(actual: list[Tensor], module: Bottleneck, x: Tensor, dy: Tensor) -> None:
    """Outputs by their largest error; gradients, where rounding may turn a ReLU, by its norm beside PyTorch's.

    Half-precision convolutions on a CPU round otherwise where PyTorch does not take oneDNN: 1.4 times the root of eps.
    """
    exactly, rounded = exact(module, x, dy), exact(module, x, dy, x.dtype)
    for place, (result, wanted, plain) in enumerate(zip(actual, exactly, rounded, strict=True)):
        assert result.dtype == x.dtype
        assert result.shape == wanted.shape
        error, eps = result.double().cpu() - wanted, torch.finfo(x.dtype).eps
        if place == 0:
            assert float(error.abs().max()) <= 16 * eps * float(wanted.abs().max())
        else:
            assert float(error.norm()) <= 2 * eps**0.5 * float(wanted.norm()) + float((plain.double() - wanted).norm())


@pytest.mark.parametrize(("nhwc", "last"), LAYOUTS)
@pytest.mark.parametrize(("stride", "out"), STRIDES)
def test_gradcheck(stride: int, out: int, nhwc: bool, last: bool) -> None:
    case = case_of(stride, out, nhwc, last)
    module, x = block(case), images(case, 4)[:1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *weights: module(x), (x, *module.w_conv), fast_mode=True)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("nhwc", "last"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_matches_float64(
    dtype: torch.dtype, nhwc: bool, last: bool, route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype == torch.bfloat16 and route == Route("cpu", "triton"):
        pytest.skip("the interpreter cuts bfloat16 off instead of rounding it, which turns ReLUs")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for stride, out in STRIDES:
        case = case_of(stride, out, nhwc, last, dtype)
        module, x = block(case, device=route.device), images(case, 6).to(route.device)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        with _library.implementation(route.implementation):
            output = module(leaf)
            dy = torch.arange(output.numel(), dtype=torch.float32).sin().to(output).view(output.shape)
            output.backward(dy)
        actual = [output.detach(), leaf.grad, *(weight.grad for weight in module.w_conv)]
        assert_like(actual, module, x, dy)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("route", routes())
def test_only_trained_parameters_get_gradients(route: Route, dtype: torch.dtype) -> None:
    """Any part of the weights, or the input, may need no gradient."""
    case = case_of(2, 6, dtype=dtype)
    x = images(case, 6).to(route.device)
    with _library.implementation(route.implementation):
        whole = trained(block(case, device=route.device), x)
        for flags in itertools.product((False, True), repeat=5):
            module, leaf = block(case, device=route.device), x.clone(memory_format=torch.preserve_format)
            tensors = (leaf, *module.w_conv)
            for tensor, flag in zip(tensors, flags, strict=True):
                tensor.requires_grad_(flag)
            y = module(leaf)
            assert y.requires_grad == any(flags)
            if any(flags):
                y.backward(torch.arange(y.numel(), dtype=torch.float64).sin().to(y).view(y.shape))
            for tensor, expected, flag in zip(tensors, whole[1:], flags, strict=True):
                assert (tensor.grad is not None) == flag
                if flag:
                    torch.testing.assert_close(tensor.grad, expected)


def test_names_and_frozen_norms() -> None:
    module = Bottleneck(4, 3, 8, stride=2)
    norm = [
        f"{name}.{value}"
        for name in ("bn1", "bn2", "bn3")
        for value in ("weight", "bias", "running_mean", "running_var")
    ]
    keys = {"conv1.weight", "conv2.weight", "conv3.weight", "downsample.0.weight", *norm}
    keys |= {f"downsample.1.{value}" for value in ("weight", "bias", "running_mean", "running_var")}
    assert set(module.state_dict()) == keys
    convolutions = (module.conv1, module.conv2, module.conv3, module.downsample[0])
    assert all(weight is each.weight for weight, each in zip(module.w_conv, convolutions, strict=True))
    assert tuple(Bottleneck(4, 3, 8, explicit_nhwc=True).conv2.weight.shape) == (3, 3, 3, 3)
    assert tuple(Bottleneck(4, 3, 8, explicit_nhwc=True).conv1.weight.shape) == (3, 1, 1, 4)
    frozen = FrozenBatchNorm2d(3)
    for value, buffer in enumerate(frozen.buffers(), 1):
        buffer.fill_(value)
    scale, bias = frozen.get_scale_bias(True)
    assert scale.shape == bias.shape == (1, 1, 1, 3)
    torch.testing.assert_close(scale.flatten(), torch.full((3,), 0.5))  # 1 / sqrt(4), no epsilon
    torch.testing.assert_close(frozen(torch.ones(1, 3, 1, 1)).flatten(), torch.full((3,), 1.0))


def test_scale_bias_callable() -> None:
    case = case_of(2, 6)
    module, x = block(case), images(case, 6)
    before = module(x)
    renew = module.get_scale_bias_callable()
    torch.testing.assert_close(module(x), before)  # computed at once, not left to chance
    module.bn2.weight.mul_(2)
    torch.testing.assert_close(module(x), before)
    addresses = [each.data_ptr() for each in module.w_scale]
    renew()
    assert [each.data_ptr() for each in module.w_scale] == addresses
    expected = block(case)
    expected.bn2.weight.mul_(2)
    torch.testing.assert_close(module(x), expected(x))
    module.float()
    with pytest.raises(RuntimeError, match="call get_scale_bias_callable"):
        module(x.float())


def test_autocast_compile_and_second_derivative() -> None:
    case = case_of(2, 6, dtype=torch.float32)
    module, x = block(case), images(case, 6).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert gradient.dtype == torch.float32
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
    (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_copy_trains_its_own_weights() -> None:
    case = case_of()
    module = block(case)
    again = copy.deepcopy(module)
    again(images(case, 4)).sum().backward()
    assert all(weight.grad is None for weight in module.w_conv)
    assert all(weight.grad is not None for weight in again.w_conv)


def test_arguments() -> None:
    for options in ({"groups": 2}, {"dilation": 2}, {"norm_func": torch.nn.BatchNorm2d}):
        with pytest.raises(RuntimeError, match=f"{next(iter(options))}="):
            Bottleneck(4, 3, 4, **options)
    with pytest.raises(ValueError, match="4 channels"):
        Bottleneck(4, 3, 4)(torch.zeros(1, 3, 2, 2))
    with pytest.raises(ValueError, match=r"\[N, H, W, C\] with 4"):
        Bottleneck(4, 3, 4, explicit_nhwc=True)(torch.zeros(1, 4, 2, 2))
    with pytest.raises(ValueError, match=r"shape \[3, 3\]; dimension 2 needs at least 3 \* half_halo = 3"):
        PeerHaloExchanger1d([0], 0, PeerMemoryPool(0, 0, [0]), 1)(torch.zeros(3, 3))
    pad, images = HaloPadder(HaloExchangerSendRecv([0], 0)), torch.ones(1, 2, 4, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="would not be sent back"):
        pad(images, 1, False, True)
    with torch.no_grad():
        assert pad(images, 1, False, True).shape == (1, 2, 6, 4)
    exchanger = HaloExchangerSendRecv([0], 0)
    assert (exchanger.left_rank, exchanger.right_rank, exchanger.left_zero, exchanger.right_zero) == (
        -1,
        -1,
        True,
        True,
    )
    for spatial, words in (
        ((2, 2, None, exchanger, 1, False), "rank 2"),
        ((2, 0, None, None, 1, False), "halo exchanger"),
        ((2, 0, None, exchanger, 0, False), "method 1, 2 or 3"),
    ):
        with pytest.raises(ValueError, match=words):
            SpatialBottleneck(4, 3, 4, spatial_parallel_args=spatial)
    with pytest.raises(RuntimeError, match="init_process_group"):
        HaloExchangerSendRecv([0, 1], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_a_graph(dtype: torch.dtype) -> None:
    """Scales renewed outside of the graph are those that it reads; images divided among one rank take the same way."""
    for stride, out in STRIDES[::2]:
        case = case_of(stride, out, dtype=dtype)
        module, x = block(case, device="cuda"), images(case, 6).cuda().requires_grad_()
        renew = module.get_scale_bias_callable()
        dy = torch.ones_like(module(x))
        inputs = (x, *module.w_conv)
        for _ in range(2):
            torch.autograd.grad(module(x), inputs, dy)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
            gradients = torch.autograd.grad(y, inputs, dy)
        module.bn2.weight.mul_(2)
        renew()
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        assert_like([y.detach(), *gradients], module, x.detach(), dy)


def test_function_takes_lists() -> None:
    case = case_of(2, 6)
    module, x = block(case), images(case, 6)
    scales, biases = module._scales_and_biases()
    torch.testing.assert_close(BottleneckFunction.apply(False, 2, scales, biases, x, *module.w_conv), module(x))


@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 4, 1, 1), (0, 4, 3, 3)], ids=str)
def test_layouts_that_shapes_leave_open(shape: tuple[int, ...]) -> None:
    """One channel, or one pixel, is both channels first and channels last."""
    module = Bottleneck(4, 1, 4).double()
    x = torch.randn(shape, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    inputs = (x, *module.w_conv)
    actual = torch.autograd.grad(module(x).square().sum(), inputs)
    pairs = [norm.get_scale_bias(False) for norm in module._norms()]
    expected = bottleneck_reference(x, module.w_conv, *zip(*pairs, strict=True), 1).square().sum()
    torch.testing.assert_close(actual, torch.autograd.grad(expected, inputs))


def test_a_refused_allocation_takes_no_memory() -> None:
    pool = PeerMemoryPool(256, 256, [0])
    for dynamic in (False, True):
        with pytest.raises(ValueError, match="channels_last needs four dimensions"):
            pool.allocate_peer_tensors([4, 4], torch.float32, True, dynamic)
        (tensor,) = pool.allocate_peer_tensors([64], torch.float32, False, dynamic)
        assert tensor.shape == (64,)
