"""Examples of convolutions with bias, ReLU, a mask or a frozen scale, at sizes of ResNet-50."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Row
from .functions import ConvBias_, ConvBiasMaskReLU_, ConvBiasReLU_, ConvFrozenScaleBiasReLU_

_NOTE = "bytes are those that must move; the products may take longer"


def _biased(x: Tensor, weight: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    return functional.conv2d(x, weight, bias.reshape(-1), stride, padding)


def _masked(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor, padding: int, stride: int) -> Tensor:
    return _biased(x, weight, bias, padding, stride) * mask


def _scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, padding: int, stride: int) -> Tensor:
    return functional.conv2d(x, weight, None, stride, padding) * scale + bias


def _example(
    name: str, function: Callable, before: Callable, public: str, *, relu: bool = True, stride: int = 1, **others: Any
) -> Example:
    """Return an example of `function`, which computes what `before` does in PyTorch, then ReLU if `relu` is set."""

    def arguments(make: Make, images: int, channels: int, outputs: int, side: int, window: int) -> dict[str, Any]:
        x, weight = make.image(images, channels, side, side), make.image(outputs, channels, window, window)
        weight.detach().mul_((channels * window * window) ** -0.5)
        made: dict[str, Any] = {"x": x, "weight": weight}
        if before is _scaled:
            made["scale"] = make.weight(1, outputs, 1, 1, grad=False)
        made["bias"] = make.normal(1, outputs, 1, 1, grad=before is not _scaled)
        if before is _masked:
            place = (side + 2 * (window // 2) - window) // stride + 1
            made["mask"] = make.integers(0, 2, images, outputs, place, place, dtype=torch.int8)
        return {**made, "padding": window // 2, "stride": stride}

    def by_torch(*given: Any) -> Tensor:
        return before(*given).relu() if relu else before(*given)

    def taken() -> list[str]:
        return list(arguments(Make(torch.float32, torch.device("meta")), 1, 1, 1, 1, 1))

    return Example(
        name,
        function,
        arguments,
        torch=by_torch,
        sizes="images x channels x outputs x side x window",
        small=[(2, 6, 10, 7, 3)],
        terms=lambda images, channels, outputs, side, window: max(channels, outputs) * window * window,
        cancels=True,
        kink=before if relu else None,
        differentiable_twice=False,
        accepts_integers=frozenset({"mask"}),
        public=[Public(f"contrib.conv_bias_relu:{public}", *taken())],
        **others,
    )


EXAMPLES = [
    _example(
        "conv_bias_relu",
        ConvBiasReLU_.apply,
        _biased,
        "ConvBiasReLU",
        title="conv+bias+relu {dtype} {s[0]}x{s[1]}x{s[3]}x{s[3]} to {s[2]}, kernel {s[4]}",
        listed=[
            *(
                Row("cuda", torch.float16, sizes, note=_NOTE)
                for sizes in ((32, 64, 256, 56, 1), (32, 128, 128, 28, 3), (32, 512, 2048, 7, 1))
            ),
            Row("cpu", torch.float32, (8, 32, 64, 28, 3), note=_NOTE),
        ],
        extensions=["fused_conv_bias_relu"],
    ),
    _example("conv_bias_mask_relu", ConvBiasMaskReLU_.apply, _masked, "ConvBiasMaskReLU", stride=2),
    _example("conv_frozen_scale", ConvFrozenScaleBiasReLU_.apply, _scaled, "ConvFrozenScaleBiasReLU"),
    _example("conv_bias", ConvBias_.apply, _biased, "ConvBias", relu=False, stride=2),
]
