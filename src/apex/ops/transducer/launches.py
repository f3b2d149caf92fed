"""From tensors to kernel launches: launch configuration, allocation, tensors in kernel order.

What depends on shapes and dtypes alone is planned once and cached; a call then allocates its results and launches.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .. import _device
from .spec import JointSpec, LossNodes

if TYPE_CHECKING:
    from .._launch import BoundLaunch

# The sizes below follow from what the compiler makes of the kernels for compute capability 9.0 (16-byte accesses, no
# spilled registers) and from what was measured of like kernels here; of these themselves nothing is measured yet.

# 16 bits of a random word are compared with the probability to drop.
WORD = 1 << 16
SUM_BLOCK = 512
SUM_PARTS = 8


Dtypes = tuple[torch.dtype | None, ...]


def _dtypes(*tensors: Tensor | None) -> Dtypes:
    """The part of a plan's key that says which tensors there are, and of which dtypes."""
    return tuple(None if tensor is None else tensor.dtype for tensor in tensors)


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


class Tile(NamedTuple):
    """What a program of a joint's kernel works on at a time."""

    tokens: int
    features: int
    num_warps: int
    num_stages: int = 1
    frames: int = 1


def joint_forward_tile(tokens: int, features: int, seeded: bool, device: _device.DeviceFacts) -> Tile:
    """4096 elements of each of four frames, 16 bytes a thread in four accesses; wide, to write long stretches.

    Half as many of eight frames where random words are made: a thread holds four of them for each of its elements.
    """
    elements = 2048 if seeded else 4096
    wide = min(1024, _power(features))
    tall = min(_power(tokens), max(1, elements // wide))
    return Tile(tall, wide, _warps(tall * wide, elements // 128, device), frames=8 if seeded else 4)


def joint_backward_tile(tokens: int, features: int, masked: bool, device: _device.DeviceFacts) -> Tile:
    """All tokens of up to 128, so that the sum over them is complete, and 4096 elements; two tiles are loaded ahead.

    Two warps, since fewer exchange less for that sum; four where the mask is loaded beside dh, for their registers.
    float16 16x300x60x512: 87 us, four warps 133; with a mask 170 and 161.
    """
    tall = min(128, _power(tokens))
    wide = min(_power(features), max(16, 4096 // tall))
    return Tile(tall, wide, _warps(tall * wide, 32 if masked else 64, device), num_stages=3)


def _warps(elements: int, per_thread: int, device: _device.DeviceFacts) -> int:
    return max(1, min(8, elements // per_thread // device.warp_size))


def frame_chunks(frames: int, programs: int, per_multiprocessor: int, device: _device.DeviceFacts) -> int:
    """In how many chunks the frames are walked by `programs` each.

    As many programs as a multiprocessor has registers for, in one wave: a few left over would run alone. Each chunk
    costs a float32 copy of g's gradient, written and read, so that a chunk has at least 16 frames.
    """
    return max(1, min(per_multiprocessor * device.multiprocessors // programs, frames // 16))


class WordTile(NamedTuple):
    """What a program of the loss's kernels works on at a time."""

    groups: int
    rows: int
    lanes: int
    num_warps: int = 1


def reading_tile(tokens: int, words: int, element_size: int, device: _device.DeviceFacts) -> WordTile:
    """One warp and 2048 elements: a row is reduced without other warps however the compiler lays out a tile.

    float16 16x300x60x1024 in 155 us; 1024 elements 183, 4096 170, two warps side by side 200. Triton 3.6 spreads the
    groups of a tile of four warps over them and exchanges every element: 5100.
    """
    return _word_tile(tokens, words, element_size, 2048, 1024, device)


def writing_tile(tokens: int, words: int, element_size: int, device: _device.DeviceFacts) -> WordTile:
    """One warp and 512 elements: float16 16x300x60x1024 in 315 us. 1024 elements 365, four warps with as many: 440."""
    return _word_tile(tokens, words, element_size, 512, 512, device)


def _word_tile(
    tokens: int, words: int, element_size: int, elements: int, of_a_row: int, device: _device.DeviceFacts
) -> WordTile:
    lanes = min(_power(words), device.warp_size * 16 // element_size)
    groups = min(_power(-(-words // lanes)), max(1, of_a_row // lanes))
    return WordTile(groups, min(_power(tokens), max(1, elements // (groups * lanes))), lanes)


class Skew(NamedTuple):
    """How the nodes of a lattice lie between the kernels: (t, u) at (t + u) * step + sign * u, of `places` places."""

    places: int
    step: int
    sign: int


def skew(frames: int, tokens: int) -> Skew:
    """A diagonal after the other, each as long as the shorter side: its nodes by token, or by frame."""
    diagonals = frames + tokens - 1
    if tokens <= frames:
        return Skew(diagonals * tokens, tokens, 1)
    return Skew(diagonals * frames, frames + 1, -1)


# Tokens that a walk takes at once, and those that one warp takes: neighbours in a warp exchange without a barrier.
WALK_TOKENS = 512
WALK_TOKENS_PER_WARP = 64
SHARES_BLOCK = 512


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
    tile = joint_forward_tile(tokens, features, dropout == "seed", facts)
    grid = batches * -(-frames // tile.frames) * -(-tokens // tile.tokens) * -(-features // tile.features)
    return kernels.transducer_joint_forward.bind(
        (grid,),
        (frames, tokens, features, round(spec.dropout * WORD), spec.scale),
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
    f, g = f.contiguous(), g.contiguous()
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
    dtypes: Dtypes,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> JointBackwardPlan:
    from . import kernels_joint as kernels

    batches, frames, tokens, features = sizes
    tile = joint_backward_tile(tokens, features, masked, facts)
    blocks = -(-tokens // tile.tokens)
    programs = batches * blocks * -(-features // tile.features)
    chunk = -(-frames // frame_chunks(frames, programs, 5 if masked else 6, facts))
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
        grid = (-(-count // SUM_BLOCK),)
        constants = (min(SUM_PARTS, _power(parts)), SUM_BLOCK)
        return kernels.transducer_joint_sum.bind(grid, (count, parts), constants, device=device, num_warps=4)

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
    dh = dh.contiguous()
    batches, features, device = len(f_len), dh.shape[-1], dh.device
    plan = _joint_backward_plan(
        (batches, *sizes, features),
        batch_offset is not None,
        kept is not None,
        scale,
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
    tile = reading_tile(tokens, words, x_dtype.itemsize, facts)
    whole = words <= tile.groups * tile.lanes
    return kernels.transducer_loss_words.bind(
        (batches * frames * -(-tokens // tile.rows),),
        (*sizes, blank, *skew(frames, tokens)),
        (packed, normalize, whole, tile.groups, tile.rows, tile.lanes),
        device=device,
        num_warps=tile.num_warps,
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
    block = min(WALK_TOKENS, max(2, _power(tokens)))
    numbers = (*sizes, *skew(frames, tokens))
    walk = kernels.transducer_loss_walk.bind(
        (batches * (2 if alpha else 1),),
        numbers,
        (alpha, tokens > block, block),
        device=device,
        num_warps=max(1, block // WALK_TOKENS_PER_WARP),
    )
    grid = (batches * -(-skew(frames, tokens).places // SHARES_BLOCK),)
    shares = kernels.transducer_loss_shares.bind(grid, numbers, (SHARES_BLOCK,), device=device, num_warps=4)
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
    tile = writing_tile(tokens, words, x_dtype.itemsize, facts)
    return kernels.transducer_loss_backward.bind(
        (batches * frames * -(-tokens // tile.rows),),
        (*sizes, blank),
        (packed, through_softmax, tile.groups, tile.rows, tile.lanes),
        device=device,
        num_warps=tile.num_warps,
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
    x, label = x.contiguous(), label.contiguous()
    batches, device, facts = len(f_len), x.device, _device.facts(x.device)
    given = _dtypes(label, f_len, y_len, batch_offset)
    both = want_nodes or want_scores
    words_plan = _loss_words_plan(
        (batches, *sizes, x.shape[-1]), blank, batch_offset is not None, normalize, given, x.dtype, device, facts
    )
    plan = _loss_walk_plan((batches, *sizes), both, want_scores, _dtypes(x, f_len, y_len), device, facts)
    places = skew(*sizes).places
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
    return dx
