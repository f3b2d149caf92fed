"""SyncBatchNorm at the sizes of a ResNet-50, in a group of one process that exchanges its statistics all the same.

PyTorch's module leaves the exchange out where there is one process, so its autograd function is called. That needs a
GPU; on a CPU the peer is its batch norm, which exchanges nothing. `benchmarks/sync_batch_norm.py` measures several
processes.
"""

from __future__ import annotations

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


def _group(device: torch.device) -> dist.ProcessGroup:
    """This process, connected with itself for as long as it runs."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _ours(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, group: dist.ProcessGroup) -> Tensor:
    return SyncBatchnormFunction.apply(x, None, weight, bias, mean, variance, EPS, True, MOMENTUM, group)


def _torchs(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, group: dist.ProcessGroup
) -> Tensor:
    from torch.nn.modules._functions import SyncBatchNorm

    return SyncBatchNorm.apply(x, weight, bias, mean, variance, EPS, MOMENTUM, group, group.size())


def _local(x: Tensor, weight: Tensor, bias: Tensor, *running_and_group: Any) -> Tensor:
    return functional.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)


def _prepare(
    dtype: torch.dtype, shape: tuple[int, int, int], layout: str, direction: str, device: torch.device
) -> Prepared:
    images, channels, side = shape
    random = Random(device)
    x, gradient = (random.normal(images, channels, side, side, dtype=dtype, layout=LAYOUTS[layout]) for _ in range(2))
    leaves = [each.requires_grad_() for each in (x, random.weight(channels), random.weight(channels))]
    running = torch.zeros(channels, device=device), torch.ones(channels, device=device)
    arguments = (*leaves, *running, _group(device))
    pixels = images * side * side
    expected = exact(_local, arguments, gradient, direction, dtype, (1, 1, pixels, pixels))
    makers = with_peers(_ours, _torchs if device.type == "cuda" else _local, device, compile=False)
    return prepare(makers, arguments, gradient, direction, expected)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Every shape in both layouts and both directions."""
    if not dist.is_available():
        return []
    on_gpu = device.type == "cuda"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    found = []
    for dtype in (torch.float16, torch.float32) if on_gpu else (torch.float32,):
        for shape in shapes[:1] if quick else shapes:
            images, channels, side = shape
            size = images * channels * side * side * dtype.itemsize
            for layout in LAYOUTS:
                name = f"sync_batch_norm {long_name(dtype)} {layout} {images}x{channels}x{side}x{side}"
                for way, tensors in TENSORS_MOVED.items():
                    found.append(case(name, tensors * size, _prepare, dtype, shape, layout, direction=way))
    return found


register(Family("sync_batch_norm", "SyncBatchNorm in a group of one process that exchanges its statistics", cases))
