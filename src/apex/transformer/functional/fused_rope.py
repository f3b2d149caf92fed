"""Rotary position embeddings of sequences, packed sequences and images, each in one pass.

s: tokens of a sequence, b: batch, h: heads, d: channels of a head, r: rotated channels (even, at most d; the remaining
channels are copied). Channel i of the first r/2 is rotated against channel i of the second r/2. The arithmetic is
float32; the result has the dtype of the input. Angles, cosines and sines get no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._arguments import checked
from ...ops._checks import check_tensors
from ...ops.rope import RopeSpec, backward_from_saved, forward_and_save, rotate

# ROCm's variant sets this to True if it calls the AITER library. This implementation never does.
AITER_ROPE_BACKEND = False


def check_if_rocm_pytorch() -> bool:
    """Return True if PyTorch was built for AMD GPUs."""
    return torch.version.hip is not None


@checked
def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, *, tensor_format: str = "sbhd"
) -> Tensor:
    """Rotate `t`, [s, b, h, d], by the angles `freqs`, [s, 1, 1, r].

    With `transpose_output_memory` the result's first two dimensions are swapped in memory, so that `result.transpose(0,
    1)` is contiguous. `tensor_format="bshd"` takes and returns [b, s, h, d].
    """
    return rotate(t, (freqs,), _sequences(tensor_format, transpose_output_memory))


@checked
def fused_apply_rotary_pos_emb_cached(
    t: Tensor, cos_: Tensor, sin_: Tensor, transpose_output_memory: bool = False, *, tensor_format: str = "sbhd"
) -> Tensor:
    """Rotate `t` as `fused_apply_rotary_pos_emb` does, by given cosines and sines, [s, 1, 1, r], of any float dtype."""
    return rotate(t, (cos_, sin_), _sequences(tensor_format, transpose_output_memory))


@checked
def fused_apply_rotary_pos_emb_thd(t: Tensor, cu_seqlens: Tensor, freqs: Tensor) -> Tensor:
    """Rotate packed sequences `t`, [tokens of all sequences, h, d], by the angles `freqs`, [positions, 1, 1, r].

    `cu_seqlens` holds the index of each sequence's first token, then the number of all tokens. Tokens of no sequence
    are copied. On a GPU the host does not read `cu_seqlens`, so a sequence longer than `freqs` raises no error; its
    tokens beyond `freqs` become NaN. On a CPU, decreasing or negative indices are an error. On a GPU they read nothing
    outside `freqs`, but the result is undefined.
    """
    return rotate(t, (freqs,), RopeSpec("thd"), cu_seqlens)


@checked
def fused_apply_rotary_pos_emb_2d(
    t: Tensor, img_h: int, img_w: int, cos_h: Tensor, sin_h: Tensor, cos_w: Tensor, sin_w: Tensor
) -> Tensor:
    """Rotate images `t`, [b, img_h * img_w, h, d]: the first d/2 channels by a token's row, the others by its column.

    `cos_h` and `sin_h`, for the rows, are [1, at least img_h, 1, d/2]. `cos_w` and `sin_w`, for the columns, are [1, at
    least img_w, 1, d/2].
    """
    return rotate(t, (cos_h, sin_h, cos_w, sin_w), _image(t, img_h, img_w))


def _sequences(tensor_format: str, transpose_output_memory: bool) -> RopeSpec:
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(f"tensor_format={tensor_format!r} is not known; use sbhd or bshd")
    return RopeSpec(tensor_format, bool(transpose_output_memory))


def _image(t: Tensor, img_h: int, img_w: int) -> RopeSpec:
    check_tensors(t=t)
    if t.dim() != 4 or t.shape[1] != img_h * img_w:
        raise ValueError(f"t has shape {list(t.shape)}, expected [b, img_h * img_w = {img_h} * {img_w}, h, d]")
    return RopeSpec("image", width=img_w)


class FusedRoPEFunc(torch.autograd.Function):
    """The autograd node of `fused_apply_rotary_pos_emb`."""

    @staticmethod
    def forward(ctx, t, freqs, transpose_output_memory=False):  # type: ignore[override]
        return forward_and_save(ctx, (t,), (freqs,), _sequences("sbhd", transpose_output_memory))[0]

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *backward_from_saved(ctx, grad_output), None, None


class FusedRoPECachedFunc(torch.autograd.Function):
    """The autograd node of `fused_apply_rotary_pos_emb_cached`."""

    @staticmethod
    def forward(ctx, t, cos_, sin_, transpose_output_memory=False):  # type: ignore[override]
        return forward_and_save(ctx, (t,), (cos_, sin_), _sequences("sbhd", transpose_output_memory))[0]

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *backward_from_saved(ctx, grad_output), None, None, None


class FusedRoPETHDFunc(torch.autograd.Function):
    """The autograd node of `fused_apply_rotary_pos_emb_thd`."""

    @staticmethod
    def forward(ctx, t, cu_seqlens, freqs):  # type: ignore[override]
        return forward_and_save(ctx, (t,), (freqs,), RopeSpec("thd"), cu_seqlens)[0]

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *backward_from_saved(ctx, grad_output), None, None


class FusedRoPE2DFunc(torch.autograd.Function):
    """The autograd node of `fused_apply_rotary_pos_emb_2d`."""

    @staticmethod
    def forward(ctx, t, img_h, img_w, cos_h, sin_h, cos_w, sin_w):  # type: ignore[override]
        return forward_and_save(ctx, (t,), (cos_h, sin_h, cos_w, sin_w), _image(t, img_h, img_w))[0]

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[override]
        return *backward_from_saved(ctx, grad_output), None, None, None, None, None, None


# ROCm's variant has two implementations of each function. Here both names refer to the same one.
FusedRoPEFuncApex = FusedRoPEFuncAiter = FusedRoPEFunc
FusedRoPECachedFuncApex = FusedRoPECachedFuncAiter = FusedRoPECachedFunc
FusedRoPETHDFuncApex = FusedRoPETHDFuncAiter = FusedRoPETHDFunc
FusedRoPE2DFuncApex = FusedRoPE2DFuncAiter = FusedRoPE2DFunc
