"""Examples of batch norm: with ReLU and with an addend, as in ResNet-50, plain, of [N, ..., C], and in evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Row, Sizes
from .op import batch_norm

_ADDEND = ("input", "z")


def _example(
    name: str,
    *,
    addend: bool = False,
    relu: bool = True,
    training: bool = True,
    memory: str = "channels last",
    listed: Sequence[Sizes] = (),
    **others: Any,
) -> Example:
    """Return an example of images in a memory format: "channels first", "channels last", or "[N, ..., C]"."""
    channel_dim = -1 if memory == "[N, ..., C]" else 1

    def arguments(make: Make, images: int, channels: int, height: int, width: int) -> dict[str, Any]:
        def image() -> Tensor:
            if channel_dim == -1:
                return make.normal(images, height, width, channels)
            return make.image(images, channels, height, width, channels_last=memory == "channels last")

        wide = torch.promote_types(make.dtype, torch.float32)
        made = {"input": image(), "z": image() if addend else None}
        made["weight"], made["bias"] = (make.weight(channels, dtype=wide) for _ in range(2))
        running = None if training else make.weight(channels, dtype=wide, grad=False).abs_()
        return {**made, "running_mean": running, "running_var": running}

    def function(input: Tensor, z: Any, weight: Tensor, bias: Tensor, mean: Any, variance: Any) -> Tensor:
        return batch_norm(input, mean, variance, weight, bias, training, z=z, relu=relu, channel_dim=channel_dim)

    def before_relu(input: Tensor, z: Any, weight: Tensor, bias: Tensor, mean: Any, variance: Any) -> Tensor:
        # movedim(1, 1) changes nothing.
        first, z = (None if each is None else each.movedim(channel_dim, 1) for each in (input, z))
        return _norm(first, z, weight, bias, mean, variance, training).movedim(1, channel_dim)

    return Example(
        name,
        function,
        arguments,
        torch=(lambda *given: before_relu(*given).relu()) if relu else before_relu,
        sizes="images x channels x height x width",
        # One program takes a channel of the first, several programs a channel of the second.
        small=[(3, 12, 3, 5), (2, 3, 40, 33)],
        kink=before_relu if relu else None,
        draw=lambda random: random.image(random.choice((1, 8, 16, 64)), 2048),
        listed=[
            *(Row("cuda", torch.float16, sizes) for sizes in listed),
            *(Row("cpu", torch.float32, sizes) for sizes in ((8, 64, 56, 56), (8, 256, 28, 28)) if listed),
        ],
        **others,
    )


def _norm(
    input: Any, z: Tensor | None, weight: Tensor, bias: Tensor, mean: Any, variance: Any, training: bool
) -> Tensor:
    if not input.numel():  # PyTorch's statistics of no values are not numbers
        return input * weight.sum() + bias.sum() + (0 if z is None else z)
    output = functional.batch_norm(input, mean, variance, weight, bias, training)
    return output if z is None else output + z


def _asks(images: int, positions: int, channels: int, **_: Any) -> Sizes:
    return images, channels, positions, 1


_LISTED = [(32, 256, 56, 56), (32, 512, 28, 28), (32, 2048, 7, 7)]
_CHANNELS: dict[str, Any] = {"module": lambda images, channels, *sizes: (channels,)}

EXAMPLES = [
    _example(
        "batch_norm",
        title="batch_norm+relu {dtype} {shape}",
        listed=_LISTED,
        usual=(8, 320, 64, 64),
        extensions=["bnp", "syncbn"],
        asks={"batch_norm.apply_config": _asks, "batch_norm.pace": _asks},
    ),
    _example(
        "batch_norm_add",
        addend=True,
        title="batch_norm+add+relu {dtype} {shape}",
        listed=_LISTED,
        public=[Public("parallel:SyncBatchNorm", *_ADDEND, **_CHANNELS, fuse_relu=True)],
    ),
    _example(
        "batch_norm_plain",
        relu=False,
        memory="channels first",
        public=[
            Public("contrib.cudnn_gbn:GroupBatchNorm2d", "input", **_CHANNELS, group_size=1),
            Public("parallel:SyncBatchNorm", "input", **_CHANNELS),
        ],
    ),
    _example(
        "batch_norm_nhwc",
        addend=True,
        memory="[N, ..., C]",
        public=[Public("contrib.groupbn:BatchNorm2d_NHWC", *_ADDEND, **_CHANNELS, fuse_relu=True)],
    ),
    # PyTorch rounds the weight's gradient to half precision if channels are last and the output's gradient lies
    # otherwise.
    _example("batch_norm_eval", training=False, relu=False, memory="channels first"),
]
