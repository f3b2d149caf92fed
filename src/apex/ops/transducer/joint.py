"""The joint of a transducer: checks, dispatch and autograd."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors, values_at_hand
from . import reference_joint
from .launches import triton_joint_backward, triton_joint_forward
from .self_check import self_check
from .spec import JointSpec

FAMILY = _library.register_family(
    _library.OpFamily("transducer", "joint and loss of speech transducers, forward and backward", self_check)
)

_SUPPORTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def check_lengths(lengths: Tensor, name: str, batches: int, most: int, device: torch.device, least: int = 0) -> None:
    """Refuses lengths that do not fit; their values only where reading them costs nothing."""
    check_tensors(**{name: lengths})
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    if lengths.shape != (batches,):
        raise ValueError(f"{name} must have one element per sequence, [{batches}], got shape {list(lengths.shape)}")
    if lengths.device != device:
        raise ValueError(f"{name} is on {lengths.device}, the input on {device}")
    values = values_at_hand(lengths)  # quicker than minimum and maximum by operators
    if values:
        low, high = min(values), max(values)
        if low < least or high > most:
            raise ValueError(f"{name} must be between {least} and {most}, got {low if low < least else high}")


def check_offset(
    batch_offset: Tensor, batches: int, device: torch.device, f_len: Tensor, tokens: Tensor, rows: int
) -> None:
    """Refuses a batch_offset that does not fit lengths and rows; its values only where reading them costs nothing."""
    check_tensors(batch_offset=batch_offset)
    if batch_offset.dtype not in (torch.int32, torch.int64) or batch_offset.shape != (batches,):
        raise ValueError(
            f"batch_offset must have one int64 per sequence, [{batches}], got {batch_offset.dtype} of shape "
            f"{list(batch_offset.shape)}"
        )
    if batch_offset.device != device:
        raise ValueError(f"batch_offset is on {batch_offset.device}, the input on {device}")
    ends, frames = values_at_hand(batch_offset), values_at_hand(f_len)
    if ends and frames is not None:
        wanted = list(accumulate(f * u for f, u in zip(frames, tokens.tolist(), strict=True)))
        if ends != wanted:
            raise ValueError(f"batch_offset={ends} must be the running sum of the sequences' rows, {wanted}")
        if ends[-1] > rows:
            raise ValueError(f"batch_offset={ends} has more rows than the {rows} that are packed")


def check_joint(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, spec: JointSpec
) -> None:
    """Refuses arguments that do not fit, in clear words."""
    check_tensors(f=f, g=g)
    if f.dim() != 3 or g.dim() != 3 or f.shape[0] != g.shape[0] or f.shape[2] != g.shape[2]:
        raise ValueError(
            f"f and g must be batch x frames x features and batch x tokens x features, got shapes {list(f.shape)} and "
            f"{list(g.shape)}"
        )
    if f.dtype not in _SUPPORTED or g.dtype not in _SUPPORTED:
        raise TypeError(f"f and g must be float16, bfloat16, float32 or float64, got {f.dtype} and {g.dtype}")
    if f.device != g.device:
        raise ValueError(f"f is on {f.device}, g on {g.device}")
    if not 0.0 <= spec.dropout <= 1.0:
        raise ValueError(f"dropout_prob={spec.dropout} must be a probability, between 0 and 1")
    check_lengths(f_len, "f_len", f.shape[0], f.shape[1], f.device)
    check_lengths(g_len, "g_len", f.shape[0], g.shape[1], f.device)
    if batch_offset is not None:
        if spec.packed_rows < 0:
            raise ValueError(f"packed_batch={spec.packed_rows} must not be negative")
        check_offset(batch_offset, f.shape[0], f.device, f_len, g_len, spec.packed_rows)


def draw_noise(f: Tensor, g: Tensor, packed: bool, spec: JointSpec) -> Tensor | None:
    """What decides which elements are dropped, from the default generator of the device; None without dropout.

    Where kernels run one int64, the seed of a Philox stream; elsewhere a byte per element of h, zero where dropped.
    """
    if not spec.dropout:
        return None
    if f.numel() != 0 and _library.runs_triton(FAMILY, f):
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=f.device)
    shape = (spec.packed_rows, f.shape[2]) if packed else (f.shape[0], f.shape[1], g.shape[1], f.shape[2])
    return (torch.rand(shape, dtype=torch.float32, device=f.device) >= spec.dropout).to(torch.uint8)


def joint_forward(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    spec: JointSpec,
    noise: Tensor | None = None,
    want_mask: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """h, and if wanted its mask, for arguments that were checked; without autograd."""
    with torch.no_grad():
        if f.numel() and g.numel() and _runs_triton(f, g):
            lengths = f_len.contiguous(), g_len.contiguous()
            offset = None if batch_offset is None else batch_offset.contiguous()
            return triton_joint_forward(f, g, *lengths, offset, spec, noise, want_mask)
        return reference_joint.forward(f, g, f_len, g_len, batch_offset, spec, noise, want_mask)


def joint_backward(
    dh: Tensor,
    kept: Tensor | None,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    sizes: tuple[int, int],
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor]:
    """Gradients of f and g from that of h, where `kept`, if there is one, is positive."""
    whole = len(f_len) * dh.shape[-1] * sizes[0] * sizes[1] > 0
    if whole and not torch.is_grad_enabled() and _runs_triton(dh, dh):
        lengths = f_len.contiguous(), g_len.contiguous()
        offset = None if batch_offset is None else batch_offset.contiguous()
        return triton_joint_backward(dh, kept, *lengths, offset, sizes, scale, dtypes)
    df, dg = reference_joint.backward(dh, kept, f_len, g_len, batch_offset, sizes, scale)
    return df.to(dtypes[0]), dg.to(dtypes[1])


def _runs_triton(first: Tensor, second: Tensor) -> bool:
    return _library.runs_triton(FAMILY, first) and _library.runs_triton(FAMILY, second)


def joint_forward_and_save(
    ctx: Any,
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    spec: JointSpec,
    want_mask: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The forward of the joint's autograd Function: h, and its mask if wanted.

    With ReLU the backward pass looks at h itself, which the layer behind keeps in any case; dropout alone, whose zeros
    cannot be told from those of f + g, keeps a byte per element.
    """
    check_joint(f, g, f_len, g_len, batch_offset, spec)
    noise = draw_noise(f, g, batch_offset is not None, spec)
    stores = want_mask or (noise is not None and not spec.relu)
    mask: Tensor | None
    if torch.compiler.is_compiling():
        h, mask = torch.ops.apex.transducer_joint(f, g, f_len, g_len, batch_offset, noise, *spec, stores)
    else:
        h, mask = joint_forward(f, g, f_len, g_len, batch_offset, spec, noise, stores)
    kept = h if spec.relu else mask if noise is not None else None
    ctx.save_for_backward(kept, f_len, g_len, batch_offset)
    ctx.sizes, ctx.dtypes, ctx.scale = (f.shape[1], g.shape[1]), (f.dtype, g.dtype), spec.scale
    return h, mask if stores else None


def joint_backward_from_saved(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of the joint's autograd Function; differentiable again."""
    kept, f_len, g_len, batch_offset = ctx.saved_tensors
    if torch.compiler.is_compiling():
        df, dg = torch.ops.apex.transducer_joint_backward(
            dh, kept, f_len, g_len, batch_offset, *ctx.sizes, ctx.scale, *ctx.dtypes
        )
        return df, dg
    return joint_backward(dh, kept, f_len, g_len, batch_offset, ctx.sizes, ctx.scale, ctx.dtypes)
