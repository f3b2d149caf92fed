"""apex.contrib.groupbn and the compiled name bnp in one process; test_group_batch_norm.py tests several."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.groupbn.batch_norm import (
    bn_addrelu_NHWC_impl,
    bn_NHWC_impl,
    check_and_convert_channels_last,
    check_if_rocm_pytorch,
)
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes

SHAPE = (3, 4, 5, 8)  # [N, H, W, C]


class Expected:
    """The expected results in float64, from PyTorch's operators on [N, C, H, W] and autograd."""

    def __init__(self, x: Tensor, z: Tensor | None, dy: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> None:
        given = (x, z, weight, bias)
        leaves = [None if each is None else each.detach().cpu().double().requires_grad_() for each in given]
        self.mean, self.variance = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
        normalised = functional.batch_norm(
            leaves[0].movedim(-1, 1), self.mean, self.variance, leaves[2], leaves[3], True
        )
        output = normalised.movedim(1, -1) if leaves[1] is None else normalised.movedim(1, -1) + leaves[1]
        self.output = output.relu() if relu else output
        wanted = [each for each in leaves if each is not None]
        self.gradients = torch.autograd.grad(self.output, wanted, dy.detach().cpu().double())
        rows = leaves[0].detach().reshape(-1, 8)
        self.minibatch = (rows.mean(0), (rows.var(0, correction=0) + 1e-5).rsqrt())


def tensors(device: str) -> list[Tensor]:
    x, z, dy = (torch.randn(SHAPE, device=device) for _ in range(3))
    return [x, z, dy, *(torch.rand(8, device=device) + 0.5 for _ in range(2))]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("torch_channels_last", [False, True])
def test_module(route: Route, relu: bool, addend: bool, torch_channels_last: bool) -> None:
    x, z, dy, weight, bias = tensors(route.device)
    module = BatchNorm2d_NHWC(8, fuse_relu=relu, torch_channels_last=torch_channels_last).to(route.device)
    module.load_state_dict({"weight": weight, "bias": bias}, strict=False)
    if addend and not relu:
        with pytest.raises(ValueError, match="fuse_relu"):
            module(x, z)
        return
    leaves = [x.requires_grad_(), *([z.requires_grad_()] if addend else [])]
    given = [each.movedim(-1, 1) if torch_channels_last else each for each in leaves]
    with _library.implementation(route.implementation):
        output = module(*given)
        output = output.movedim(1, -1) if torch_channels_last else output
        gradients = torch.autograd.grad(output, [*leaves, module.weight, module.bias], dy)
    expected = Expected(x, z if addend else None, dy, weight, bias, relu)
    assert_close(output, expected.output)
    for actual, wanted in zip(gradients, expected.gradients, strict=True):
        assert_close(actual, wanted, reduction=60)
    assert_close(module.running_mean, expected.mean, reduction=60)
    assert_close(module.running_var, expected.variance, reduction=60)
    assert_close(module.minibatch_mean, expected.minibatch[0], reduction=60)
    assert_close(module.minibatch_riv, expected.minibatch[1], reduction=60)


@pytest.mark.parametrize("route", routes())
def test_evaluation(route: Route) -> None:
    x, z, _, _, _ = tensors(route.device)
    module = BatchNorm2d_NHWC(8, fuse_relu=True).to(route.device).eval()
    module.running_mean.uniform_()
    module.running_var.uniform_(0.5, 2)
    before = (module.running_mean.double(), module.running_var.double())
    with _library.implementation(route.implementation):
        output = module(x, z)
    normalised = functional.batch_norm(x.double().movedim(-1, 1), *before)
    assert_close(output, (normalised.movedim(1, -1) + z).relu())
    assert torch.equal(module.running_mean.double(), before[0])


def test_half_input_and_float_parameters() -> None:
    module = BatchNorm2d_NHWC(8, fuse_relu=True)
    x = torch.randn(SHAPE).half()
    output = module(x)
    assert output.dtype == torch.float16
    assert module.weight.dtype == module.minibatch_mean.dtype == torch.float32
    assert_close(
        output, functional.batch_norm(x.double().movedim(-1, 1), None, None, training=True).movedim(1, -1).relu()
    )


def test_state_and_copies_equal_torchs() -> None:
    import copy

    ours, torchs = BatchNorm2d_NHWC(8), nn.BatchNorm2d(8)
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    assert torch.equal(ours.minibatch_mean, torch.zeros(8))
    assert torch.equal(ours.minibatch_riv, torch.ones(8))
    x = torch.randn(SHAPE, requires_grad=True)
    ours(x)
    assert torch.equal(copy.deepcopy(ours).minibatch_mean, ours.minibatch_mean)
    ours.load_state_dict(torchs.state_dict())
    assert torch.equal(ours.running_mean, torch.zeros(8))


def test_a_running_average_of_equal_shares() -> None:
    module, torchs = BatchNorm2d_NHWC(8), nn.BatchNorm2d(8, momentum=None)
    module.momentum = None
    with pytest.raises(ValueError, match="weight has shape"):  # and is not counted
        module(torch.ones(2, 3, 3, 4))
    for _ in range(3):
        x = torch.randn(SHAPE)
        module(x)
        torchs(x.movedim(-1, 1))
    assert_close(module.running_mean, torchs.running_mean.double())
    assert_close(module.running_var, torchs.running_var.double())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("rocm", [False, True])
@pytest.mark.parametrize("addend", [False, True])
def test_functions_with_both_lists_of_arguments(route: Route, rocm: bool, addend: bool) -> None:
    x, z, dy, weight, bias = tensors(route.device)
    mean, variance, batch_mean, batch_inverse = (torch.full((8,), v, device=route.device) for v in (0.0, 1.0, 9.0, 9.0))
    leaves = [each.requires_grad_() for each in ((x, z, weight, bias) if addend else (x, weight, bias))]
    images = [each.movedim(-1, 1) if rocm else each for each in leaves[:-2]]
    rest = (1, None, None, torch.zeros(1, dtype=torch.int32), None, None, 2, 10, 2, 10, False)
    common = (*images, weight, bias, mean, variance, batch_mean, batch_inverse)
    flags = (True, *((True, *rest) if rocm else rest))
    with _library.implementation(route.implementation):
        if addend:
            output = bn_addrelu_NHWC_impl.apply(*common, 1, None, 0.1, 1e-5, *flags)
        else:
            output = bn_NHWC_impl.apply(*common, None, 0.1, 1e-5, True, *flags)
        output = output.movedim(1, -1) if rocm else output
        gradients = torch.autograd.grad(output, leaves, dy)
    expected = Expected(x, z if addend else None, dy, weight, bias, True)
    assert_close(output, expected.output)
    for actual, wanted in zip(gradients, expected.gradients, strict=True):
        assert_close(actual, wanted, reduction=60)
    for actual, wanted in zip((batch_mean, batch_inverse), expected.minibatch, strict=True):
        assert_close(actual, wanted, reduction=60)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize("torch_format", [False, True])
def test_compiled_name(route: Route, addend: bool, torch_format: bool) -> None:
    import bnp

    x, z, dy, weight, bias = tensors(route.device)
    mean, variance, batch_mean, batch_inverse = (torch.full((8,), v, device=route.device) for v in (0.0, 1.0, 9.0, 9.0))
    as_given = lambda tensor: tensor.movedim(-1, 1) if torch_format else tensor  # noqa: E731
    as_here = lambda tensor: tensor.movedim(1, -1) if torch_format else tensor  # noqa: E731
    scratch, magic = torch.zeros(8192, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    tail = (None, None, None, None, 1, magic, 2, 100, False)
    common = (weight, bias, mean, variance, batch_mean, batch_inverse)
    with _library.implementation(route.implementation):
        if addend:
            bitmask = torch.full(((x.numel() + 31) // 32 * 2,), -1, dtype=torch.int32, device=route.device)
            y = bnp.bn_addrelu_fwd_nhwc(as_given(x), as_given(z), *common, bitmask, scratch, 0.1, 1e-5, *tail)
            gradients = bnp.bn_addrelu_bwd_nhwc(as_given(x), as_given(dy), *common, bitmask, scratch, 0.1, 1e-5, *tail)
            gradients[1] = as_here(gradients[1])
        else:
            y = bnp.bn_fwd_nhwc(as_given(x), *common, scratch, 0.1, 1e-5, True, *tail)
            gradients = bnp.bn_bwd_nhwc(as_given(x), as_given(dy), *common, scratch, 0.1, 1e-5, True, *tail)
        gradients[0] = as_here(gradients[0])
        evaluated = (weight, bias, mean, variance, scratch, 1, 0.1, 1e-5)
        if addend:
            eval_output = bnp.bn_addrelu_fwd_eval_nhwc(as_given(x), as_given(z), *evaluated)
        else:
            eval_output = bnp.bn_fwd_eval_nhwc(as_given(x), *evaluated, True)
    expected = Expected(x, z if addend else None, dy, weight, bias, True)
    assert_close(as_here(y), expected.output)
    for actual, wanted in zip(gradients, expected.gradients, strict=True):
        assert_close(actual, wanted, reduction=60)
    assert_close(mean, expected.mean, reduction=60)
    assert_close(variance, expected.variance, reduction=60)
    assert_close(batch_mean, expected.minibatch[0], reduction=60)
    assert_close(batch_inverse, expected.minibatch[1], reduction=60)
    wide = functional.batch_norm(
        x.double().movedim(-1, 1), mean.double(), variance.double(), weight.double(), bias.double()
    ).movedim(1, -1)
    assert_close(as_here(eval_output), (wide + z if addend else wide).relu())


def test_the_rest_of_the_compiled_name() -> None:
    import bnp

    for name in ("bn_fwd_nhwc", "bn_bwd_nhwc", "bn_addrelu_fwd_nhwc", "bn_addrelu_bwd_nhwc"):
        assert getattr(bnp, f"{name}_occupancy")() == 2
    assert bnp.get_buffer_size(3) == 3 * bnp.get_buffer_size(1) > 0
    data = torch.zeros(4, dtype=torch.uint8)
    assert bnp.get_data_ptr(data) == data.data_ptr()
    assert bnp.get_remote_data_ptr(data, 0) == 0
    bnp.close_remote_data(data)
    with pytest.raises(ValueError, match="bitmask has 4 bytes"):
        bnp._mask_bytes(torch.zeros(1, dtype=torch.int32), torch.zeros(64))
    with pytest.raises(ValueError, match="8 channels of scale"):
        bnp._spec(torch.zeros(2, 3, 4, 5), torch.ones(8), 0.1, 1e-5, True)


def test_helpers() -> None:
    x = torch.randn(2, 3, 4, 5)
    assert check_and_convert_channels_last(x, False) is x
    converted = check_and_convert_channels_last(x, True)
    assert converted.is_contiguous(memory_format=torch.channels_last)
    assert check_and_convert_channels_last(converted, True) is converted
    assert check_if_rocm_pytorch() == (torch.version.hip is not None)


@pytest.mark.parametrize("torch_channels_last", [True, False])
def test_one_value_per_channel_is_refused_in_training(torch_channels_last: bool) -> None:
    module = BatchNorm2d_NHWC(8, fuse_relu=True, torch_channels_last=torch_channels_last)
    x = torch.randn((1, 8, 1, 1) if torch_channels_last else (1, 1, 1, 8))
    for addend in (None, x):
        with pytest.raises(ValueError, match="more than one value per channel"):
            module(x, addend)
    assert not module.running_mean.any()
    assert_close(module.eval()(x), (x.double() / (1 + 1e-5) ** 0.5).relu())


def test_bad_arguments() -> None:
    with pytest.raises(RuntimeError, match="bn_group=2 needs connected processes"):
        BatchNorm2d_NHWC(8, bn_group=2)
    with pytest.raises(ValueError, match="bn_group=0"):
        BatchNorm2d_NHWC(8, bn_group=0)
    with pytest.raises(ValueError, match="max_cta_per_sm=0"):
        BatchNorm2d_NHWC(8, max_cta_per_sm=0)
    with pytest.raises(TypeError, match="torch_channels_last"):
        BatchNorm2d_NHWC(8, True, 1, True)
    with pytest.raises(ValueError, match=r"shape \[2, 8\]"):
        BatchNorm2d_NHWC(8)(torch.ones(2, 8))
    with pytest.raises(ValueError, match=r"expected \[7\]"):
        BatchNorm2d_NHWC(8)(torch.ones(2, 3, 3, 7))
