"""Convolutions of images with few channels, by the legend of `op.py`, and the gradient of their weights.

A program has P_BLOCK outputs, which are counted image by image and row by row, and O_BLOCK of their channels. The
window of an output has TALL rows of WIDE contiguous values; `pitch` is the width of an image in strides, so that Triton
sees that windows begin at a multiple of STRIDE * 4 values. WIDEN: for Triton's interpreter, which takes bfloat16 for
integers in a product.
"""

import triton
import triton.language as tl

from .._launch import kernel

SIZES = ["positions", "per_image", "columns", "height", "pitch"]


@triton.jit
def _windows(
    images, place, positions, per_image, columns, height, pitch,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The values of the windows of outputs, [P_BLOCK, TALL * WIDE]; beyond the last output there are copies of it."""
    place = tl.minimum(place, positions - 1)
    image, row, column = place // per_image, place % per_image // columns, place % columns
    begin = ((image.to(tl.int64) * height + row * STRIDE) * pitch + column) * (STRIDE * 4)
    value = tl.arange(0, TALL * WIDE)
    within = (value // WIDE) * pitch * (STRIDE * 4) + value % WIDE
    return tl.load(images + begin[:, None] + within[None, :])


@kernel
@triton.jit(do_not_specialize=SIZES)
def stem_forward(
    images, weight, output,
    positions, per_image, columns, channels, height, pitch,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, P_BLOCK: tl.constexpr, O_BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    blocks = channels // O_BLOCK
    place = (tl.program_id(0) // blocks) * P_BLOCK + tl.arange(0, P_BLOCK)
    channel = (tl.program_id(0) % blocks) * O_BLOCK + tl.arange(0, O_BLOCK)
    windows = _windows(images, place, positions, per_image, columns, height, pitch, STRIDE, TALL, WIDE)
    weights = tl.load(weight + tl.arange(0, TALL * WIDE)[:, None] * channels + channel[None, :])
    if WIDEN:
        windows, weights = windows.to(tl.float32), weights.to(tl.float32)
    found = tl.dot(windows, weights)
    offset = place.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(output + offset, found.to(output.dtype.element_ty), (place < positions)[:, None])


@kernel
@triton.jit(do_not_specialize=[*SIZES, "programs"])
def stem_weight_gradient(
    images, dy, partials,
    positions, per_image, columns, channels, height, pitch, programs,
    STRIDE: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr, P_BLOCK: tl.constexpr, O_BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """The gradient over every `programs`-th tile of outputs, [programs, TALL * WIDE, channels]."""
    blocks = channels // O_BLOCK
    program = tl.program_id(0) // blocks
    channel = (tl.program_id(0) % blocks) * O_BLOCK + tl.arange(0, O_BLOCK)
    total = tl.zeros((TALL * WIDE, O_BLOCK), tl.float32)
    for tile in tl.range(program, tl.cdiv(positions, P_BLOCK), programs):
        place = tile * P_BLOCK + tl.arange(0, P_BLOCK)
        windows = _windows(images, place, positions, per_image, columns, height, pitch, STRIDE, TALL, WIDE)
        offset = place.to(tl.int64)[:, None] * channels + channel[None, :]
        gradient = tl.load(dy + offset, (place < positions)[:, None], other=0.0)
        if WIDEN:
            windows, gradient = windows.to(tl.float32), gradient.to(tl.float32)
        total = tl.dot(tl.trans(windows), gradient, total)
    value = tl.arange(0, TALL * WIDE)
    found = partials + (program.to(tl.int64) * (TALL * WIDE) + value)[:, None] * channels + channel[None, :]
    tl.store(found, total)
