"""Kernels of convolutions of images with few channels, and of the gradient of their weights; `op.py` has the legend.

A program has P_BLOCK outputs, which are counted image by image and row by row, and O_BLOCK of their channels. The
window of an output has TALL rows of WIDE contiguous values; `pitch` is half the width of an image, so that Triton sees
that windows begin at a multiple of 8 values. WIDEN: for Triton's interpreter, which treats bfloat16 as integers in a
product.
"""

import triton
import triton.language as tl

from .._launch import kernel

SIZES = ["positions", "per_image", "columns", "height", "pitch"]


@triton.jit
def _begin(position, positions, per_image, columns, height, pitch):
    """Return the offsets of the windows of outputs; beyond the last output, the offset of the last."""
    position = tl.minimum(position, positions - 1)
    image, row, column = position // per_image, position % per_image // columns, position % columns
    return ((image.to(tl.int64) * height + row * 2) * pitch + column) * 8


@kernel
@triton.jit(do_not_specialize=SIZES)
def stem_forward(
    images, weight, output,
    positions, per_image, columns, channels, height, pitch,
    TALL: tl.constexpr, WIDE: tl.constexpr, O_BLOCK: tl.constexpr, WIDEN: tl.constexpr, P_BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply one row of the windows at a time, without loading ahead: many other programs hide the latency."""
    blocks = channels // O_BLOCK
    position = (tl.program_id(0) // blocks) * P_BLOCK + tl.arange(0, P_BLOCK)
    channel = (tl.program_id(0) % blocks) * O_BLOCK + tl.arange(0, O_BLOCK)
    begin = _begin(position, positions, per_image, columns, height, pitch)
    value = tl.arange(0, WIDE)
    total = tl.zeros((P_BLOCK, O_BLOCK), tl.float32)
    for row in tl.range(0, TALL):
        windows = tl.load(images + begin[:, None] + (row * pitch * 8 + value)[None, :])
        weights = tl.load(weight + (row * WIDE + value)[:, None] * channels + channel[None, :])
        if WIDEN:
            windows, weights = windows.to(tl.float32), weights.to(tl.float32)
        total = tl.dot(windows, weights, total)
    offset = position.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(output + offset, total.to(output.dtype.element_ty), (position < positions)[:, None])


@kernel
@triton.jit(do_not_specialize=[*SIZES, "programs"])
def stem_weight_gradient(
    images, dy, partials,
    positions, per_image, columns, channels, height, pitch, programs,
    TALL: tl.constexpr, WIDE: tl.constexpr, O_BLOCK: tl.constexpr, WIDEN: tl.constexpr, K_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient over every `programs`-th tile of outputs, [programs, TALL * WIDE, channels]."""
    blocks = channels // O_BLOCK
    program = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * O_BLOCK + tl.arange(0, O_BLOCK)
    value = tl.arange(0, K_BLOCK)
    exists = value < TALL * WIDE
    within = (value // WIDE) * pitch * 8 + value % WIDE
    total = tl.zeros((K_BLOCK, O_BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(positions, P_BLOCK), programs):
        position = tile * P_BLOCK + tl.arange(0, P_BLOCK)
        begin = _begin(position, positions, per_image, columns, height, pitch)
        windows = tl.load(images + begin[:, None] + within[None, :], exists[None, :], other=0.0)
        offset = position.to(tl.int64)[:, None] * channels + channel[None, :]
        gradient = tl.load(dy + offset, (position < positions)[:, None], other=0.0)
        if WIDEN:
            windows, gradient = windows.to(tl.float32), gradient.to(tl.float32)
        total = tl.dot(tl.trans(windows), gradient, total)
    found = partials + (program.to(tl.int64) * (TALL * WIDE) + value)[:, None] * channels + channel[None, :]
    tl.store(found, total, exists[:, None])
