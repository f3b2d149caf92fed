"""apex.contrib.cudnn_gbn and cudnn_gbn_lib in one process; test_group_batch_norm.py tests several."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_module_is_torchs_batch_norm(route: Route, options: dict) -> None:
    ours = GroupBatchNorm2d(8, 1, **options).to(route.device)
    torchs = nn.BatchNorm2d(8, **options).double()
    for _ in range(2):
        x = torch.randn(4, 8, 3, 3, device=route.device).to(memory_format=torch.channels_last).requires_grad_()
        wide = x.detach().cpu().double().requires_grad_()
        with _library.implementation(route.implementation):
            output = ours(x)
            output.square().sum().backward()
        expected = torchs(wide)
        expected.square().sum().backward()
        assert_close(output, expected)
        assert_close(x.grad, wide.grad, reduction=36)
    if ours.affine:
        assert_close(ours.weight.grad, torchs.weight.grad, reduction=10**4)
    if ours.track_running_stats:
        assert_close(ours.running_mean, torchs.running_mean, reduction=36)
        assert_close(ours.running_var, torchs.running_var, reduction=36)
    rows = x.detach().double().movedim(1, -1).reshape(-1, 8)
    assert_close(ours.minibatch_mean, rows.mean(0), reduction=36)
    assert_close(ours.minibatch_inv_var, (rows.var(0, correction=0) + 1e-5).rsqrt(), reduction=36)
    with _library.implementation(route.implementation):
        assert_close(ours.eval()(x), torchs.eval()(wide))


def test_a_refused_batch_is_not_counted() -> None:
    module = GroupBatchNorm2d(8, 1, momentum=None)
    with pytest.raises(ValueError, match="weight has shape"):
        module(torch.ones(2, 4, 3, 3))
    assert module.num_batches_tracked == 0
    module(torch.ones(2, 8, 3, 3))
    assert module.num_batches_tracked == 1


@pytest.mark.parametrize("tracked", [True, False])
def test_one_value_per_channel_is_refused_in_training(tracked: bool) -> None:
    x, module = torch.randn(1, 8, 1, 1), GroupBatchNorm2d(8, 1, track_running_stats=tracked)
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match="more than one value per channel"):
        module(x)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.eval()
    if tracked:
        assert_close(module(x), x.double() / (1 + 1e-5) ** 0.5)
    else:  # the batch's statistics are used in evaluation, too
        with pytest.raises(ValueError, match="more than one value per channel"):
            module(x)
    assert module.train()(x[:0]).shape == (0, 8, 1, 1)


def test_autocast_casts_the_input() -> None:
    module = GroupBatchNorm2d(8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(2, 8, 3, 3)).dtype == torch.bfloat16
        assert module.double()(torch.randn(2, 8, 3, 3).double()).dtype == torch.float64


def test_groups_and_attributes() -> None:
    module = GroupBatchNorm2d(8, group_size=1)
    assert (module.group_id, module.group_rank) == (0, 0)
    assert module.get_peer_buffers(8) == [0]
    assert torch.equal(module.minibatch_mean, torch.zeros(8))
    assert torch.equal(module.minibatch_inv_var, torch.ones(8))
    with pytest.raises(RuntimeError, match="group_size=2 needs connected processes"):
        GroupBatchNorm2d(8, 2)
    with pytest.raises(ValueError, match=r"shape \[2, 8, 3\]"):
        module(torch.ones(2, 8, 3))


@pytest.mark.parametrize("route", routes())
def test_compiled_name(route: Route) -> None:
    import cudnn_gbn_lib

    x, dy = (torch.randn(4, 8, 3, 3, device=route.device).to(memory_format=torch.channels_last) for _ in range(2))
    weight, bias = (torch.rand(8, device=route.device) for _ in range(2))
    mean, variance, batch_mean, batch_inverse = (torch.full((8,), v, device=route.device) for v in (0.0, 1.0, 9.0, 9.0))
    with _library.implementation(route.implementation):
        output = cudnn_gbn_lib.forward(x, weight, bias, mean, variance, batch_mean, batch_inverse, 0.1, 1e-5, 1, 0, [0])
        gradients = cudnn_gbn_lib.backward(x, dy, weight, batch_mean, batch_inverse, 1e-5, 1, 0, [0])
    leaves = [each.detach().cpu().double().requires_grad_() for each in (x, weight, bias)]
    running = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    expected = functional.batch_norm(leaves[0], *running, *leaves[1:], True)
    assert_close(output, expected)
    assert_close(mean, running[0], reduction=36)
    assert_close(variance, running[1], reduction=36)
    for actual, wanted in zip(gradients, torch.autograd.grad(expected, leaves, dy.cpu().double()), strict=True):
        assert_close(actual, wanted, reduction=36)
    with pytest.raises(RuntimeError, match="bn_group=4 needs connected processes"):
        cudnn_gbn_lib.backward(x, dy, weight, batch_mean, batch_inverse, 1e-5, 4, 0, [0] * 4)
