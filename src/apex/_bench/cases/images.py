"""Norms and convolutions of images at the sizes of ResNet-50 and of diffusion models, forward and backward separately.

The families are batch norm with ReLU, with and without an addend; group norm with SiLU; convolution with bias and ReLU;
and SyncBatchNorm in a group of one process, which still exchanges its statistics. PyTorch's SyncBatchNorm module skips
the exchange if there is one process, so its autograd function is called. That needs a GPU; on a CPU the peer is
PyTorch's batch norm, which exchanges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ...contrib.conv_bias_relu import ConvBiasReLU
from ...ops.batch_norm import batch_norm
from ...parallel.optimized_sync_batchnorm_kernel import SyncBatchnormFunction
from ..directions import Random, compared, exact, long_name, passes, prepare, times, with_peers, without_kink
from ..registry import Case, Family, Prepared, register

Shape = tuple[int, ...]
EPS, MOMENTUM, GROUPS = 1e-5, 0.1, 32
LAYOUTS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def _square(*shapes: tuple[int, int, int]) -> tuple[Shape, ...]:
    """Return image shapes from (images, channels, height), with the width equal to the height."""
    return tuple((*shape, shape[-1]) for shape in shapes)


CPU_SHAPES = _square((8, 64, 56), (8, 256, 28))
BATCH_NORM_SHAPES = _square((32, 256, 56), (32, 512, 28), (32, 2048, 7))
SYNC_SHAPES = _square((64, 64, 112), (64, 256, 56), (64, 512, 28), (64, 1024, 14), (32, 2048, 7))
# images, channels in and out, side of an image, side of the kernel
CONV_SHAPES = ((32, 64, 256, 56, 1), (32, 128, 128, 28, 3), (32, 512, 2048, 7, 1))


def _tensors(dtype: torch.dtype, shape: Shape, layout: torch.memory_format, random: Random, count: int) -> list[Tensor]:
    return [random.normal(*shape, dtype=dtype, layout=layout) for _ in range(count)]


def _pixels(shape: Shape) -> int:
    return math.prod(shape) // shape[1]


def _batch_norm_torch(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    output = functional.batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS)
    return functional.relu(output if z is None else output + z)


def _batch_norm_ours(x: Tensor, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    return batch_norm(x, mean, var, weight, bias, True, MOMENTUM, EPS, z=z, relu=True)


def _batch_norm(dtype: torch.dtype, shape: Shape, addend: bool, direction: str, device: torch.device) -> Prepared:
    random, channels = Random(device), shape[1]
    x, z, gradient = _tensors(dtype, shape, torch.channels_last, random, 3)
    weight, bias = random.weight(channels), random.weight(channels)
    before = functional.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    without_kink(gradient, before + z if addend else before)
    leaves = [each.requires_grad_() for each in (x, z, weight, bias)]
    arguments: list[Any] = [*leaves, weight.new_zeros(channels), weight.new_ones(channels)]
    if not addend:
        arguments[1] = None
    terms = (1, *([1] * (1 + addend)), _pixels(shape), _pixels(shape))
    return compared(_batch_norm_ours, _batch_norm_torch, arguments, gradient, direction, terms)


def batch_norm_cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return every shape with and without an addend, in both directions."""
    on_gpu = device.type == "cuda"
    shapes, dtype = (BATCH_NORM_SHAPES, torch.float16) if on_gpu else (CPU_SHAPES, torch.float32)
    cases = []
    for shape in shapes[:1] if quick else shapes:
        size = math.prod(shape) * dtype.itemsize
        for addend, what, fwd, bwd in ((False, "batch_norm+relu", 2, 3), (True, "batch_norm+add+relu", 3, 5)):
            name = f"{what} {long_name(dtype)} {times(shape)}"
            cases += passes(name, {"fwd": fwd * size, "bwd": bwd * size}, _batch_norm, dtype, shape, addend)
    return cases


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
    x, gradient = _tensors(dtype, shape, LAYOUTS[layout], random, 2)
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


def _conv(dtype: torch.dtype, shape: Shape, direction: str, device: torch.device) -> Prepared:
    images, channels, outputs, side, kernel = shape
    padding, summands, pixels = kernel // 2, channels * kernel * kernel, images * side * side
    random = Random(device)
    x, gradient = random.normal(images, channels, side, side), random.normal(images, outputs, side, side)
    weight = random.normal(outputs, channels, kernel, kernel) / summands**0.5
    x, gradient, weight = (each.to(dtype).to(memory_format=torch.channels_last) for each in (x, gradient, weight))
    leaves = [each.requires_grad_() for each in (x, weight, random.normal(outputs, dtype=dtype))]
    x, weight, bias = (each.detach().double() for each in leaves)
    without_kink(gradient, functional.conv2d(x, weight, bias, 1, padding))
    terms = (summands, outputs * kernel * kernel, pixels, pixels)
    ours = lambda x, weight, bias: ConvBiasReLU(x, weight, bias, padding, 1)  # noqa: E731
    eager = lambda x, weight, bias: functional.relu(functional.conv2d(x, weight, bias, 1, padding))  # noqa: E731
    return compared(ours, eager, leaves, gradient, direction, terms)


def conv_cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return every shape in both directions."""
    shapes, dtype = (CONV_SHAPES, torch.float16) if device.type == "cuda" else (((8, 32, 64, 28, 3),), torch.float32)
    note = "bytes are those that must move; the products may take longer"
    cases = []
    for shape in shapes[:1] if quick else shapes:
        images, channels, outputs, side, kernel = shape
        moved = (images * (channels + outputs) * side * side + outputs * channels * kernel * kernel) * dtype.itemsize
        sizes = f"{images}x{channels}x{side}x{side} to {outputs}, kernel {kernel}"
        name = f"conv+bias+relu {long_name(dtype)} {sizes}"
        cases += passes(name, {"fwd": moved, "bwd": 2 * moved}, _conv, dtype, shape, note=note)
    return cases


register(Family("batch_norm", "batch norm with an addend and ReLU, channels last", batch_norm_cases))
register(Family("conv", "convolution + bias + ReLU, channels last", conv_cases))
register(
    Family(
        "sync_batch_norm",
        "SyncBatchNorm in a group of one process that exchanges its statistics",
        sync_batch_norm_cases,
    )
)
