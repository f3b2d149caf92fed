"""SyncBatchNorm in a group of one process, which still exchanges its statistics, at the sizes of ResNet-50.

PyTorch's SyncBatchNorm module skips the exchange if there is one process, so its autograd function is called. That
needs a GPU; on a CPU the peer is PyTorch's batch norm, which exchanges nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...ops._examples import Make
from ...parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from ..directions import Maker, call, long_name, times
from ..registry import OURS, Case, Expected, Family, Prepared, register

Shape = tuple[int, int, int, int]
EPS, MOMENTUM = 1e-5, 0.1
LAYOUTS = ("nchw", "nhwc")
CPU_SHAPES = ((8, 64, 56, 56), (8, 256, 28, 28))
SYNC_SHAPES = ((64, 64, 112, 112), (64, 256, 56, 56), (64, 512, 28, 28), (64, 1024, 14, 14), (32, 2048, 7, 7))
# Tensors of the image's size that a pass reads or writes.
MOVED = {"fwd": 2, "bwd": 3}


def _group(device: torch.device) -> dist.ProcessGroup:
    """Return a process group of this process alone, initialized at the first call."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _sync_ours(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, group: Any) -> Tensor:
    return SyncBatchnormFunction.apply(x, None, weight, bias, mean, var, EPS, True, MOMENTUM, group)


def _sync_torch(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, group: Any) -> Tensor:
    from torch.nn.modules._functions import SyncBatchNorm

    return SyncBatchNorm.apply(x, weight, bias, mean, var, EPS, MOMENTUM, group, group.size())


def _local(x: Tensor, weight: Tensor, bias: Tensor, *running_and_group: Any) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def _sync_batch_norm(dtype: torch.dtype, shape: Shape, layout: str, direction: str, device: torch.device) -> Prepared:
    make, channels = Make(dtype, device), shape[1]
    x, dy = (make.image(*shape, channels_last=layout == "nhwc") for _ in range(2))
    gradient = dy.detach()
    leaves = [x, *(make.weight(channels, dtype=torch.float32) for _ in range(2))]
    running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    arguments = (*leaves, *running, _group(device))
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    output = _local(*wide)
    expected = [Expected(output.detach(), dtype)]
    if direction == "bwd":
        exact = torch.autograd.grad(output, wide, gradient.double())
        terms = (1, x.numel() // channels, x.numel() // channels)
        expected = [Expected(g, leaf.dtype, count) for g, leaf, count in zip(exact, leaves, terms, strict=True)]
    peer = _sync_torch if device.type == "cuda" else _local
    makers: dict[str, Maker] = {OURS: lambda: _sync_ours, "torch": lambda: peer}
    given = (arguments, leaves, gradient, direction)
    return Prepared({name: functools.partial(call, maker, *given) for name, maker in makers.items()}, expected)


def sync_batch_norm_cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return every shape in both layouts and both directions."""
    if not dist.is_available():
        return []
    on_gpu = device.type == "cuda"
    shapes = SYNC_SHAPES if on_gpu else CPU_SHAPES
    return [
        Case(
            f"sync_batch_norm {long_name(dtype)} {layout} {times(shape)} {direction}",
            tensors * math.prod(shape) * dtype.itemsize,
            functools.partial(_sync_batch_norm, dtype, shape, layout, direction),
        )
        for dtype in ((torch.float16, torch.float32) if on_gpu else (torch.float32,))
        for shape in (shapes[:1] if quick else shapes)
        for layout in LAYOUTS
        for direction, tensors in MOVED.items()
    ]


register(
    Family(
        "sync_batch_norm",
        "SyncBatchNorm in a group of one process that exchanges its statistics",
        sync_batch_norm_cases,
    )
)
