"""Softmax cross-entropy of logits, and of a linear layer's outputs: both passes apart, together, and peak memory."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy
from ...ops.xentropy import reference
from ..compiling import compiled
from ..registry import OURS, Call, Case, Expected, Family, MemoryCase, Prepared, register

SMOOTHING = 0.1
NO_PADDING = -100
DTYPES = (torch.bfloat16, torch.float32)
GPU_SHAPES = ((8192, 32000), (8192, 131072), (16384, 50257))
CPU_SHAPES = ((256, 32000), (2048, 1000))
# Rows, features, classes of a linear layer and its loss.
GPU_LINEAR = ((16384, 2048, 131072), (8192, 4096, 50257))
CPU_LINEAR = ((256, 256, 8192),)
TOGETHER = "fwd+grad(in place)"
# Tensors of the logits' size that are read and written; losses and labels are negligible.
TENSORS_MOVED = {"fwd": 1, "bwd": 2, TOGETHER: 3}

Loss = Callable[[Tensor], Tensor]


def make_logits(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Normal logits, uniform labels and gradients of the losses, the same at every run."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, shape[1], shape[:1], generator=generator, device=device)
    return logits, labels, torch.rand(shape[0], generator=generator, device=device)


def _ours(labels: Tensor, logits: Tensor) -> Tensor:
    return SoftmaxCrossEntropyLoss.apply(logits, labels, SMOOTHING, NO_PADDING, logits.dtype != torch.float32)


def _torch(labels: Tensor, logits: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction="none", label_smoothing=SMOOTHING)


def _liger(labels: Tensor, logits: Tensor) -> Tensor:
    """The sum of the losses; leaves the gradient in the place of the logits."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # type: ignore[import-not-found]

    # class weights, ignored index, factor of the squared logarithms, smoothing, reduction
    return LigerCrossEntropyFunction.apply(logits, labels, None, NO_PADDING, 0.0, SMOOTHING, "sum")[0]


def _has_liger(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None


def _losses(labels: Tensor, device: torch.device) -> dict[str, Callable[[], Loss]]:
    makers: dict[str, Callable[[], Loss]] = {
        OURS: lambda: functools.partial(_ours, labels),
        "torch": lambda: functools.partial(_torch, labels),
    }
    if device.type == "cuda":
        makers["compile"] = lambda: compiled(functools.partial(_torch, labels), device)
    return makers


def _call(maker: Callable[[], Loss], logits: Tensor, slopes: Tensor, direction: str) -> Call:
    loss = maker()
    if direction == "fwd":
        return lambda: (loss(logits),)
    losses = loss(logits)
    return lambda: torch.autograd.grad(losses, logits, slopes, retain_graph=True)


def _expected(logits: Tensor, labels: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and gradient in float64."""
    wide = logits.detach().double()
    losses, log_sums = reference.forward(wide, labels, SMOOTHING, NO_PADDING)
    return losses, reference.backward(slopes.double(), wide, log_sums, labels, SMOOTHING, NO_PADDING)


def _prepare(dtype: torch.dtype, shape: tuple[int, int], direction: str, device: torch.device) -> Prepared:
    logits, labels, slopes = make_logits(dtype, shape, device)
    losses, gradient = _expected(logits, labels, slopes)
    calls = {
        name: functools.partial(_call, maker, logits, slopes, direction)
        for name, maker in _losses(labels, device).items()
    }
    return Prepared(calls, [Expected(losses, torch.float32)] if direction == "fwd" else [Expected(gradient, dtype)])


def _together(loss: Loss, logits: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(logits).sum(), logits)


def _prepare_together(dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> Prepared:
    """Loss and gradient in one call; a peer that overwrites its logits is checked and timed on a copy."""
    logits, labels, slopes = make_logits(dtype, shape, device)
    _, gradient = _expected(logits, labels, torch.ones_like(slopes))
    makers = {OURS: functools.partial(_ours, labels)}
    if _has_liger(device):
        makers["liger"] = functools.partial(_liger, labels)

    def make(loss: Loss) -> Call:
        own = logits.detach().clone().requires_grad_()
        return functools.partial(_together, loss, own)

    calls = {name: functools.partial(make, loss) for name, loss in makers.items()}
    return Prepared(calls, [Expected(gradient, dtype)], calls)


def _name(dtype: torch.dtype, shape: tuple[int, int], direction: str) -> str:
    return f"xentropy {str(dtype).removeprefix('torch.')} {shape[0]}x{shape[1]} ls{SMOOTHING} {direction}"


def _case(dtype: torch.dtype, shape: tuple[int, int], direction: str) -> Case:
    moved = TENSORS_MOVED[direction] * shape[0] * shape[1] * dtype.itemsize
    if direction == TOGETHER:
        make: Callable[[torch.device], Prepared] = functools.partial(_prepare_together, dtype, shape)
        return Case(_name(dtype, shape, direction), moved, make, note="ours leaves the logits as they are")
    return Case(_name(dtype, shape, direction), moved, functools.partial(_prepare, dtype, shape, direction))


def make_linear(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs and weights that make logits of order one, and labels."""
    rows, features, classes = shape
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    values = torch.randn(rows, features, generator=generator, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes, features, generator=generator, device=device).mul_(features**-0.5).to(dtype)
    return values, weight.requires_grad_(), torch.randint(0, classes, (rows,), generator=generator, device=device)


def _linear_torch(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(values, weight), labels)


def _linear_liger(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    return LigerFusedLinearCrossEntropyFunction.apply(values, weight, labels)[0]


def _linear_losses(device: torch.device) -> dict[str, Callable[[], Callable[..., Tensor]]]:
    makers: dict[str, Callable[[], Callable[..., Tensor]]] = {OURS: lambda: linear_cross_entropy}
    makers["torch"] = lambda: _linear_torch
    if device.type == "cuda":
        makers["compile"] = lambda: compiled(_linear_torch, device)
    if _has_liger(device):
        makers["liger"] = lambda: _linear_liger
    return makers


def _linear_step(loss: Callable[..., Tensor], tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    found = loss(*tensors)
    return found.detach(), *torch.autograd.grad(found, tensors[:2])


def _linear_call(
    maker: Callable[[], Callable[..., Tensor]], tensors: tuple[Tensor, Tensor, Tensor]
) -> Callable[[], tuple[Tensor, ...]]:
    return functools.partial(_linear_step, maker(), tensors)


def _exact_linear(values: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, some rows at a time: all logits and their gradients would be 70 gigabytes."""
    wide = weight.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64, device=values.device)
    gradients, total = [], torch.zeros_like(wide)
    for part, target in zip(values.detach().split(1024), labels.split(1024), strict=True):
        leaf = part.double().requires_grad_()
        found = functional.cross_entropy(functional.linear(leaf, wide), target, reduction="sum") / len(labels)
        gradient, change = torch.autograd.grad(found, (leaf, wide))
        gradients.append(gradient)
        total += change
        loss += found.detach()
    return loss, torch.cat(gradients), total


def _prepare_linear(shape: tuple[int, int, int], device: torch.device) -> Prepared:
    tensors = make_linear(shape, device)
    # The loss owes its error to the logits, which are rounded to this dtype.
    expected = [Expected(value, tensors[0].dtype) for value in _exact_linear(*tensors)]
    calls = {n: functools.partial(_linear_call, maker, tensors) for n, maker in _linear_losses(device).items()}
    return Prepared(calls, expected)


def _linear_name(shape: tuple[int, int, int], device: torch.device, suffix: str) -> str:
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    return f"linear_xentropy {dtype} {'x'.join(map(str, shape))} {suffix}"


def _linear_case(shape: tuple[int, int, int], device: torch.device) -> Case:
    rows, features, classes = shape
    # Input and weight are read, their gradients written; three matrix products take far longer than that.
    moved = 2 * features * (rows + classes) * (2 if device.type == "cuda" else 4)
    return Case(
        _linear_name(shape, device, "step"),
        moved,
        functools.partial(_prepare_linear, shape),
        note="bound by three matrix products, not by the bytes of the floor",
    )


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Logits in both directions and at once, then whole steps of a linear layer and its loss."""
    on_gpu = device.type == "cuda"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    if quick:
        return [_case(torch.float32, shapes[0], way) for way in ("fwd", "bwd")]
    ways = ("fwd", "bwd", TOGETHER) if on_gpu else ("fwd", "bwd")
    return [
        *(_case(dtype, shape, way) for dtype in DTYPES for shape in shapes for way in ways),
        *(_linear_case(shape, device) for shape in (GPU_LINEAR if on_gpu else CPU_LINEAR)),
    ]


def _memory_steps(shape: tuple[int, int, int], device: torch.device) -> dict[str, Callable[[], object]]:
    tensors = make_linear(shape, device)
    makers = {name: maker for name, maker in _linear_losses(device).items() if name != "compile"}
    return {name: _linear_call(maker, tensors) for name, maker in makers.items()}


def memory_cases(device: torch.device, quick: bool) -> Sequence[MemoryCase]:
    """A step of a linear layer and its loss, gradients included; only a GPU's allocator counts its peak."""
    if device.type != "cuda" or quick:
        return ()
    return [
        MemoryCase(_linear_name(shape, device, "memory"), functools.partial(_memory_steps, shape))
        for shape in GPU_LINEAR[:1]
    ]


register(Family("xentropy", "softmax cross-entropy, also of a linear layer's outputs", cases, memory_cases))
