"""A block, images for it, and what the undivided block makes of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from apex.contrib.bottleneck import (
    Bottleneck,
    HaloExchangerAllGather,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
    SpatialBottleneck,
)
from apex.contrib.bottleneck.bottleneck import FrozenBatchNorm2d
from apex.contrib.peer_memory import PeerMemoryPool


class Case(NamedTuple):
    stride: int
    out_channels: int
    explicit_nhwc: bool
    channels_last: bool
    dtype: torch.dtype
    method: int


def exchangers(rank: int, size: int) -> dict:
    ranks = list(range(size))
    return {
        "all gather": HaloExchangerAllGather(ranks, rank, dist.group.WORLD),
        "send": HaloExchangerSendRecv(ranks, rank),
        "peer": HaloExchangerPeer(ranks, rank, PeerMemoryPool(4096, 1 << 20, ranks), False),
    }


def cases() -> Iterator[Case]:
    """Every method with every stride and layout in float64; the other dtypes with a part of these."""
    layouts = ((False, False), (False, True), (True, False))
    for stride, layout, method in itertools.product((1, 2, 3), layouts, (1, 2, 3)):
        yield Case(stride, 4 if stride == 1 else 6, *layout, torch.float64, method)
    for dtype, method in itertools.product((torch.float32, torch.float16, torch.bfloat16), (2, 3)):
        yield Case(2, 4, False, True, dtype, method)


def block(case: Case, spatial: tuple | None = None, device: str = "cpu") -> Bottleneck:
    """The same numbers each time."""
    generator = torch.Generator().manual_seed(0)
    module = SpatialBottleneck(
        4, 3, case.out_channels, case.stride, explicit_nhwc=case.explicit_nhwc, spatial_parallel_args=spatial
    ).to(device, case.dtype)
    with torch.no_grad():
        for weight in module.w_conv:
            weight.copy_(torch.rand(weight.shape, generator=generator) - 0.5)
        for norm in module.modules():
            if isinstance(norm, FrozenBatchNorm2d):  # with scales and biases that no dtype rounds
                for buffer, (low, high, unit) in zip(
                    norm.buffers(), ((1, 4, 0.5), (-2, 3, 0.25), (-2, 3, 0.25), (-1, 2, None)), strict=True
                ):
                    values = torch.randint(low, high, buffer.shape, generator=generator)
                    buffer.copy_(4.0**values if unit is None else values * unit)
    return module


def images(case: Case, rows: int) -> Tensor:
    x = torch.randn(2, 4, rows, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(case.dtype)
    if case.explicit_nhwc:
        return x.movedim(1, -1).contiguous()
    return x.to(memory_format=torch.channels_last) if case.channels_last else x


def trained(module: Bottleneck, x: Tensor, weights_of_loss: Tensor | None = None) -> list[Tensor]:
    """Output and gradients of x and the weights, for a loss that differs at every pixel."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = module(x)
    factor = torch.arange(y.numel(), dtype=torch.float64).sin().to(y).view(y.shape)
    y.backward(factor if weights_of_loss is None else weights_of_loss)
    return [y.detach(), x.grad, *(weight.grad for weight in module.w_conv)]


def rows_of(tensor: Tensor, case: Case, rank: int, size: int) -> Tensor:
    return tensor.chunk(size, 1 if case.explicit_nhwc else 2)[rank]
