"""From tensors to kernel launches: launch configuration, allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
Times are microseconds on an H200, of kernels launched directly.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import _device
from .spec import SoftmaxSpec

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# Values of the kernels' MASK and NOISE.
NO_MASK, CAUSAL, HIDES, ADDED = range(4)
NO_NOISE, SEED, KEEP = range(3)


@dataclass(frozen=True)
class Config:
    """`held`: a program has whole rows in registers; else it walks its one row in chunks of `block`."""

    held: bool
    rows: int
    block: int
    num_warps: int


def config(queries: int, keys: int, causal: bool, backward: bool, device: _device.DeviceFacts) -> Config:
    """How rows of `keys` elements are shared out."""
    block = max(16, 1 << max(0, keys - 1).bit_length())
    if block > (8192 if causal else 16384):
        # Keys that are not seen cost a held row as much as others. Causal bfloat16 4x16384x16384: forward in 894,
        # backward in 1207 (chunks of 4096: 1375); held, 16 warps: 1072 and 1439.
        return Config(False, 1, 8192 if backward else 4096, 256 // device.warp_size)
    # 32 elements per thread. Causal bfloat16 16x8192x8192: forward in 866 (64 elements: 860; in chunks: 989), backward
    # in 1106 (64: 1131; 16: 1266). Without a mask 16384x16384: 283 and 402 (in chunks: 319 and 432).
    rows = 1
    while rows * block < 1024 and 2 * rows <= queries:
        rows *= 2
    threads = max(device.warp_size, rows * block // 32)
    return Config(True, rows, block, threads // device.warp_size)


@functools.cache
def _kernels() -> ModuleType:
    """Imported at first use: importing apex needs no Triton."""
    from . import kernels

    return kernels


def _launch(
    name: str,
    numbers: Sequence[int],
    spec: SoftmaxSpec,
    mask_kind: int,
    noise_kind: int,
    groups: int,
    queries: int,
    keys: int,
    device: torch.device,
    chosen: Config,
) -> BoundLaunch:
    blocks = -(-queries // chosen.rows)
    full = queries % chosen.rows == 0 and (keys == chosen.block if chosen.held else keys % chosen.block == 0)
    align = math.gcd(keys, 16)
    return getattr(_kernels(), name).bind(
        (groups * blocks,),
        (queries, keys // align, blocks, *numbers, float(spec.scale), float(spec.dropout), spec.kept_scale),
        (mask_kind, noise_kind, chosen.held, chosen.rows, chosen.block, full, align),
        device=device,
        num_warps=chosen.num_warps,
    )


@functools.lru_cache(maxsize=4096)
def _forward_plan(
    spec: SoftmaxSpec,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    mask_dtype: torch.dtype | None,
    mask_shape: tuple[int, ...],
    mask_strides: tuple[int, ...],
    noise_dtype: torch.dtype | None,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    keys = shape[-1]
    heads, strides = 1, [0, 0, 0]
    if spec.causal:
        mask_kind, queries = CAUSAL, shape[-2]
    elif mask_dtype is None:
        mask_kind, queries = NO_MASK, math.prod(shape[:-1])
    else:
        mask_kind = ADDED if mask_dtype.is_floating_point else HIDES
        queries = shape[-2] if len(shape) > 1 else 1
        heads = shape[-3] if len(shape) > 2 else 1
        for i, (size, stride) in enumerate(zip(mask_shape[-2::-1], mask_strides[-2::-1], strict=True)):
            strides[2 - i] = 0 if size == 1 else stride
    groups = math.prod(shape[:-1]) // queries
    chosen = config(queries, keys, spec.causal, False, facts)
    noise_kind = _noise_kind(noise_dtype)
    return _launch(
        "softmax_forward", (heads, *strides), spec, mask_kind, noise_kind, groups, queries, keys, device, chosen
    )


def triton_forward(
    input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, noise: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and probabilities, the same tensor without dropout; the arguments were found fit."""
    if not input.is_contiguous():
        input = input.contiguous()
    if noise is not None and not noise.is_contiguous():
        noise = noise.contiguous()
    shape, device = input.shape, input.device
    if mask is None:
        details: tuple = (None, (), ())
    else:
        mask = _with_plain_rows(mask, shape)
        details = (mask.dtype, mask.shape, mask.stride())
    noise_dtype = None if noise is None else noise.dtype
    launch = _forward_plan(spec, shape, input.dtype, *details, noise_dtype, device, _device.facts(device))
    output = torch.empty_like(input)
    if noise is None:
        launch(input, mask, None, output, None)
        return output, output
    probabilities = torch.empty_like(input)
    launch(input, mask, noise, output, probabilities)
    return output, probabilities


def _with_plain_rows(mask: Tensor, shape: torch.Size) -> Tensor:
    """A mask of at most four dimensions, whose rows have as many elements as there are keys, one after the other."""
    keys = shape[-1]
    if mask.dim() > 3 and len(shape) > 4:
        mask = mask.expand(shape).reshape(-1, *shape[-3:])
    if mask.dim() == 0 or mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1 and keys != 1:
        mask = mask.contiguous()
    return mask


@functools.lru_cache(maxsize=4096)
def _backward_plan(
    spec: SoftmaxSpec,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    noise_dtype: torch.dtype | None,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    keys = shape[-1]
    queries = shape[-2] if spec.causal else math.prod(shape[:-1])
    groups = math.prod(shape[:-1]) // queries
    chosen = config(queries, keys, spec.causal, True, facts)
    mask_kind = CAUSAL if spec.causal else NO_MASK
    return _launch(
        "softmax_backward", (), spec, mask_kind, _noise_kind(noise_dtype), groups, queries, keys, device, chosen
    )


def triton_backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, noise: Tensor | None) -> Tensor:
    """The gradient of the input; the arguments were found fit."""
    if not dy.is_contiguous():
        dy = dy.contiguous()
    if not probabilities.is_contiguous():
        probabilities = probabilities.contiguous()
    if noise is not None and not noise.is_contiguous():
        noise = noise.contiguous()
    device = dy.device
    dtypes = (dy.dtype, probabilities.dtype)
    noise_dtype = None if noise is None else noise.dtype
    launch = _backward_plan(spec, dy.shape, dtypes, noise_dtype, device, _device.facts(device))
    dx = torch.empty_like(probabilities)
    launch(dy, probabilities, noise, dx)
    return dx


def _noise_kind(dtype: torch.dtype | None) -> int:
    if dtype is None:
        return NO_NOISE
    return SEED if dtype == torch.int64 else KEEP
