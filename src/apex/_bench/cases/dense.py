"""Dense layers: two with gelu between them, the multi-layer perceptron, accumulation of weight gradients.

Most of these cases are limited by matrix products, not by memory: their notes count floating-point operations.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...fused_dense import FusedDenseGeluDense
from ...mlp import MLP
from ...ops._tolerance import tensor_core_error
from ...ops.dense import mlp_forward, reference, wgrad_gemm_accum
from ..directions import SHORT, Random, exact, prepare, with_peers
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

# rows, input and output features, intermediate features
GPU_GELU, CPU_GELU = (torch.float16, 8192, 4096, 16384), (torch.float32, 256, 256, 1024)
# rows, sizes
GPU_MLP, CPU_MLP = (torch.float16, 4096, [1024] * 4), (torch.float32, 512, [256] * 4)
# rows, input features, output features
GPU_ACCUMULATION, CPU_ACCUMULATION = (torch.bfloat16, 8192, 4096, 4096), (torch.float32, 512, 512, 512)
# NVIDIA apex leaves its weights uninitialised, and a GPU multiplies zeros at a higher clock than random numbers. Its
# calls to cuBLASLt, made by hand on the same H200, took 2902 us forward and 6358 backward with zero weights, 3391 and
# 7403 with weights as in torch.nn.Linear; the recorded times are 2925 and 6516. So the recorded times are shown beside
# both cases, and the case with zero weights is the fair comparison.
UNFILLED = "; nvidia apex was recorded with weights that nobody filled: compare the case of zero weights"


def _tensors(device: torch.device, dtype: torch.dtype, rows: int, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return a normal input, weights and biases as in `torch.nn.Linear`, and gradients of a mean over the rows."""
    random = Random(device)

    def uniform(shape: tuple[int, ...], bound: float) -> Tensor:
        return torch.empty(shape, device=device).uniform_(-bound, bound, generator=random.generator).to(dtype)

    layers = [(sizes[i], sizes[i + 1]) for i in range(len(sizes) - 1)]
    weights = [uniform((outs, ins), ins**-0.5) for ins, outs in layers]
    biases = [uniform((outs,), ins**-0.5) for ins, outs in layers]
    x, dy = (random.normal(rows, width) for width in (sizes[0], sizes[-1]))
    return x.to(dtype).requires_grad_(), *weights, *biases, (dy / rows**0.5).to(dtype)


def _linear(weight: nn.Parameter, bias: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = weight, bias
    return layer


def _prepare_gelu(
    dtype: torch.dtype, rows: int, outer: int, inner: int, zero: bool, direction: str, device: torch.device
) -> Prepared:
    x, *parameters, dy = _tensors(device, dtype, rows, (outer, inner, outer))
    if zero:
        for parameter in parameters:
            parameter.zero_()
    w1, w2, b1, b2 = map(nn.Parameter, parameters)
    ours = FusedDenseGeluDense(1, 1, 1)
    for name, parameter in (("weight1", w1), ("bias1", b1), ("weight2", w2), ("bias2", b2)):
        ours.register_parameter(name, parameter)
    eager = nn.Sequential(_linear(w1, b1), nn.GELU("tanh"), _linear(w2, b2))
    leaves = (x, w1, b1, w2, b2)
    expected = exact(reference.dense_gelu_dense, leaves, dy, direction, dtype, [max(rows, inner)] * 6)
    return prepare(with_peers(ours, eager, device), (x,), dy, direction, expected, leaves)


def _prepare_mlp(dtype: torch.dtype, rows: int, sizes: list[int], direction: str, device: torch.device) -> Prepared:
    x, *parameters, dy = _tensors(device, dtype, rows, sizes)
    layers = len(sizes) - 1
    ours = MLP([1] * (layers + 1))
    weights, biases = parameters[:layers], parameters[layers:]
    for layer in range(layers):
        ours.register_parameter(f"weight_{layer}", nn.Parameter(weights[layer]))
        ours.register_parameter(f"bias_{layer}", nn.Parameter(biases[layer]))
    eager = nn.Sequential()
    for weight, bias in zip(ours.weights, ours.biases, strict=True):
        eager.extend([_linear(weight, bias), nn.ReLU()])  # type: ignore[arg-type]
    wide_x, wide = x.detach().double(), [weight.double() for weight in weights]
    if direction == "fwd":
        results: Sequence[Tensor] = (reference.mlp(wide_x, wide, [b.double() for b in biases], "relu"),)
    else:
        # From the stored outputs: values rounded to zero decide where relu passes gradients.
        stored = [output.double() for output in mlp_forward(x.detach(), weights, biases, "relu")]
        dx, dweights, dbiases = reference.mlp_backward(dy.double(), wide_x, stored, wide, "relu")
        results = (dx, *dweights, *dbiases)
    expected = [Expected(result, dtype, max(rows, *sizes)) for result in results]
    leaves = (x, *ours.weights, *ours.biases)
    return prepare(with_peers(ours, eager, device), (x,), dy, direction, expected, leaves)


def _prepare_accumulation(dtype: torch.dtype, rows: int, ins: int, outs: int, device: torch.device) -> Prepared:
    random = Random(device)
    x, dy = (random.normal(rows, width, dtype=dtype) for width in (ins, outs))
    total = torch.zeros(outs, ins, device=device)

    def ours() -> tuple[Tensor]:
        wgrad_gemm_accum(x, dy, total)
        return (total,)

    def eager() -> tuple[Tensor]:
        return (total.add_(dy.t().mm(x)),)

    def started(call: Call, checked: bool) -> Call:
        """Return a call that starts from zero if it is checked; a timed call keeps accumulating."""

        def from_zero() -> Sequence[Tensor]:
            total.zero_()
            return call()

        return from_zero if checked else call

    calls: dict[str, Call] = {OURS: ours, "torch": eager}
    product = dy.double().t() @ x.double()
    slack = tensor_core_error(rows) if device.type == "cuda" else 0.0
    return Prepared(
        {name: functools.partial(started, call, True) for name, call in calls.items()},
        # In the inputs' dtype, because the peer rounds the product to it before the addition.
        [Expected(product, dtype, rows, slack)],
        timed={name: functools.partial(started, call, False) for name, call in calls.items()},
        expected_of={OURS: [Expected(product, torch.float32, rows, slack)]},
    )


def _floating_point(operations: float) -> str:
    return f"{operations / 1e12:.2f} TFLOP" if operations >= 1e11 else f"{operations / 1e9:.1f} GFLOP"


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return the cases; a CPU gets smaller ones."""
    on_gpu, result = device.type == "cuda", list[Case]()

    def add(
        name: str, moved: int, operations: float, make: Any, note: str = "", recorded_as: str | None = None
    ) -> None:
        result.append(Case(name, moved, make, note=_floating_point(operations) + note, recorded_as=recorded_as))

    dtype, rows, outer, inner = GPU_GELU if on_gpu else CPU_GELU
    name = f"dense_gelu_dense {SHORT[dtype]} {rows}x{outer}x{inner}"
    for zero, (way, products) in itertools.product((False, True)[: 1 + on_gpu], (("fwd", 2), ("bwd", 4))):
        # Activations and weights are counted once each, and the intermediate layer's, which the backward pass reads.
        moved = 2 * rows * outer + (2 + products // 4) * rows * inner + products * outer * inner
        make = functools.partial(_prepare_gelu, dtype, rows, outer, inner, zero, way)
        note = UNFILLED if on_gpu and not zero else ""
        words, operations = " zero weights" * zero, products * 2.0 * rows * outer * inner
        add(f"{name}{words} {way}", dtype.itemsize * moved, operations, make, note, f"{name} {way}")
    dtype, rows, sizes = GPU_MLP if on_gpu else CPU_MLP
    layers, width = len(sizes) - 1, sizes[0]
    for way, products in (("fwd", layers), ("bwd", 2 * layers)):
        moved = dtype.itemsize * ((products + 1) * rows * width + products * width * width)
        name = f"mlp relu {SHORT[dtype]} {rows}x[{width}]*{len(sizes)} {way}"
        make = functools.partial(_prepare_mlp, dtype, rows, sizes, way)
        add(name, moved, products * 2.0 * rows * width * width, make)
    dtype, rows, ins, outs = GPU_ACCUMULATION if on_gpu else CPU_ACCUMULATION
    moved = dtype.itemsize * rows * (ins + outs) + 8 * ins * outs
    make = functools.partial(_prepare_accumulation, dtype, rows, ins, outs)
    add(f"wgrad_accum {SHORT[dtype]}->fp32 {rows}x{ins}x{outs}", moved, 2.0 * rows * ins * outs, make)
    return result[-3:] if quick and on_gpu else result


register(Family("dense", "dense layers with gelu, multi-layer perceptron, weight gradients", cases))
