"""How tensors lie in memory, as kernels see them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from .._results import Maker, maker
from .spec import BatchNormSpec


class Geometry(NamedTuple):
    """Images, positions of each and channels, as they lie in memory; images are one where channels are last."""

    images: int
    positions: int
    channels: int
    last: bool

    @property
    def values(self) -> int:
        """Values per channel."""
        return self.images * self.positions


class Kind(NamedTuple):
    """What dense inputs of norms have in common, and results with them."""

    geometry: Geometry
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def maker(self, device: torch.device, dtype: torch.dtype | None = None) -> Maker:
        """What makes uninitialised tensors that are laid out like the input."""
        return maker(self.sizes, dtype or self.dtype, device, self.strides)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """`tensor` laid out like the input, its own dtype kept.

        Ask it for what autograd had saved, too: hooks like `torch.autograd.graph.save_on_cpu` return it contiguous.
        """
        if tensor.stride() == self.strides:
            return tensor
        return torch.empty_strided(self.sizes, self.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def kind_of(tensor: Tensor, spec: BatchNormSpec) -> Kind:
    """The kind of a dense tensor."""
    geometry = _geometry(tensor.shape, spec.channel_dim, tensor.is_contiguous())
    return Kind(geometry, tensor.shape, tensor.stride(), tensor.dtype)


@functools.lru_cache(maxsize=4096)
def _geometry(shape: torch.Size, channel_dim: int, contiguous: bool) -> Geometry:
    channels = shape[channel_dim]
    count = shape.numel() // channels
    if channel_dim == -1 or count == shape[0] or not contiguous:
        return Geometry(1, count, channels, True)
    return Geometry(shape[0], count // shape[0], channels, False)


def dense(tensor: Tensor, spec: BatchNormSpec) -> Tensor:
    """The tensor as the kernels take it: contiguous in one of the two layouts."""
    if tensor.is_contiguous() or (
        spec.channel_dim == 1 and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    ):
        return tensor
    if spec.channel_dim == 1 and tensor.stride(1) == 1:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor.contiguous()


def laid_out_like(x: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` in the memory layout of `x`, its own dtype kept."""
    if tensor.stride() == x.stride():
        return tensor
    return torch.empty_like(x, dtype=tensor.dtype).copy_(tensor)
