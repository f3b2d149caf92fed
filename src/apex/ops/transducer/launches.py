"""From tensors to kernel launches: allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _device
from . import config
from .spec import PADDING, JointSpec, LossNodes

if TYPE_CHECKING:
    from .._launch import BoundLaunch


Dtypes = tuple[torch.dtype | None, ...]


def _dtypes(*tensors: Tensor | None) -> Dtypes:
    """The part of a plan's key that says which tensors there are, and of which dtypes."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _within(batch_offset: Tensor | None, rows: int) -> Tensor | None:
    """Offsets that name no row beyond those there are, whatever values they have; the host does not know them."""
    return None if batch_offset is None else batch_offset.clamp(0, rows)


@functools.lru_cache(maxsize=4096)
def _fill_plan(columns: int, dtypes: Dtypes, device: torch.device) -> BoundLaunch:
    from . import kernels_rest as kernels  # at first use: importing apex needs no Triton

    return kernels.transducer_fill_rest.bind(
        (kernels.PROGRAMS,), (0.0, 0.0, 0.0, 0.0), (columns, kernels.LOW_BITS, 1024), device=device, num_warps=4
    )


def fill_rest(batch_offset: Tensor, packed: Tensor, value: float) -> None:
    """Fills the rows behind the last sequence, if there are any: they must not hold what was in memory before."""
    plan = _fill_plan(packed.shape[-1], _dtypes(batch_offset, packed), packed.device)
    high, low = divmod(packed.numel(), 1 << plan.constants[1])
    plan(batch_offset, packed, floats=(float(len(batch_offset) - 1), float(high), float(low), value))


@functools.lru_cache(maxsize=4096)
def _joint_forward_plan(
    sizes: tuple[int, int, int, int],
    spec: JointSpec,
    packed: bool,
    dropout: str,
    want_mask: bool,
    dtypes: Dtypes,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    from . import kernels_joint as kernels  # at first use: importing apex needs no Triton

    batches, frames, tokens, features = sizes
    tile = config.joint_forward_tile(tokens, features, dropout == "seed", facts)
    grid = batches * -(-frames // tile.frames) * -(-tokens // tile.tokens) * -(-features // tile.features)
    return kernels.transducer_joint_forward.bind(
        (grid,),
        (frames, tokens, features, round(spec.dropout * config.WORD), spec.scale),
        (packed, spec.relu, dropout, want_mask, tile.frames, tile.tokens, tile.features),
        device=device,
        num_warps=tile.num_warps,
    )


def triton_joint_forward(
    f: Tensor,
    g: Tensor,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    spec: JointSpec,
    noise: Tensor | None,
    want_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """h that has elements, and its mask if wanted."""
    f, g, batch_offset = f.contiguous(), g.contiguous(), _within(batch_offset, spec.packed_rows)
    sizes = (f.shape[0], f.shape[1], g.shape[1], f.shape[2])
    packed = batch_offset is not None
    dropout = "none" if noise is None else "seed" if noise.dtype == torch.int64 else "bytes"
    plan = _joint_forward_plan(
        sizes,
        spec,
        packed,
        dropout,
        want_mask,
        _dtypes(f, g, f_len, g_len, batch_offset),
        f.device,
        _device.facts(f.device),
    )
    shape = (spec.packed_rows, sizes[3]) if packed else sizes
    h = torch.empty(shape, dtype=torch.promote_types(f.dtype, g.dtype), device=f.device)
    mask = torch.empty(shape, dtype=torch.uint8, device=f.device) if want_mask else None
    plan(f, g, f_len, g_len, batch_offset, noise, h, mask)
    if batch_offset is not None:
        fill_rest(batch_offset, h, PADDING)
        if mask is not None:
            fill_rest(batch_offset, mask, 0.0)
    return h, mask


class JointBackwardPlan(NamedTuple):
    """The pass over dh, how many sums it leaves for each gradient, and what adds them up where there are several."""

    main: BoundLaunch
    df_parts: int
    dg_parts: int
    add_df: BoundLaunch | None
    add_dg: BoundLaunch | None


@functools.lru_cache(maxsize=4096)
def _joint_backward_plan(
    sizes: tuple[int, int, int, int],
    packed: bool,
    masked: bool,
    scale: float,
    dh_size: int,
    dtypes: Dtypes,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> JointBackwardPlan:
    from . import kernels_joint as kernels

    batches, frames, tokens, features = sizes
    tile = config.joint_backward_tile(tokens, features, dh_size, facts)
    blocks = -(-tokens // tile.tokens)
    programs = batches * blocks * -(-features // tile.features)
    chunk = -(-frames // config.frame_chunks(frames, programs, masked, facts))
    chunks = -(-frames // chunk)
    main = kernels.transducer_joint_backward.bind(
        (programs * chunks,),
        (batches, frames, tokens, features, chunks, chunk, scale),
        (packed, masked, tile.tokens, tile.features, tile.num_stages),
        device=device,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )

    def add(parts: int, count: int) -> BoundLaunch | None:
        if parts == 1:
            return None
        grid = (-(-count // config.SUM_BLOCK),)
        constants = (min(config.SUM_PARTS, _device.next_power_of_2(parts)), config.SUM_BLOCK)
        return kernels.transducer_joint_sum.bind(grid, (count, parts), constants, device=device, num_warps=2)

    rows = batches * features
    return JointBackwardPlan(main, blocks, chunks, add(blocks, rows * frames), add(chunks, rows * tokens))


def triton_joint_backward(
    dh: Tensor,
    kept: Tensor | None,
    f_len: Tensor,
    g_len: Tensor,
    batch_offset: Tensor | None,
    sizes: tuple[int, int],
    scale: float,
    dtypes: tuple[torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor]:
    """Gradients of f and g, both with elements, in their dtypes."""
    dh, batch_offset = dh.contiguous(), _within(batch_offset, len(dh))
    batches, features, device = len(f_len), dh.shape[-1], dh.device
    plan = _joint_backward_plan(
        (batches, *sizes, features),
        batch_offset is not None,
        kept is not None,
        scale,
        dh.element_size(),
        (*_dtypes(dh, kept, f_len, g_len, batch_offset), *dtypes),
        device,
        _device.facts(device),
    )
    df = torch.empty(batches, sizes[0], features, dtype=dtypes[0], device=device)
    dg = torch.empty(batches, sizes[1], features, dtype=dtypes[1], device=device)
    df_sums = df if plan.add_df is None else df.new_empty(plan.df_parts, *df.shape, dtype=torch.float32)
    dg_sums = dg if plan.add_dg is None else dg.new_empty(plan.dg_parts, *dg.shape, dtype=torch.float32)
    plan.main(dh, kept, f_len, g_len, batch_offset, df_sums, dg_sums)
    if plan.add_df is not None:
        plan.add_df(df_sums, df)
    if plan.add_dg is not None:
        plan.add_dg(dg_sums, dg)
    return df, dg


@functools.cache
def can_walk() -> bool:
    """Whether this Triton has what the loss's walk is made of: 3.2 cannot gather."""
    import triton.language

    return hasattr(triton.language, "gather")


@functools.lru_cache(maxsize=4096)
def _loss_words_plan(
    sizes: tuple[int, int, int, int],
    blank: int,
    packed: bool,
    normalize: bool,
    dtypes: Dtypes,
    x_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    from . import kernels_loss as kernels

    batches, frames, tokens, words = sizes
    tile = config.reading_tile(tokens, words, x_dtype.itemsize, facts)
    whole = words <= tile.groups * tile.lanes
    return kernels.transducer_loss_words.bind(
        (batches * frames * -(-tokens // tile.rows),),
        (*sizes, blank, *config.skew(frames, tokens)),
        (packed, normalize, whole, *tile),
        device=device,
        num_warps=1,
    )


class WalkPlan(NamedTuple):
    """The walk over the lattices, and what puts alpha and beta together."""

    walk: BoundLaunch
    shares: BoundLaunch


@functools.lru_cache(maxsize=4096)
def _loss_walk_plan(
    sizes: tuple[int, int, int],
    alpha: bool,
    want_scores: bool,
    dtypes: Dtypes,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> WalkPlan:
    from . import kernels_loss as kernels

    batches, frames, tokens = sizes
    tile = config.walk_tile(tokens, facts)
    numbers = (*sizes, *config.skew(frames, tokens))
    walk = kernels.transducer_loss_walk.bind(
        (batches * (2 if alpha else 1),),
        numbers,
        (alpha, tokens > tile.tokens, tile.tokens),
        device=device,
        num_warps=tile.num_warps,
    )
    part = config.shares_tile(frames, tokens)
    grid = batches * -(-(frames + tokens - 1) // part.diagonals) * -(-min(frames, tokens) // part.columns)
    shares = kernels.transducer_loss_shares.bind((grid,), numbers, tuple(part), device=device, num_warps=4)
    return WalkPlan(walk, shares)


@functools.lru_cache(maxsize=4096)
def _loss_backward_plan(
    sizes: tuple[int, int, int, int],
    blank: int,
    packed: bool,
    through_softmax: bool,
    dtypes: Dtypes,
    x_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> BoundLaunch:
    from . import kernels_loss as kernels

    batches, frames, tokens, words = sizes
    tile = config.writing_tile(tokens, words, x_dtype.itemsize, facts)
    return kernels.transducer_loss_backward.bind(
        (batches * frames * -(-tokens // tile.rows),),
        (*sizes, blank),
        (packed, through_softmax, *tile),
        device=device,
        num_warps=1,
    )


def triton_loss_forward(
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    sizes: tuple[int, int],
    blank: int,
    normalize: bool,
    want_nodes: bool,
    want_scores: bool,
) -> tuple[Tensor, LossNodes | None, Tensor | None]:
    """`reference_loss.forward` for x with elements; nodes and scores where they are wanted."""
    x, label, batch_offset = x.contiguous(), label.contiguous(), _within(batch_offset, len(x))
    batches, device, facts = len(f_len), x.device, _device.facts(x.device)
    given = _dtypes(label, f_len, y_len, batch_offset)
    both = want_nodes or want_scores
    words_plan = _loss_words_plan(
        (batches, *sizes, x.shape[-1]), blank, batch_offset is not None, normalize, given, x.dtype, device, facts
    )
    plan = _loss_walk_plan((batches, *sizes), both, want_scores, _dtypes(x, f_len, y_len), device, facts)
    places = config.skew(*sizes).places
    sums = torch.empty(batches, *sizes, dtype=torch.float32, device=device) if normalize else None
    words = torch.empty(2, batches, places, dtype=torch.int64, device=device)
    states = torch.empty_like(words) if both else torch.empty_like(words[0])
    losses = torch.empty(batches, dtype=x.dtype, device=device)
    words_plan(x, label, f_len, y_len, batch_offset, sums, words)
    plan.walk(words, f_len, y_len, states, losses)
    if not both:
        return losses, None, None
    shares = torch.empty(2, batches, *sizes, dtype=torch.float32, device=device)
    scores = torch.empty_like(shares) if want_scores else None
    plan.shares(words, states, f_len, y_len, shares, scores)
    return losses, LossNodes(sums, shares), scores


def triton_loss_backward(
    grad: Tensor,
    x: Tensor,
    label: Tensor,
    f_len: Tensor,
    y_len: Tensor,
    batch_offset: Tensor | None,
    blank: int,
    saved: LossNodes,
    through_softmax: bool,
) -> Tensor:
    """The gradient of x, which has elements."""
    x, label, grad = x.contiguous(), label.contiguous(), grad.contiguous()
    batch_offset = _within(batch_offset, len(x))
    plan = _loss_backward_plan(
        (len(f_len), *saved.shares.shape[2:], x.shape[-1]),
        blank,
        batch_offset is not None,
        through_softmax,
        _dtypes(grad, label, f_len, y_len, batch_offset, saved.sums),
        x.dtype,
        x.device,
        _device.facts(x.device),
    )
    dx = torch.empty_like(x)
    plan(grad, x, label, f_len, y_len, batch_offset, *saved, dx)
    if batch_offset is not None:
        fill_rest(batch_offset, dx, 0.0)
    return dx
