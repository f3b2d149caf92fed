"""SyncBatchNorm in two processes, against batch norm over the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.parallel import (
    DistributedDataParallel,
    SyncBatchNorm,
    convert_syncbn_model,
    create_syncbn_process_group,
    sync_batchnorm,
)
from apex.parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from apex.parallel.sync_batchnorm_kernel import SyncBatchnormFunction as GivenStatistics
from tests.parallel.exchanges import GATHERED, SUMMED, counted
from tests.parallel.processes import Check, assert_same_everywhere, everywhere

CHANNELS = 5
STEPS = 3


def made(rows: int, seed: int, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return an input [rows, C, 3, 2], far from zero."""
    generator = torch.Generator().manual_seed(seed)
    return (3 + 2 * torch.randn(rows, CHANNELS, 3, 2, generator=generator, dtype=torch.float64)).to(dtype)


def norms(**arguments: object) -> tuple[SyncBatchNorm, nn.BatchNorm2d]:
    """Return our norm, and PyTorch's in float64 with the same parameters, for the joined batch."""
    ours = SyncBatchNorm(CHANNELS, **arguments)
    if ours.affine:
        nn.init.normal_(ours.weight)
        nn.init.normal_(ours.bias)
    other = {name: arguments[name] for name in ("momentum", "affine", "track_running_stats") if name in arguments}
    joined = nn.BatchNorm2d(CHANNELS, **other, dtype=torch.float64)
    joined.load_state_dict(ours.state_dict())
    return ours, joined


def compare(
    rank: int,
    rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    channel_last: bool = False,
    memory_format: torch.memory_format = torch.contiguous_format,
    has_z: bool = False,
    fuse_relu: bool = False,
    **arguments: object,
) -> None:
    ours, joined = norms(channel_last=channel_last, fuse_relu=fuse_relu, **arguments)
    if dtype == torch.float64:
        ours.double()
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]

    def laid_out(tensor: Tensor) -> Tensor:
        tensor = tensor.movedim(1, -1) if channel_last else tensor
        return tensor.clone(memory_format=torch.contiguous_format if channel_last else memory_format)

    def back(tensor: Tensor) -> Tensor:
        return (tensor.movedim(-1, 1) if channel_last else tensor).double()

    first = sum(rows[:rank])
    own = slice(first, first + rows[rank])
    for step in range(STEPS):
        x, z, dy = (made(sum(rows), 10 * step + part, dtype=dtype) for part in range(3))
        wide_x, wide_z = x.to(torch.float64, copy=True).requires_grad_(), (z.double() / 4).requires_grad_()
        expected = joined(wide_x)
        expected = expected + wide_z if has_z else expected
        expected = expected.relu() if fuse_relu else expected
        own_x = laid_out(x[own]).requires_grad_()
        own_z = laid_out(z[own] / 4).requires_grad_() if has_z else None
        output = ours(own_x, own_z)
        assert output.dtype == dtype
        assert output.shape == own_x.shape
        torch.testing.assert_close(back(output), expected[own], rtol=tolerance, atol=tolerance)
        # Half precision may round an argument of ReLU to the other side of 0.
        dy = torch.where(expected.detach().abs() < 0.02, 0, dy) if fuse_relu else dy
        expected.backward(dy.double())
        output.backward(laid_out(dy[own]))
        largest = wide_x.grad.abs().max().item()
        torch.testing.assert_close(back(own_x.grad), wide_x.grad[own], rtol=tolerance, atol=tolerance * largest)
        if own_z is not None:
            torch.testing.assert_close(back(own_z.grad), wide_z.grad[own], rtol=tolerance, atol=tolerance)
    for ours_of, theirs in zip(ours.parameters(), joined.parameters(), strict=True):
        total = ours_of.grad.clone()
        dist.all_reduce(total)
        assert total.dtype == ours_of.dtype
        scale = theirs.grad.abs().max().item()
        torch.testing.assert_close(total.double(), theirs.grad, rtol=tolerance, atol=tolerance * scale)
    for ours_of, theirs in zip(ours.buffers(), joined.buffers(), strict=True):
        torch.testing.assert_close(ours_of, theirs, rtol=1e-5, atol=1e-5, check_dtype=False)
    assert_same_everywhere(list(ours.buffers()))
    ours.eval()
    joined.eval()
    if ours.track_running_stats:
        probe = made(2, 99, dtype=dtype)
        after = joined(probe.double())
        after = after.relu() if fuse_relu else after
        torch.testing.assert_close(back(ours(laid_out(probe))), after, rtol=tolerance, atol=tolerance)


def case(rows: Sequence[int] = (4, 4), **arguments: object) -> Check:
    return lambda rank: compare(rank, rows, **arguments)


def an_empty_batch_everywhere(rank: int) -> None:
    norm = SyncBatchNorm(CHANNELS)
    x = made(0, 0, dtype=torch.float32).requires_grad_()
    norm(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not norm.weight.grad.any()
    assert torch.equal(norm.running_mean, torch.zeros(CHANNELS))
    assert torch.equal(norm.running_var, torch.ones(CHANNELS))


def one_value_in_each(rank: int) -> None:
    x = torch.tensor([[1.0], [4.0]]).double()
    joined, norm = nn.BatchNorm1d(1).double(), SyncBatchNorm(1).double()
    torch.testing.assert_close(norm(x[rank : rank + 1]), joined(x)[rank : rank + 1])
    torch.testing.assert_close(norm.running_var, joined.running_var)
    alone = SyncBatchNorm(1, process_group=create_syncbn_process_group(1)).double()
    with pytest.raises(ValueError, match="more than one value per channel"):
        alone(x[:1])


def statistics_far_from_zero(rank: int) -> None:
    """Squares of large numbers must not drown a small variance."""
    x = 1000 + torch.randn(64, 2, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).float() / 10
    norm = SyncBatchNorm(2, momentum=1.0)
    norm(x)
    everything = torch.cat(everywhere(x)).double()
    torch.testing.assert_close(norm.running_var.double(), everything.var(0), rtol=1e-4, atol=0)


def one_exchange_each_way(rank: int) -> None:
    norm = SyncBatchNorm(CHANNELS)
    x = made(2, rank, dtype=torch.float32).requires_grad_()
    with counted() as exchanges:
        output = norm(x)
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (1, 0)
        output.sum().backward()
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (1, 1)
        norm(x.detach()).sum().backward()  # the input needs no gradient: its own sums are all that is needed
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (2, 1)
        norm.eval()(x).sum().backward()
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (2, 1)


def groups(rank: int) -> None:
    assert create_syncbn_process_group(0) is None
    alone, both = create_syncbn_process_group(1), create_syncbn_process_group(2)
    assert (dist.get_world_size(alone), dist.get_world_size(both)) == (1, 2)
    for size in (-1, 3, 4):
        with pytest.raises(ValueError, match=f"group_size={size} must be 0 or divide the number of processes, 2"):
            create_syncbn_process_group(size)
    x = made(3, rank)
    joined = torch.cat(everywhere(x))
    by_itself = SyncBatchNorm(CHANNELS, process_group=alone).double()(x)
    torch.testing.assert_close(by_itself, functional.batch_norm(x, None, None, training=True))
    norm = SyncBatchNorm(CHANNELS, process_group=both).double()
    together = copy.deepcopy(nn.Sequential(norm))(x)
    assert norm.num_batches_tracked == 0
    expected = functional.batch_norm(joined, None, None, training=True)
    torch.testing.assert_close(together, expected[3 * rank : 3 * rank + 3])
    first = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="process_group does not contain this process, rank 1"):
            SyncBatchNorm(CHANNELS, process_group=first)(x.float())


def a_function_in_a_group_of_one(rank: int) -> None:
    """The function exchanges even in a group of one, with the same result."""
    alone = create_syncbn_process_group(1)
    x, weight, bias = made(3, rank).requires_grad_(), torch.rand(CHANNELS).double(), torch.rand(CHANNELS).double()
    output = SyncBatchnormFunction.apply(x, None, weight, bias, None, None, 1e-5, True, 0.1, alone)
    expected = functional.batch_norm(x, None, None, weight, bias, training=True)
    torch.testing.assert_close(output, expected)
    dy = made(3, 7)
    torch.testing.assert_close(*(torch.autograd.grad(each, x, dy)[0] for each in (output, expected)))


def statistics_that_are_given(rank: int) -> None:
    """The function of upstream's Python-only module takes statistics, with batches of different sizes."""
    rows = (3, 1)
    own = slice(0, 3) if rank == 0 else slice(3, 4)
    joined, dy = made(4, 0).requires_grad_(), made(4, 1)
    weight = torch.rand(CHANNELS).double().requires_grad_()
    bias = torch.rand(CHANNELS).double().requires_grad_()
    functional.batch_norm(joined, None, None, weight, bias, training=True).backward(dy)
    wanted = weight.grad, bias.grad
    weight.grad = bias.grad = None
    x = joined.detach()[own].clone().requires_grad_()
    variance, mean = torch.var_mean(joined.detach(), (0, 2, 3), correction=0)
    GivenStatistics.apply(x, weight, bias, mean, variance, 1e-5, None, len(rows)).backward(dy[own])
    torch.testing.assert_close(x.grad, joined.grad[own])
    for parameter, expected in zip((weight, bias), wanted, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected)
    module = sync_batchnorm.SyncBatchNorm(CHANNELS).double()
    torch.testing.assert_close(module(x), functional.batch_norm(joined, None, None, training=True)[own])


def two_derivatives_are_an_error(rank: int) -> None:
    x = made(2, rank).requires_grad_()
    output = SyncBatchNorm(CHANNELS).double()(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def autocast_and_checkpoints(rank: int) -> None:
    norm = SyncBatchNorm(CHANNELS)
    x = made(2, rank, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.bfloat16
    gradients = []
    for wrapped in (norm, lambda values: checkpoint(norm, values, use_reentrant=False)):
        own = x.clone().requires_grad_()
        wrapped(own).pow(3).sum().backward()
        gradients.append(own.grad)
    assert torch.equal(*gradients)


def compiled(rank: int) -> None:
    norm, same = SyncBatchNorm(CHANNELS), SyncBatchNorm(CHANNELS)
    outputs, gradients = [], []
    for called in (torch.compile(norm, backend="aot_eager"), same):
        x = made(2, rank, dtype=torch.float32).requires_grad_()
        outputs.append(called(x))
        outputs[-1].pow(3).sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(norm.running_var, same.running_var)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(6))
        self.last = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x))


def training_equals_one_process(rank: int) -> None:
    """A converted model under DistributedDataParallel on halves equals the model on all of the data."""
    torch.manual_seed(1)
    whole = Net().double()
    data = torch.randn(STEPS, 8, 3, 5, 5, dtype=torch.float64)
    whole(data[0, :1].expand(2, -1, -1, -1))
    for norm in whole.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.reset_running_stats()
    half = DistributedDataParallel(convert_syncbn_model(copy.deepcopy(whole)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (whole, half)]
    for step in range(STEPS):
        for model, batch in ((whole, data[step]), (half, data[step, 4 * rank : 4 * rank + 4])):
            model.zero_grad()
            model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    theirs = whole.state_dict()
    for name, tensor in half.module.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9)


def other_inputs_are_an_error(rank: int) -> None:
    """All kinds of norms raise in both ranks at their first exchange; half precision with float32 is allowed."""
    for make in (
        SyncBatchNorm,
        lambda channels: BatchNorm2d_NHWC(channels, bn_group=2, torch_channels_last=True),
        lambda channels: GroupBatchNorm2d(channels, 2),
    ):
        with pytest.raises(RuntimeError, match="rank 0 and rank 1 differ: number of channels is 4 in rank 0 and 8 in"):
            make(8 if rank else 4)(torch.randn(2, 8 if rank else 4, 3, 3))
    norm, dtype = SyncBatchNorm(CHANNELS), torch.float64 if rank else torch.float32
    with pytest.raises(RuntimeError, match=r"dtype of statistics is torch.float32 in rank 0 and torch.float64 in rank"):
        norm.to(dtype)(made(2, rank, dtype=dtype))
    SyncBatchNorm(CHANNELS)(made(2, rank, dtype=torch.float16 if rank else torch.float32))


CHECKS: dict[str, Check] = {
    "float64": case(dtype=torch.float64),
    "float32": case(),
    "different_sizes": case((5, 1)),
    "an_empty_batch": case((0, 3)),
    "an_empty_batch_of_the_last_rank": case((3, 0), channel_last=True, fuse_relu=True, has_z=True),
    "channels_last_memory": case((2, 3), memory_format=torch.channels_last),
    "channel_last": case((2, 3), channel_last=True),
    "channel_last_relu": case((2, 3), channel_last=True, fuse_relu=True),
    "channel_last_addend_and_relu": case((2, 3), channel_last=True, fuse_relu=True, has_z=True),
    "addend_and_relu": case((2, 3), fuse_relu=True, has_z=True),
    "addend": case((2, 3), has_z=True),
    "half_float16": case((2, 3), dtype=torch.float16, fuse_relu=True),
    "half_bfloat16": case((2, 3), dtype=torch.bfloat16, channel_last=True, has_z=True),
    "equal_shares": case((2, 3), momentum=None),
    "no_parameters": case((2, 3), affine=False),
    "nothing_tracked": case((2, 3), track_running_stats=False),
    "nothing_tracked_no_parameters": case((2, 3), track_running_stats=False, affine=False),
    **{
        check.__name__: check
        for check in (
            an_empty_batch_everywhere,
            one_value_in_each,
            statistics_far_from_zero,
            one_exchange_each_way,
            groups,
            a_function_in_a_group_of_one,
            statistics_that_are_given,
            two_derivatives_are_an_error,
            autocast_and_checkpoints,
            compiled,
            training_equals_one_process,
            other_inputs_are_an_error,
        )
    },
}
