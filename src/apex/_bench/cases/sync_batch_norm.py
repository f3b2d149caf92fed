"""SyncBatchNorm in a group of one process, which still exchanges its statistics, at the sizes of ResNet-50.

PyTorch's SyncBatchNorm module skips the exchange if there is one process, so its autograd function is called. That
needs a GPU; on a CPU the peer is PyTorch's batch norm, which exchanges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from ..directions import Random, exact, long_name, passes, prepare, times, with_peers
from ..registry import Case, Family, Prepared, register

Shape = tuple[int, ...]
EPS, MOMENTUM = 1e-5, 0.1
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def _square(*shapes: tuple[int, int, int]) -> tuple[Shape, ...]:
    """Return image shapes from (images, channels, height), with the width equal to the height."""
    return tuple((*shape, shape[-1]) for shape in shapes)


CPU_SHAPES = _square((8, 64, 56), (8, 256, 28))
SYNC_SHAPES = _square((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (32, 2048, 7))


def _pixels(shape: Shape) -> int:
    return math.prod(shape) // shape[1]


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
    random, channels = Random(device), shape[1]
    x, gradient = (random.normal(*shape, dtype=dtype, layout=LAYOUTS[layout]) for _ in range(2))
    leaves = [each.requires_grad_() for each in (x, random.weight(channels), random.weight(channels))]
    running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    arguments = (*leaves, *running, _group(device))
    expected = exact(_local, arguments, gradient, direction, dtype, (1, 1, _pixels(shape), _pixels(shape)))
    makers = with_peers(_sync_ours, _sync_torch if device.type == "cuda" else _local, device, compile=False)
    return prepare(makers, arguments, gradient, direction, expected)


def sync_batch_norm_cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return every shape in both layouts and both directions."""
    if not dist.is_available():
        return []
    on_gpu = device.type == "cuda"
    shapes = SYNC_SHAPES if on_gpu else CPU_SHAPES
    cases = []
    for dtype in (torch.float16, torch.float32) if on_gpu else (torch.float32,):
        for shape in shapes[:1] if quick else shapes:
            moved = {way: tensors * math.prod(shape) * dtype.itemsize for way, tensors in (("fwd", 2), ("bwd", 3))}
            for layout in LAYOUTS:
                name = f"sync_batch_norm {long_name(dtype)} {layout} {times(shape)}"
                cases += passes(name, moved, _sync_batch_norm, dtype, shape, layout)
    return cases


register(
    Family(
        "sync_batch_norm",
        "SyncBatchNorm in a group of one process that exchanges its statistics",
        sync_batch_norm_cases,
    )
)
