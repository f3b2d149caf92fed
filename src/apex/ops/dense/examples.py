"""Examples of dense layers: one, two with gelu between them, a perceptron, and the sum of weight gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Random, Row, Sizes
from .op import dense, dense_gelu_dense, mlp
from .parts import wgrad_gemm_accum
from .reference import ACTIVATIONS, activate

_HALF, _F32 = torch.float16, torch.float32
# NVIDIA apex does not initialise its weights, and a GPU multiplies zeros at a higher clock than random numbers. Made by
# hand on the same H200, its calls to cuBLASLt took 2902 us forward and 6358 backward with zero weights, as recorded.
_UNFILLED = "nvidia apex was recorded with weights that nobody filled; its calls with these took 3391 us fwd, 7403 bwd"


def _weight(make: Make, outputs: int, inputs: int) -> Tensor:
    """Return a weight whose products with normal values have about their size."""
    return make.normal(outputs, inputs, grad=False).mul_(max(1, inputs) ** -0.5).requires_grad_()


def _dense_arguments(make: Make, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    return {"input": make.normal(rows, inputs), "weight": _weight(make, outputs, inputs), "bias": make.normal(outputs)}


def _gelu_arguments(make: Make, rows: int, outer: int, inner: int, *, bias: bool = True) -> dict[str, Any]:
    input, weight1, bias1 = _dense_arguments(make, rows, outer, inner).values()
    weight2, bias2 = _weight(make, outer, inner), make.normal(outer)
    biases = (bias1, bias2) if bias else (None, None)
    return {"input": input, "weight1": weight1, "bias1": biases[0], "weight2": weight2, "bias2": biases[1]}


def _gelu_torch(
    input: Tensor, weight1: Tensor, bias1: Any, weight2: Tensor, bias2: Any, activation: str = "gelu"
) -> Tensor:
    return functional.linear(activate(functional.linear(input, weight1, bias1), activation), weight2, bias2)


def _mlp_arguments(make: Make, rows: int, *sizes: int, bias: bool = True) -> dict[str, Any]:
    """Return whole numbers times powers of two, which make the first two layers exact in half precision.

    Otherwise rounding would decide which hidden values a ReLU lets through, and with them whole gradients.
    """
    made = {"input": make.normal(rows, sizes[0], grad=False).round_().requires_grad_()}
    for layer, shape in enumerate((outputs, inputs) for inputs, outputs in itertools.pairwise(sizes)):
        scale = 2.0 ** -round(math.log2(max(1, shape[1])) / 2)
        for name, size in (("weight", shape), ("bias", shape[:1]))[: 1 + bias]:
            made[f"{name} {layer}"] = make.normal(*size, grad=False).round_().mul_(scale).requires_grad_()
    return made


def _mlp(activation: str, bias: bool, input: Tensor, *parameters: Tensor) -> Tensor:
    """Return the perceptron's output; its parameters come layer by layer."""
    return mlp(input, parameters[:: 1 + bias], parameters[1::2] if bias else (), activation)


def _mlp_torch(activation: str, bias: bool, input: Tensor, *parameters: Tensor, last: bool = True) -> Tensor:
    """Return the perceptron's output; without `last`, the values before the last activation."""
    layers = len(parameters) // (1 + bias)
    for layer in range(layers):
        input = functional.linear(input, *parameters[layer * (1 + bias) :][: 1 + bias])
        input = activate(input, activation) if last or layer + 1 < layers else input
    return input


def _accumulated(input: Tensor, d_output: Tensor, d_weight: Tensor) -> Tensor:
    total = d_weight.clone()
    wgrad_gemm_accum(input, d_output, total)
    return total


def _accumulation_arguments(make: Make, rows: int, inputs: int, outputs: int) -> dict[str, Any]:
    made = {"input": make.normal(rows, inputs, grad=False), "d_output": make.normal(rows, outputs, grad=False)}
    return {**made, "d_weight": make.normal(outputs, inputs, dtype=torch.promote_types(make.dtype, _F32), grad=False)}


def _draw(random: Random, layers: int) -> Sizes:
    multiple, most = random.choice((64, 64, 8, 1)), max(16, math.isqrt(random.most) // 2)
    return random.size(16, 2 * most), *(random.size(16, most, multiple) for _ in range(layers))


def _example(name: str, function: Callable, arguments: Callable, **others: Any) -> Example:
    return Example(name, function, arguments, terms=lambda *sizes: max(sizes), cancels=True, **others)


def _mlp_example(name: str, activation: str, bias: bool = True, **others: Any) -> Example:
    return _example(
        name,
        functools.partial(_mlp, activation, bias),
        functools.partial(_mlp_arguments, bias=bias),
        torch=functools.partial(_mlp_torch, activation, bias),
        sizes="rows x inputs x hidden x hidden x outputs",
        draw=lambda random: _draw(random, 4),
        kink=functools.partial(_mlp_torch, activation, bias, last=False) if activation == "relu" else None,
        **others,
    )


_MLP_PARAMETERS = [f"{kind} {layer}" for kind in ("weight", "bias") for layer in range(3)]

EXAMPLES = [
    _example(
        "dense",
        dense,
        _dense_arguments,
        torch=functional.linear,
        sizes="rows x inputs x outputs",
        small=[(20, 17, 33)],
        public=[
            Public("fused_dense:fused_dense_function", "input", "weight", "bias"),
            Public("fused_dense:dense_no_bias_function", "input", "weight"),
            Public("fused_dense:FusedDense", "input", module=lambda rows, inputs, outputs: (inputs, outputs)),
        ],
    ),
    _example(
        "dense_gelu_dense",
        dense_gelu_dense,
        _gelu_arguments,
        torch=_gelu_torch,
        sizes="rows x outer x inner",
        title="dense_gelu_dense {short} {shape}",
        small=[(70, 33, 100), (1, 1, 1)],
        large=[(2048, 1024, 4096)],
        draw=lambda random: _draw(random, 2),
        listed=[Row("cuda", _HALF, (8192, 4096, 16384), note=_UNFILLED), Row("cpu", _F32, (256, 256, 1024))],
        public=[
            Public("fused_dense:fused_dense_gelu_dense_function", "input", "weight1", "bias1", "weight2", "bias2"),
            Public("fused_dense:FusedDenseGeluDense", "input", module=lambda rows, outer, inner: (outer, inner, outer)),
        ],
        usual=(8192, 1024, 4096),
        extensions=["fused_dense_cuda"],
    ),
    _example(
        "dense_gelu_dense_no_bias",
        dense_gelu_dense,
        functools.partial(_gelu_arguments, bias=False),
        torch=_gelu_torch,
        sizes="rows x outer x inner",
        small=[(12, 8, 16)],
        draw=lambda random: _draw(random, 2),
    ),
    *(
        _example(
            f"dense_{activation}_dense",
            functools.partial(dense_gelu_dense, activation=activation),
            _gelu_arguments,
            torch=functools.partial(_gelu_torch, activation=activation),
            sizes="rows x outer x inner",
            small=[(12, 8, 16)],
        )
        for activation in ACTIVATIONS[4:]
    ),
    _mlp_example(
        "mlp",
        "relu",
        title="mlp relu {short} {s[0]}x[{s[1]}]*4",
        small=[(40, 33, 48, 20, 7), (1, 5, 3)],
        large=[(1500, 1024, 1000, 512, 256)],
        listed=[Row("cuda", _HALF, (4096, *[1024] * 4)), Row("cpu", _F32, (512, *[256] * 4))],
        public=[
            Public("mlp:mlp_function", True, 1, "input", *_MLP_PARAMETERS),
            Public("mlp:MLP", "input", module=lambda rows, *sizes: (sizes,)),
        ],
        extensions=["mlp_cuda"],
    ),
    _mlp_example(
        "mlp_sigmoid",
        "sigmoid",
        small=[(12, 8, 6, 5, 4)],
        public=[Public("mlp:MLP", "input", module=lambda rows, *sizes: (sizes,), activation="sigmoid")],
    ),
    _mlp_example("mlp_none", "none", small=[(12, 8, 6, 5, 4)]),
    _mlp_example("mlp_no_bias", "relu", bias=False, small=[(12, 8, 6, 5, 4)]),
    _example(
        "wgrad_accum",
        _accumulated,
        _accumulation_arguments,
        torch=lambda input, d_output, d_weight: d_weight + d_output.to(d_weight.dtype).t() @ input.to(d_weight.dtype),
        sizes="rows x inputs x outputs",
        small=[(50, 20, 30), (40, 70, 33)],
    ),
]
