"""The joint of a transducer: h[b, t, u] = dropout(relu(f[b, t] + g[b, u])); dropout and ReLU are optional.

Letters of the whole family: B batch, T frames of the encoder, U tokens of the predictor (labels + 1), H features of
the joint, V words. A sequence has `f_len` frames and `g_len` tokens, of at most T and U. A padded tensor is B x T x U.
A packed tensor has the sequences' T x U rows one after the other without padding. Sequence b ends before row
`batch_offset[b]`, where `batch_offset` is cumsum(f_len * g_len); None means padded.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import FLOATS, check_tensors, values_at_hand
from .._device import empty_on, facts, launch_rule, next_power_of_2
from .._op import Derivative, Kernels, Op, Saved
from . import config, reference

kernels = _library.LazyModule(f"{__package__}.kernels_joint")
shared_kernels = _library.LazyModule(f"{_library.__package__}._kernel_functions")

# The elements of a packed tensor are counted in two parts, because a 32-bit float holds 24 bits.
LOW_BITS = 20


def check_lengths(lengths: Tensor, name: str, batches: int, most: int, device: torch.device, least: int = 0) -> None:
    """Raise for lengths that do not fit; check their values only if reading them needs no wait."""
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
    """Raise for a batch_offset that does not fit lengths and rows; check values only if reading needs no wait."""
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


def joint_arguments(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    relu: bool = False,
    dropout: float = 0.0,
    packed_rows: int = 0,
    want_mask: bool = False,
) -> tuple:
    """Check and return the arguments of `JOINT`; `packed_rows` counts the rows of a packed h.

    Dropout draws from the default generator of the device. With ReLU the backward pass uses h itself, which the next
    layer saves in any case. Dropout alone, whose zeros cannot be told from zeros of f + g, saves a mask of a byte per
    element.
    """
    check_tensors(f=f, g=g)
    if f.dim() != 3 or g.dim() != 3 or f.shape[0] != g.shape[0] or f.shape[2] != g.shape[2]:
        raise ValueError(
            f"f and g must be batch x frames x features and batch x tokens x features, got shapes {list(f.shape)} and "
            f"{list(g.shape)}"
        )
    if f.dtype not in FLOATS or g.dtype not in FLOATS:
        raise TypeError(f"f and g must be float16, bfloat16, float32 or float64, got {f.dtype} and {g.dtype}")
    if f.device != g.device:
        raise ValueError(f"f is on {f.device}, g on {g.device}")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"dropout_prob={dropout} must be a probability, between 0 and 1")
    check_lengths(f_len, "f_len", f.shape[0], f.shape[1], f.device)
    check_lengths(g_len, "g_len", f.shape[0], g.shape[1], f.device)
    if batch_offset is not None:
        if packed_rows < 0:
            raise ValueError(f"packed_batch={packed_rows} must not be negative")
        check_offset(batch_offset, f.shape[0], f.device, f_len, g_len, packed_rows)
    noise = _draw_noise(f, g, _shape(f, g, batch_offset, packed_rows), dropout) if dropout else None
    scale = 1.0 / (1.0 - dropout) if dropout < 1.0 else 1.0
    settings = (relu, dropout, scale, f.shape[1], g.shape[1], packed_rows)
    return (f, g, f_len, g_len, batch_offset, noise, *settings, want_mask or (noise is not None and not relu))


def _draw_noise(f: Tensor, g: Tensor, shape: tuple[int, ...], dropout: float) -> Tensor:
    """Return the noise that decides which elements are dropped.

    If kernels run it is one int64, the seed of a Philox stream; otherwise a byte per element of h, zero if dropped.
    """
    if f.numel() and g.numel() and _library.runs_triton(FAMILY, f) and _library.runs_triton(FAMILY, g):
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=f.device)
    return (torch.rand(shape, dtype=torch.float32, device=f.device) >= dropout).to(torch.uint8)


def _shape(f: Tensor, g: Tensor, batch_offset: Tensor | None, packed_rows: int) -> tuple[int, ...]:
    if batch_offset is not None:
        return packed_rows, f.shape[2]
    return f.shape[0], f.shape[1], g.shape[1], f.shape[2]


def within_rows(batch_offset: Tensor | None, rows: int) -> Tensor | None:
    """Return the offsets clamped to the number of rows: the host does not know their values."""
    return None if batch_offset is None else batch_offset.clamp(0, rows)


def fill_rest(batch_offset: Tensor | None, packed: Tensor, value: float) -> None:
    """Fill rows behind the last sequence of a packed tensor, which must not keep old memory contents."""
    if batch_offset is None:
        return
    high, low = divmod(packed.numel(), 1 << LOW_BITS)
    kernels.transducer_fill_rest(
        (config.FILL_PROGRAMS,),
        (batch_offset, packed),
        (),
        (len(batch_offset) - 1, high, low, value),
        COLUMNS=packed.shape[-1],
        LOW=LOW_BITS,
        BLOCK=1024,
        num_warps=4,
    )


def launch_forward(
    f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, noise: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    relu, dropout, scale, frames, tokens, packed_rows, want_mask = options
    if not g.numel():
        return JOINT.run_reference(f, g, f_len, g_len, batch_offset, noise, *options)
    batch_offset, features = within_rows(batch_offset, packed_rows), f.shape[2]
    seeded = noise is not None and noise.dtype == torch.int64
    tile = config.joint_forward_tile(tokens, features, seeded, facts(f.device))
    shape = _shape(f, g, batch_offset, packed_rows)
    h = torch.empty(shape, dtype=torch.promote_types(f.dtype, g.dtype), device=f.device)
    mask = torch.empty(shape, dtype=torch.uint8, device=f.device) if want_mask else None
    kernels.transducer_joint_forward(
        (f.shape[0] * -(-frames // tile.frames) * -(-tokens // tile.tokens) * -(-features // tile.features),),
        (f, g, f_len, g_len, batch_offset, noise, h, mask),
        (frames, tokens, features, round(dropout * config.WORD)),
        (scale,),
        RELU=relu,
        FRAMES=tile.frames,
        TOKENS=tile.tokens,
        FEATURES=tile.features,
        num_warps=tile.num_warps,
    )
    fill_rest(batch_offset, h, reference.PADDING)
    if mask is not None:
        fill_rest(batch_offset, mask, 0.0)
    return h, mask


def launch_backward(
    dh: Tensor, kept: Tensor | None, f_len: Tensor, g_len: Tensor, batch_offset: Tensor | None, *options: Any
) -> tuple[Tensor | None, ...]:
    _, _, scale, frames, tokens, *_ = options
    batches, features, dtype, device = f_len.shape[0], dh.shape[-1], dh.dtype, dh.device
    empty, strides = empty_on(device), (features, 1)
    df = empty((batches, frames, features), (frames * features, *strides), dtype)
    dg = empty((batches, tokens, features), (tokens * features, *strides), dtype)
    if not (batches and frames and tokens and features):
        return df.zero_(), dg.zero_()
    sizes = (batches, frames, tokens, features)
    launch, blocks, chunks = _backward_launch(*sizes, dtype.itemsize, kept is not None, device)
    df_sums = df if blocks == 1 else df.new_empty(blocks, *df.shape, dtype=torch.float32)
    dg_sums = dg if chunks == 1 else dg.new_empty(chunks, *dg.shape, dtype=torch.float32)
    launch((dh, kept, f_len, g_len, within_rows(batch_offset, dh.shape[0]), df_sums, dg_sums), (scale,))
    for sums, result in (df_sums, df), (dg_sums, dg):
        if sums is not result:
            shared_kernels.sum_bias_partials(
                (-(-result.numel() // config.SUM_BLOCK),),
                (sums, result),
                (len(sums), result.numel()),
                ROWS=min(config.SUM_PARTS, next_power_of_2(len(sums))),
                BLOCK=config.SUM_BLOCK,
                num_warps=2,
            )
    return df, dg


@launch_rule
def _backward_launch(
    batches: int, frames: int, tokens: int, features: int, itemsize: int, masked: bool, device: torch.device
) -> tuple[Any, int, int]:
    """Return the kernel of a backward pass, and how many partial sums the gradients of f and of g have."""
    here = facts(device)
    tile = config.joint_backward_tile(tokens, features, itemsize, here)
    blocks = -(-tokens // tile.tokens)
    programs = batches * blocks * -(-features // tile.features)
    chunk = -(-frames // config.frame_chunks(frames, programs, masked, here))
    chunks = -(-frames // chunk)
    launch = kernels.transducer_joint_backward.prepare(
        (programs * chunks,),
        (batches, frames, tokens, features, chunks, chunk),
        TOKENS=tile.tokens,
        FEATURES=tile.features,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return launch, blocks, chunks


def _fake(f, g, f_len, g_len, batch_offset, noise, *settings):  # type: ignore[no-untyped-def]
    *_, packed_rows, want_mask = settings
    shape = _shape(f, g, batch_offset, packed_rows)
    h = f.new_empty(shape, dtype=torch.promote_types(f.dtype, g.dtype))
    return h, f.new_empty(shape, dtype=torch.uint8) if want_mask else None


def _backward_fake(dh, kept, f_len, g_len, batch_offset, *settings):  # type: ignore[no-untyped-def]
    *_, frames, tokens, _rows, _want_mask, wanted = settings
    shapes = ((f_len.shape[0], length, dh.shape[-1]) for length in (frames, tokens))
    return tuple(dh.new_empty(shape) if needed else None for shape, needed in zip(shapes, wanted, strict=True))


def _save(arguments: tuple, results: tuple) -> tuple:
    noise, relu = arguments[5:7]
    h, mask = results
    return h if relu else mask if noise is not None else None, *arguments[2:5]


FAMILY = _library.register_family(
    _library.OpFamily("transducer", "joint and loss of speech transducers, forward and backward")
)

# Gradients have the dtype of h's gradient; autograd casts them to f's and g's. h has the wider of the two dtypes.
JOINT = Op(
    FAMILY,
    "transducer_joint(Tensor f, Tensor g, Tensor f_len, Tensor g_len, Tensor? batch_offset, Tensor? noise, bool relu, "
    "float dropout, float scale, SymInt frames, SymInt tokens, SymInt packed_rows, bool want_mask) "
    "-> (Tensor h, Tensor mask)",
    reference=reference.joint,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_fake,
    saved=Saved("kept", "f_len", "g_len", "batch_offset", choose=_save),
    derivative=Derivative(of=("f", "g"), backward=reference.joint_backward, shapes=_backward_fake),
)
