"""Norms over groups of two and four processes, against batch norm over the joined batch of each group."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.groupbn.batch_norm import bn_addrelu_NHWC_impl, bn_NHWC_impl
from apex.parallel import DistributedDataParallel
from tests.parallel.exchanges import GATHERED, SUMMED, counted
from tests.parallel.processes import Check, assert_same_everywhere

CHANNELS = 5
STEPS = 3
TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def made(rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return an input [rows, C, 3, 2], far from zero."""
    generator = torch.Generator().manual_seed(seed)
    return (3 + 2 * torch.randn(rows, CHANNELS, 3, 2, generator=generator, dtype=torch.float64)).to(dtype)


class Group:
    """The joined batches of this process's group, and the rows that are this process's."""

    def __init__(self, rank: int, size: int, rows: Sequence[int]) -> None:
        first = rank // size * size
        self.size, self.number = size, first // size
        self.rows = [rows[each % len(rows)] for each in range(first, first + size)]
        begin = sum(self.rows[: rank - first])
        self.own = slice(begin, begin + self.rows[rank - first])

    def joined(self, step: int, part: int, dtype: torch.dtype) -> Tensor:
        return made(sum(self.rows), 100 * self.number + 10 * step + part, dtype)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest = expected.abs().max().item() if expected.numel() else 1.0
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * max(1.0, largest))


def compare(
    rank: int,
    make: Callable[[int], nn.Module],
    size: int,
    rows: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    last: bool = False,
    relu: bool = False,
    addend: bool = False,
    inverse_name: str = "minibatch_riv",
    **options: object,
) -> None:
    size = size or dist.get_world_size()
    group = Group(rank, size, rows)
    ours = make(size)
    joined = nn.BatchNorm2d(CHANNELS, dtype=torch.float64, **options)
    if joined.affine:
        nn.init.normal_(ours.weight)
        nn.init.normal_(ours.bias)
    joined.load_state_dict(ours.state_dict())
    ours = ours.double() if dtype == torch.float64 else ours

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).contiguous() if last else tensor.clone()

    def back(tensor: Tensor) -> Tensor:
        return tensor.movedim(-1, 1) if last else tensor

    for step in range(STEPS):
        x, z, dy = (group.joined(step, part, dtype) for part in range(3))
        z = z / 4
        wide_x, wide_z = (each.to(torch.float64, copy=True).requires_grad_() for each in (x, z))
        expected = joined(wide_x) + wide_z if addend else joined(wide_x)
        expected = expected.relu() if relu else expected
        own_x, own_z = (laid_out(each[group.own]).requires_grad_() for each in (x, z))
        output = ours(own_x, own_z) if addend else ours(own_x)
        assert output.dtype == dtype
        close(back(output), expected[group.own], dtype)
        # Half precision may round an argument of ReLU to the other side of 0.
        dy = torch.where(expected.detach().abs() < 0.02, 0, dy) if relu else dy
        expected.backward(dy.double())
        output.backward(laid_out(dy[group.own]))
        close(back(own_x.grad), wide_x.grad[group.own], dtype)
        if addend:
            close(back(own_z.grad), wide_z.grad[group.own], dtype)
        variance, mean = torch.var_mean(wide_x.detach(), (0, 2, 3), correction=0)
        close(ours.minibatch_mean, mean, torch.float32)
        close(getattr(ours, inverse_name), (variance + 1e-5).rsqrt(), torch.float32)
    for actual, right in zip(ours.parameters(), joined.parameters(), strict=True):
        close(actual.grad, right.grad / size, dtype)
    if ours.track_running_stats:
        close(ours.running_mean, joined.running_mean, torch.float32)
        close(ours.running_var, joined.running_var, torch.float32)
        probe = made(2, 99, dtype)
        after = joined.eval()(probe.double()) + (probe / 4).double() if addend else joined.eval()(probe.double())
        given = (laid_out(probe), laid_out(probe / 4)) if addend else (laid_out(probe),)
        close(back(ours.eval()(*given)), after.relu() if relu else after, dtype)


def nhwc(size: int = 0, rows: Sequence[int] = (4,), **options: object) -> Check:
    """BatchNorm2d_NHWC over groups of `size` processes, or over all of them."""
    relu = bool(options.get("relu", False))
    last = bool(options.setdefault("last", True))
    return lambda rank: compare(
        rank,
        lambda size: BatchNorm2d_NHWC(CHANNELS, fuse_relu=relu, bn_group=size, torch_channels_last=not last),
        size,
        rows,
        **options,
    )


def grouped(size: int = 0, rows: Sequence[int] = (4,), dtype: torch.dtype = torch.float32, **options: object) -> Check:
    """GroupBatchNorm2d over groups of `size` processes, or over all of them."""
    return lambda rank: compare(
        rank,
        lambda size: GroupBatchNorm2d(CHANNELS, size, **options),
        size,
        rows,
        dtype=dtype,
        inverse_name="minibatch_inv_var",
        **options,
    )


class Compiled:
    """One step of a group by functions without autograd: their arguments and the expected results."""

    def __init__(self, rank: int, addend: bool, relu: bool) -> None:
        self.size = dist.get_world_size()
        group = Group(rank, self.size, (3, 1))
        x, z, dy = (group.joined(0, part, torch.float32) for part in range(3))
        leaves = [each.double().requires_grad_() for each in (x, z / 4, *(torch.rand(2, CHANNELS) + 0.5))]
        joined = nn.BatchNorm2d(CHANNELS, affine=False, dtype=torch.float64)
        scale, bias = (each[:, None, None] for each in leaves[2:])
        output = joined(leaves[0]) * scale + bias
        output = output + leaves[1] if addend else output
        output = output.relu() if relu else output
        dy = torch.where(output.detach().abs() < 1e-3, 0, dy)
        output.backward(dy.double())
        own = group.own
        self.x, self.z, self.dy = x[own], z[own] / 4, dy[own]
        self.scale, self.bias = (each.detach().float() for each in leaves[2:])
        self.state = [torch.full((CHANNELS,), value) for value in (0.0, 1.0, 9.0, 9.0)]
        self.output, self.dx = output[own], leaves[0].grad[own]
        self.dz = leaves[1].grad[own] if addend else None
        self.dscale, self.dbias = (each.grad / self.size for each in leaves[2:])
        variance, mean = torch.var_mean(leaves[0].detach(), (0, 2, 3), correction=0)
        self.after = (joined.running_mean, joined.running_var, mean, (variance + 1e-5).rsqrt())

    def check(self, output: Tensor, gradients: Sequence[Tensor]) -> None:
        right = [self.output, self.dx, *([self.dz] if len(gradients) == 4 else []), self.dscale, self.dbias]
        for actual, expected in zip([output, *gradients], right, strict=True):
            close(actual, expected, torch.float32)
        for actual, expected in zip(self.state, self.after, strict=True):
            close(actual, expected, torch.float32)


def functions_of_groupbn(rank: int) -> None:
    for addend in (False, True):
        case = Compiled(rank, addend, relu=True)
        images = [each.movedim(1, -1).requires_grad_() for each in ((case.x, case.z) if addend else (case.x,))]
        parameters = [case.scale.requires_grad_(), case.bias.requires_grad_()]
        magic = torch.zeros(1, dtype=torch.int32)
        rest = (case.size, None, None, magic, None, None, 2, 10, 2, 10, False)
        common = (*images, *parameters, *case.state)
        if addend:
            output = bn_addrelu_NHWC_impl.apply(*common, 1, None, 0.1, 1e-5, True, *rest)
        else:
            output = bn_NHWC_impl.apply(*common, None, 0.1, 1e-5, True, True, *rest)
        found = torch.autograd.grad(output, [*images, *parameters], case.dy.movedim(1, -1))
        case.check(output.movedim(-1, 1), [each.movedim(-1, 1) if each.dim() == 4 else each for each in found])


def compiled_name_bnp(rank: int) -> None:
    import bnp

    for addend in (False, True):
        case = Compiled(rank, addend, relu=True)
        x, z, dy = (each.movedim(1, -1).contiguous() for each in (case.x, case.z, case.dy))
        pointers = [bnp.get_remote_data_ptr(x, 0) for _ in range(3)]
        tail = (bnp.get_data_ptr(x), *pointers, case.size, torch.tensor([2], dtype=torch.int32), 2, 100, False)
        common = (case.scale, case.bias, *case.state)
        scratch = torch.zeros(8192, dtype=torch.uint8)
        if addend:
            bitmask = torch.zeros((x.numel() + 31) // 32 * 2, dtype=torch.int32)
            output = bnp.bn_addrelu_fwd_nhwc(x, z, *common, bitmask, scratch, 0.1, 1e-5, *tail)
            gradients = bnp.bn_addrelu_bwd_nhwc(x, dy, *common, bitmask, scratch, 0.1, 1e-5, *tail)
        else:
            output = bnp.bn_fwd_nhwc(x, *common, scratch, 0.1, 1e-5, True, *tail)
            gradients = bnp.bn_bwd_nhwc(x, dy, *common, scratch, 0.1, 1e-5, True, *tail)
        found = [each.movedim(-1, 1) if each.dim() == 4 else each for each in gradients]
        case.check(output.movedim(-1, 1), found)


def compiled_name_cudnn_gbn_lib(rank: int) -> None:
    import cudnn_gbn_lib

    case = Compiled(rank, addend=False, relu=False)
    place = (case.size, rank, [0] * case.size)
    output = cudnn_gbn_lib.forward(case.x, case.scale, case.bias, *case.state, 0.1, 1e-5, *place)
    gradients = cudnn_gbn_lib.backward(case.x, case.dy, case.scale, *case.state[2:], 1e-5, *place)
    case.check(output, gradients)


def sizes_that_do_not_fit(rank: int) -> None:
    processes = dist.get_world_size()
    for size in (3, 2 * processes):
        for make in (lambda size: BatchNorm2d_NHWC(CHANNELS, bn_group=size), lambda size: GroupBatchNorm2d(8, size)):
            with pytest.raises(ValueError, match=f"={size} must divide the number of processes, {processes}"):
                make(size)
    norm = GroupBatchNorm2d(CHANNELS, processes)
    with pytest.raises(ValueError, match="weight has shape"):
        norm(torch.zeros(2, CHANNELS + 1, 3, 3))
    assert (norm.group_id, norm.group_rank) == (0, rank)
    assert norm.get_peer_buffers(8) == [0] * processes


def one_group_for_all_norms_of_a_size(rank: int) -> None:
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made_groups:
        for _ in range(3):
            BatchNorm2d_NHWC(CHANNELS, bn_group=2)
            GroupBatchNorm2d(CHANNELS, 2)
            BatchNorm2d_NHWC(CHANNELS, bn_group=dist.get_world_size())
    processes = dist.get_world_size()
    assert made_groups.call_count in (0, processes // 2 if processes > 2 else 0)


def one_exchange_each_way(rank: int) -> None:
    norm = BatchNorm2d_NHWC(CHANNELS, fuse_relu=True, bn_group=2)
    x, z = (made(2, rank, torch.float32).movedim(1, -1).requires_grad_() for _ in range(2))
    with counted() as exchanges:
        output = norm(x, z)
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (1, 0)
        output.sum().backward()
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (1, 1)
        norm.eval()(x, z).sum().backward()
        # Not even by statistics of the batch: one process may evaluate by itself.
        untracked = GroupBatchNorm2d(CHANNELS, dist.get_world_size(), track_running_stats=False).eval()
        own = made(2, rank, torch.float32)
        close(untracked(own), nn.functional.batch_norm(own.double(), None, None, training=True), torch.float32)
        assert (exchanges[GATHERED], exchanges[SUMMED]) == (1, 1)


def copies(rank: int) -> None:
    """Copied and saved norms find their group again."""
    norm = GroupBatchNorm2d(CHANNELS, 2)
    x = made(2, rank, torch.float32)
    expected = norm(x)
    file = io.BytesIO()
    torch.save(norm, file)
    file.seek(0)
    for other in (copy.deepcopy(norm), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), expected)


def autocast(rank: int) -> None:
    norm = GroupBatchNorm2d(CHANNELS, 2)
    x = made(2, rank, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert norm(x).dtype == torch.bfloat16


def training_is_that_of_one_process(rank: int) -> None:
    """Averaged by DistributedDataParallel, gradients equal those of all of the data."""
    processes = dist.get_world_size()
    whole = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)).double()
    part = copy.deepcopy(whole)
    part[1] = GroupBatchNorm2d(4, processes).double()
    part[1].load_state_dict(whole[1].state_dict())
    part = DistributedDataParallel(part)
    data = torch.randn(STEPS, 2 * processes, 3, 5, 5, dtype=torch.float64)
    for step in range(STEPS):
        for model, batch in ((whole, data[step]), (part, data[step, 2 * rank : 2 * rank + 2])):
            model.zero_grad()
            model(batch).square().mean().backward()
            with torch.no_grad():  # by hand: the first step of an optimizer imports torch._dynamo, for seconds
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
    theirs = whole.state_dict()
    for name, tensor in part.module.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-9)
    assert_same_everywhere(list(part.module.parameters()))


# A size of 0 stands for all processes. Rows are those of the processes in turn.
CHECKS: dict[str, Check] = {
    "nhwc_float64": nhwc(dtype=torch.float64),
    "nhwc_pairs": nhwc(2, (3, 1, 2, 4)),
    "nhwc_relu": nhwc(rows=(2, 3), relu=True),
    "nhwc_addend_and_relu": nhwc(rows=(2, 3), relu=True, addend=True),
    "nhwc_addend_and_relu_pairs": nhwc(2, (2, 3), relu=True, addend=True, last=False),
    "nhwc_an_empty_batch": nhwc(rows=(0, 3), relu=True, addend=True),
    "nhwc_float16": nhwc(rows=(2, 3), relu=True, addend=True, dtype=torch.float16),
    "nhwc_alone": nhwc(1, relu=True, addend=True),
    "grouped": grouped(),
    "grouped_pairs": grouped(2, (3, 1, 2, 4)),
    "grouped_alone": grouped(1),
    "grouped_bfloat16": grouped(rows=(2, 3), dtype=torch.bfloat16),
    "grouped_equal_shares": grouped(rows=(2, 3), momentum=None),
    "grouped_no_parameters": grouped(rows=(2, 3), affine=False),
    "grouped_nothing_tracked": grouped(rows=(2, 3), track_running_stats=False),
    **{
        check.__name__: check
        for check in (
            functions_of_groupbn,
            compiled_name_bnp,
            compiled_name_cudnn_gbn_lib,
            sizes_that_do_not_fit,
            one_group_for_all_norms_of_a_size,
            one_exchange_each_way,
            copies,
            autocast,
            training_is_that_of_one_process,
        )
    },
}
