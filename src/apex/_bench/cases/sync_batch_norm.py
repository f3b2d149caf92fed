"""SyncBatchNorm at the sizes of a ResNet-50, in a group of one process that exchanges its statistics all the same.

PyTorch's module leaves the exchange out where there is one process, so its autograd function is called. That needs a
GPU; on a CPU its place is taken by the same steps written with PyTorch's operators. `benchmarks/sync_batch_norm.py`
measures several processes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from ..directions import Random, case, exact, long_name, prepare, with_peers
from ..registry import Case, Family, Prepared, register

EPS, MOMENTUM = 1e-5, 0.1
# images, channels, side of an image
GPU_SHAPES = ((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (32, 2048, 7))
CPU_SHAPES = ((8, 64, 56), (8, 256, 28))
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
# Tensors of the input's size that are read or written at least once.
TENSORS_MOVED = {"fwd": 2, "bwd": 3}


class Connection:
    """This process, connected with itself; disconnected again when nothing refers to this object any more."""

    def __init__(self) -> None:
        self._connected = False

    def group(self, device: torch.device) -> dist.ProcessGroup:
        """The group of this process alone."""
        if not self._connected and not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            self._connected = True
            weakref.finalize(self, dist.destroy_process_group)
        assert dist.group.WORLD is not None  # connected
        return dist.group.WORLD


class ByHand(torch.autograd.Function):
    """The steps of PyTorch's SyncBatchNorm, one operator after the other."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, running_mean, running_var, group):  # type: ignore[override]
        dimensions, spread = (0, 2, 3), (1, -1, 1, 1)
        mean = x.mean(dimensions)
        variance = (x - mean.view(spread)).square().mean(dimensions)  # 15 times as fast as torch.var_mean on a CPU
        count = x.numel() // x.shape[1]
        rank_stats = torch.cat((mean, variance, mean.new_full((1,), count)))
        gathered = [torch.empty_like(rank_stats) for _ in range(group.size())]
        dist.all_gather(gathered, rank_stats, group=group)
        means, variances, counts = torch.stack(gathered).split((x.shape[1], x.shape[1], 1), 1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean).square()) * counts).sum(0) / total
        running_mean.lerp_(mean, MOMENTUM)
        running_var.lerp_(variance * (total / (total - 1)), MOMENTUM)
        inverse = (variance + EPS).rsqrt()
        ctx.save_for_backward(x, mean, inverse, weight, total)
        ctx.group = group
        return (x - mean.view(spread)) * (inverse * weight).view(spread) + bias.view(spread)

    @staticmethod
    def backward(ctx: Any, dy):  # type: ignore[override]
        x, mean, inverse, weight, total = ctx.saved_tensors
        dimensions, spread = (0, 2, 3), (1, -1, 1, 1)
        normalised = (x - mean.view(spread)) * inverse.view(spread)
        dbias, dweight = dy.sum(dimensions), (dy * normalised).sum(dimensions)
        sums = torch.cat((dbias, dweight))
        dist.all_reduce(sums, group=ctx.group)
        mean_dy, mean_dy_xhat = (sums / total).chunk(2)
        dx = dy - mean_dy.view(spread) - normalised * mean_dy_xhat.view(spread)
        return dx * (inverse * weight).view(spread), dweight, dbias, None, None, None


def _ours(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, group: dist.ProcessGroup) -> Tensor:
    return SyncBatchnormFunction.apply(x, None, weight, bias, mean, variance, EPS, True, MOMENTUM, group)


def _torchs(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, group: dist.ProcessGroup
) -> Tensor:
    from torch.nn.modules._functions import SyncBatchNorm

    return SyncBatchNorm.apply(x, weight, bias, mean, variance, EPS, MOMENTUM, group, group.size())


def _exact(x: Tensor, weight: Tensor, bias: Tensor, *running_and_group: Any) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def _prepare(
    connection: Connection,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    layout: str,
    direction: str,
    device: torch.device,
) -> Prepared:
    images, channels, side = shape
    random = Random(device)
    x, gradient = (random.normal(images, channels, side, side, dtype=dtype, layout=LAYOUTS[layout]) for _ in range(2))
    leaves = [each.requires_grad_() for each in (x, random.weight(channels), random.weight(channels))]
    running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    arguments = (*leaves, *running, connection.group(device))
    pixels = images * side * side
    expected = exact(_exact, arguments, gradient, direction, dtype, (1, 1, pixels, pixels))
    makers = with_peers(_ours, _torchs if device.type == "cuda" else ByHand.apply, device, compile=False)
    return prepare(makers, arguments, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both layouts and both directions."""
    if not dist.is_available():
        return []
    on_gpu = device.type == "cuda"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    connection = Connection()
    found = []
    for dtype in (torch.float16, torch.float32) if on_gpu else (torch.float32,):
        for shape in shapes[:1] if quick else shapes:
            images, channels, side = shape
            size = images * channels * side * side * dtype.itemsize
            for layout in LAYOUTS:
                name = f"sync_batch_norm {long_name(dtype)} {layout} {images}x{channels}x{side}x{side}"
                for way, tensors in TENSORS_MOVED.items():
                    found.append(case(name, tensors * size, _prepare, connection, dtype, shape, layout, direction=way))
    return found


register(Family("sync_batch_norm", "SyncBatchNorm in a group of one process that exchanges its statistics", cases))
