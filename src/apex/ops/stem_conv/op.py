"""The first convolution of a network of images: up to four channels, windows of up to 8 x 8 values, a stride of 2 or 4.

PyTorch's convolutions pad three channels to eight and multiply 32 of them: of a ResNet's stem, 64 images of 224 x 224
in bfloat16, five in six products are of zeros. Here images are padded to four channels, beside which lie the channels
of the pixel to the right: a row of a window is contiguous, and windows are the rows of a matrix that is multiplied by
that of the weights, without being written to memory.

Legend: images [N, H, W, 4], with their borders; weights [R, S, 4, O], padded to R and S, which are powers of 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .. import _library
from .._device import facts, next_power_of_2
from .._op import Op
from ..conv.op import conv_gradients

kernels = _library.LazyModule(f"{__package__}.kernels")

CHANNELS = 4
LARGEST_WINDOW = 8
STRIDES = (2, 4)
HALF = (torch.float16, torch.bfloat16)
# Bytes of shared memory from which on programs get the first of two paces.
ROOMY = 160 * 1024


class Pace(NamedTuple):
    """Outputs of a tile, warps, and tiles that are on their way at a time."""

    tile: int
    num_warps: int
    num_stages: int


FORWARD = Pace(128, 4, 1), Pace(32, 4, 1)
BACKWARD = Pace(64, 8, 3), Pace(32, 8, 1)
# Programs per multiprocessor that share the gradient of the weights.
PROGRAMS = 2


def stem_conv2d(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 2, padding: int = 0) -> Tensor:
    """`torch.nn.functional.conv2d` of [N, C, H, W] by [O, C, R, S], also under autocast.

    Kernels take half precision where `stem_fits` says so; PyTorch's operator does the rest.
    """
    if input.dim() == weight.dim() == 4 and stem_fits(weight.shape[0], weight.shape[1], weight.shape[2:], stride):
        autocast = _library.autocast_dtype(input)
        dtype = input.dtype if autocast is None else autocast
        is_one = input.dtype == weight.dtype if autocast is None else input.dtype != torch.float64
        outputs = [
            (there + 2 * padding - side) // stride + 1
            for there, side in zip(input.shape[2:], weight.shape[2:], strict=True)
        ]
        if dtype in HALF and is_one and input.shape[1] == weight.shape[1] and min(outputs) > 0:
            images = input.to(dtype)
            if _library.runs_triton(FAMILY, images):
                output = _by_kernels(images, weight.to(dtype), stride, padding, outputs)
                return output if bias is None else output + bias.to(dtype)[:, None, None]
    return functional.conv2d(input, weight, bias, stride, padding)


def stem_fits(outputs: int, channels: int, window: Sequence[int], stride: int) -> bool:
    """Whether kernels are for convolutions of this size."""
    return 0 < channels <= CHANNELS and max(window) <= LARGEST_WINDOW and stride in STRIDES and outputs % 16 == 0


def _by_kernels(input: Tensor, weight: Tensor, stride: int, padding: int, outputs: Sequence[int]) -> Tensor:
    channels, *window = weight.shape[1:]
    padded = [next_power_of_2(max(side, stride)) for side in window]
    # Borders up to where the last windows end, which may lie inside the images.
    rows, columns = (
        (padding, stride * (count - 1) + side - padding - there)
        for there, side, count in zip(input.shape[2:], padded, outputs, strict=True)
    )
    absent, below, beside = CHANNELS - channels, padded[0] - window[0], padded[1] - window[1]
    images = functional.pad(input.permute(0, 2, 3, 1), (0, absent, *columns, *rows))
    matrix = functional.pad(weight.permute(2, 3, 1, 0), (0, 0, 0, absent, 0, beside, 0, below))
    return STEM_CONV(images, matrix, stride).permute(0, 3, 1, 2)


def reference(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The convolution [N, H', W', O] in PyTorch's operators, in float32 for half precision."""
    wide = torch.promote_types(images.dtype, torch.float32)
    input, matrix = images.to(wide).permute(0, 3, 1, 2), weight.to(wide).permute(3, 2, 0, 1)
    return functional.conv2d(input, matrix, None, stride).permute(0, 2, 3, 1).to(images.dtype)


def _outputs(images: Tensor, weight: Tensor, stride: int) -> tuple[int, int, int, int]:
    """The shape of the output."""
    rows, columns = ((there - side) // stride + 1 for there, side in zip(images.shape[1:3], weight.shape, strict=False))
    return images.shape[0], rows, columns, weight.shape[3]


def launch_forward(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    shape = _outputs(images, weight, stride)
    output = images.new_empty(shape)
    constants, blocks, pace = _cut(weight, stride, FORWARD, images.device)
    tiles = -(-math.prod(shape[:3]) // pace.tile)
    kernels.stem_forward((tiles * blocks,), (images, weight, output), _sizes(images, shape, stride), **constants)
    return output


def launch_backward(
    dy: Tensor, images: Tensor, weight: Tensor, stride: int, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dimages = _image_gradient(dy, images, weight, stride) if wanted[0] else None
    if not wanted[1]:
        return dimages, None
    constants, blocks, pace = _cut(weight, stride, BACKWARD, dy.device)
    programs = min(-(-math.prod(dy.shape[:3]) // pace.tile), PROGRAMS * facts(dy.device).multiprocessors)
    partials = torch.empty(programs, *weight.shape, dtype=torch.float32, device=dy.device)
    sizes = (*_sizes(images, dy.shape, stride), programs)
    kernels.stem_weight_gradient((programs * blocks,), (images, dy, partials), sizes, **constants)
    return dimages, partials.sum(0).to(weight.dtype)


def _cut(
    weight: Tensor, stride: int, paces: tuple[Pace, Pace], device: torch.device
) -> tuple[dict[str, Any], int, Pace]:
    """What kernels are compiled for, how many blocks of channels there are, and the pace."""
    here, (tall, wide, _, channels) = facts(device), weight.shape
    block, pace = math.gcd(channels, 64), paces[here.shared_memory < ROOMY]
    constants = {"STRIDE": stride, "TALL": tall, "WIDE": wide * CHANNELS, "P_BLOCK": pace.tile, "O_BLOCK": block}
    constants |= {"WIDEN": here.backend == "interpreter", "num_warps": pace.num_warps, "num_stages": pace.num_stages}
    return constants, channels // block, pace


def _sizes(images: Tensor, outputs: Sequence[int], stride: int) -> tuple[int, ...]:
    """Outputs of all images, of an image and of a row, their channels, rows of an image, and its width in strides."""
    count, rows, columns, channels = outputs
    return count * rows * columns, rows * columns, columns, channels, images.shape[1], images.shape[2] // stride


def _image_gradient(dy: Tensor, images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """The gradient of the images by PyTorch's operator; few networks want it."""
    dy, images, weight = dy.permute(0, 3, 1, 2), images.permute(0, 3, 1, 2), weight.permute(3, 2, 0, 1)
    return conv_gradients(dy, images, weight, (0, 0), (True, False), stride)[0].permute(0, 2, 3, 1)  # type: ignore[union-attr]


FAMILY = _library.register_family(
    _library.OpFamily(
        "stem_conv",
        "convolutions of images with few channels, and the gradient of their weights",
        triton_dtypes=frozenset(HALF),
    )
)

STEM_CONV = Op(
    FAMILY,
    "stem_conv(Tensor images, Tensor weight, int stride) -> Tensor",
    reference=reference,
    forward=launch_forward,
    backward=launch_backward,
    fake=lambda images, weight, stride: images.new_empty(_outputs(images, weight, stride)),
    saves=("images", "weight"),
    sums_rounded_products=True,
    checks=[{"images": (2, 22, 30, 4), "weight": (8, 8, 4, 32), "stride": 2}],
)
