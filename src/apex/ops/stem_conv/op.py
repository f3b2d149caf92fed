"""The first convolution of an image network: up to four channels, with a stride of 2, or of non-overlapping patches.

PyTorch pads three channels to eight and multiplies 32: for a ResNet's stem, 64 images of 224 x 224 in bfloat16, nine of
ten products are with zeros, and it takes 441 us on an H200, the gradient of its weights 291. Here images are padded to
four channels, so that a row of a window is contiguous in memory. Windows are the rows of a matrix that is multiplied by
the matrix of the weights without being written to memory: 36 us for the padding, 105 and 121. Non-overlapping patches
are such a matrix once their order is changed: a vision transformer's, 16 x 16 to 768 channels, take 50 in place of 440
us, and 29 in place of 216.

Legend: images [N, H, W, 4], with their borders; weights [R, S, 4, O], where S is padded to a power of 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._device import facts, next_power_of_2
from .._op import Kernels, Op, Saved
from ..conv.op import conv_gradients

kernels = _library.LazyModule(f"{__package__}.kernels")

# A row of a window is at least 16 values, so that Triton can multiply it: three pixels, padded to four.
CHANNELS, STRIDE, NARROWEST_WINDOW, LARGEST_WINDOW = 4, 2, 3, 8
HALF = (torch.float16, torch.bfloat16)
# Outputs of a tile, forward and for the gradient of the weights, and the latter's programs per multiprocessor. Forward
# 64 took 113 us in place of 105, all rows of a window at once 168. Backward 64 took 134 in place of 115, one program
# 171.
FORWARD_TILE, BACKWARD_TILE, PROGRAMS = 128, 32, 2


def stem_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 2, padding: int = 0) -> Tensor:
    """Return `torch.nn.functional.conv2d` of [N, C, H, W] by [O, C, R, S], also under autocast.

    On GPUs half precision uses the kernels or patches if `stem_fits` says so; PyTorch's operator does the rest.
    """
    outputs, channels, *window = weight.shape
    if input.dim() == 4 and input.shape[1] == channels and stem_fits(outputs, channels, window, stride, padding):
        autocast = _library.autocast_dtype(input)
        dtype = input.dtype if autocast is None else autocast
        is_one = input.dtype == weight.dtype if autocast is None else input.dtype != torch.float64
        counts = [(size + 2 * padding - side) // stride + 1 for size, side in zip(input.shape[2:], window, strict=True)]
        if dtype in HALF and is_one and min(counts) > 0:
            images = input.to(dtype)
            if _library.runs_triton(FAMILY, images):
                if tuple(window) == (stride, stride):  # Dynamo of PyTorch 2.6 compares no tuple with a list
                    output = _by_patches(images, weight.to(dtype), counts)
                else:
                    output = _by_kernels(images, weight.to(dtype), padding, counts)
                return output if bias is None else output + bias.to(dtype)[:, None, None]
    return functional.conv2d(input, weight, bias, stride, padding)


def stem_fits(outputs: int, channels: int, window: Sequence[int], stride: int, padding: int) -> bool:
    """Return whether a convolution of this size is quicker here than in PyTorch."""
    if not 0 < channels <= CHANNELS:
        return False
    if list(window) == [stride, stride]:
        return padding == 0 and stride > 1
    fits = window[1] >= NARROWEST_WINDOW and max(window) <= LARGEST_WINDOW
    return fits and stride == STRIDE and outputs % 16 == 0


def _by_patches(images: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the convolution of non-overlapping patches: a matrix product of their reordered values."""
    (rows, columns), side = counts, weight.shape[2]
    whole = images[:, :, : rows * side, : columns * side]
    patches = whole.unflatten(3, (columns, side)).unflatten(2, (rows, side)).permute(0, 2, 4, 3, 5, 1)
    matrix = weight.permute(0, 2, 3, 1).flatten(1)
    return functional.linear(patches.flatten(3), matrix).permute(0, 3, 1, 2)


def _by_kernels(images: Tensor, weight: Tensor, padding: int, counts: Sequence[int]) -> Tensor:
    """Return the convolution by `STEM_CONV`, with images and weights padded as in the legend."""
    channels, tall, wide = weight.shape[1:]
    absent, beside = CHANNELS - channels, next_power_of_2(wide) - wide
    # Borders reach to the end of the last windows, which may lie inside the images.
    rows, columns = (
        (padding, STRIDE * (count - 1) + side - padding - size)
        for size, side, count in zip(images.shape[2:], (tall, wide + beside), counts, strict=True)
    )
    padded = functional.pad(images.permute(0, 2, 3, 1), (0, absent, *columns, *rows))
    matrix = functional.pad(weight.permute(2, 3, 1, 0), (0, 0, 0, absent, 0, beside))
    return STEM_CONV(padded, matrix).permute(0, 3, 1, 2)


def reference(images: Tensor, weight: Tensor) -> Tensor:
    """Return the convolution, [N, H', W', O], in PyTorch's operators, in float32 for half precision."""
    wide = _library.compute_dtype(images)
    input, matrix = images.to(wide).permute(0, 3, 1, 2), weight.to(wide).permute(3, 2, 0, 1)
    return functional.conv2d(input, matrix, None, STRIDE).permute(0, 2, 3, 1).to(images.dtype)


def _shape(images: Tensor, weight: Tensor) -> tuple[int, int, int, int]:
    rows, columns = ((images.shape[i + 1] - weight.shape[i]) // STRIDE + 1 for i in (0, 1))
    return images.shape[0], rows, columns, weight.shape[3]


def launch_forward(images: Tensor, weight: Tensor) -> Tensor:
    output = images.new_empty(_shape(images, weight))
    sizes, constants = _sizes_and_constants(images, weight, output)
    tiles = -(-sizes[0] // FORWARD_TILE) * (sizes[3] // constants["O_BLOCK"])
    kernels.stem_forward((tiles,), (images, weight, output), sizes, **constants, P_BLOCK=FORWARD_TILE, num_warps=4)
    return output


def launch_backward(
    dy: Tensor, images: Tensor, weight: Tensor, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dimages = dweight = None
    if wanted[0]:  # by PyTorch's operator, since few networks need it
        channels_first = (dy.permute(0, 3, 1, 2), images.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1))
        dimages = conv_gradients(*channels_first, (0, 0), (True, False), STRIDE)[0].permute(0, 2, 3, 1)  # type: ignore[union-attr]
    if wanted[1]:
        sizes, constants = _sizes_and_constants(images, weight, dy)
        programs = min(-(-sizes[0] // BACKWARD_TILE), PROGRAMS * facts(dy.device).multiprocessors)
        partials = torch.empty(programs, *weight.shape, dtype=torch.float32, device=dy.device)
        constants |= {"K_BLOCK": next_power_of_2(weight[..., 0].numel()), "P_BLOCK": BACKWARD_TILE}
        grid, tensors = (programs * (sizes[3] // constants["O_BLOCK"]),), (images, dy, partials)
        kernels.stem_weight_gradient(grid, tensors, (*sizes, programs), **constants, num_warps=4, num_stages=3)
        dweight = partials.sum(0).to(weight.dtype)
    return dimages, dweight


def _sizes_and_constants(images: Tensor, weight: Tensor, outputs: Tensor) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return sizes (outputs in all, per image and per row; channels; image rows; half the width) and constants."""
    count, rows, columns, channels = outputs.shape
    sizes = (count * rows * columns, rows * columns, columns, channels, images.shape[1], images.shape[2] // STRIDE)
    widen = facts(images.device).backend == "interpreter"
    block = math.gcd(channels, 64)
    return sizes, {"TALL": weight.shape[0], "WIDE": weight.shape[1] * CHANNELS, "O_BLOCK": block, "WIDEN": widen}


FAMILY = _library.register_family(
    _library.OpFamily(
        "stem_conv",
        "convolutions of images with few channels, and the gradient of their weights",
        triton_dtypes=frozenset(HALF),
    )
)

STEM_CONV = Op(
    FAMILY,
    "stem_conv(Tensor images, Tensor weight) -> Tensor",
    reference=reference,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=lambda images, weight: images.new_empty(_shape(images, weight)),
    saved=Saved("images", "weight"),
)
