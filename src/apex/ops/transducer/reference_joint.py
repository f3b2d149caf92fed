"""The joint of a transducer in PyTorch operators: the definition, and the implementation where there is no kernel.

`spec.py` explains letters and layouts.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .spec import PADDING, JointSpec, compute_dtype


def blocks(
    tensor: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Sequence, frames, tokens and the part of a padded or packed tensor that belongs to it, frames x tokens x ..."""
    ends = [0] * len(f_len) if batch_offset is None else batch_offset.tolist()
    for batch, (frames, tokens, end) in enumerate(zip(f_len.tolist(), g_len.tolist(), ends, strict=True)):
        if batch_offset is None:
            part = tensor[batch, :frames, :tokens]
        else:
            part = tensor[end - frames * tokens : end].view(frames, tokens, *tensor.shape[1:])
        yield batch, frames, tokens, part


def forward(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    spec: JointSpec,
    noise: Tensor | None,
    want_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """h, and if wanted one byte per element: 1 where it depends on f and g. Not differentiable."""
    dtype = torch.promote_types(f.dtype, g.dtype)
    if batch_offset is None:
        h = torch.add(f[:, :, None], g[:, None])
    else:
        h = torch.full((spec.packed_rows, f.shape[-1]), PADDING, dtype=dtype, device=f.device)
        for batch, frames, tokens, part in blocks(h, f_len, g_len, batch_offset):
            torch.add(f[batch, :frames, None], g[batch, None, :tokens], out=part)
    if spec.relu:
        h.relu_()
    if noise is not None:
        h.mul_(noise).mul_(spec.scale)
    mask = None
    if want_mask:
        if spec.relu:
            mask = (h > 0).view(torch.uint8)
        else:
            mask = torch.ones_like(h, dtype=torch.uint8) if noise is None else noise.clone()
    if batch_offset is None:
        for batch, (frames, tokens) in enumerate(zip(f_len.tolist(), g_len.tolist(), strict=True)):
            for outside, value in (h, PADDING), (mask, 0):
                if outside is not None and frames < f.shape[1]:
                    outside[batch, frames:] = value
                if outside is not None and tokens < g.shape[1]:
                    outside[batch, :, tokens:] = value
    elif len(batch_offset) and (end := int(batch_offset[-1])) < spec.packed_rows:
        h[end:] = PADDING
        if mask is not None:
            mask[end:] = 0
    return h, mask


def backward(
    dh: Tensor,
    kept: Tensor | None,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    sizes: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Gradients of f and g, from where `kept` is positive; differentiable with respect to dh."""
    batches, compute = len(f_len), compute_dtype(dh)
    if batch_offset is None and f_len.tolist() == [sizes[0]] * batches and g_len.tolist() == [sizes[1]] * batches:
        whole = dh if kept is None else dh * (kept > 0)  # no padding: all sequences at once
        df, dg = whole.sum(2, dtype=compute), whole.sum(1, dtype=compute)
        return (df, dg) if scale == 1.0 else (df * scale, dg * scale)
    df = torch.zeros(batches, sizes[0], dh.shape[-1], dtype=compute, device=dh.device)
    dg = torch.zeros(batches, sizes[1], dh.shape[-1], dtype=compute, device=dh.device)
    kept_blocks = None if kept is None else blocks(kept, f_len, g_len, batch_offset)
    for batch, frames, tokens, part in blocks(dh, f_len, g_len, batch_offset):
        if kept_blocks is not None:
            part = part * (next(kept_blocks)[3] > 0)
        df[batch, :frames] = part.sum(1, dtype=compute)
        dg[batch, :tokens] = part.sum(0, dtype=compute)
    if scale != 1.0:
        df, dg = df * scale, dg * scale
    return df, dg
