"""Softmax cross-entropy of logits and of a linear layer's outputs: both passes separately and together."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...contrib.xentropy import SoftmaxCrossEntropyLoss, linear_cross_entropy, linear_log_probs
from ..directions import Maker, Random, compared, exact, has_liger, long_name, passes, times, with_peers
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register

SMOOTHING = 0.1
NO_PADDING = -100
DTYPES = (torch.bfloat16, torch.float32)
GPU_SHAPES = ((8192, 32000), (8192, 131072), (16384, 50257))
CPU_SHAPES = ((256, 32000), (2048, 1000))
# Rows, features, classes of a linear layer and its loss.
GPU_LINEAR = ((4096, 4096, 128256), (16384, 2048, 131072), (8192, 4096, 50257))
CPU_LINEAR = ((256, 256, 8192),)
SOFTCAP = 30.0
TOGETHER = "fwd+grad(in place)"
LinearLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _ours(logits: Tensor, labels: Tensor) -> Tensor:
    return SoftmaxCrossEntropyLoss.apply(logits, labels, SMOOTHING, NO_PADDING, logits.dtype != torch.float32)


def _torch(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, labels, reduction="none", label_smoothing=SMOOTHING)


def _liger(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses; overwrites the logits with their gradient."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # type: ignore[import-not-found]

    # class weights, ignored index, factor of the squared logarithms, smoothing, reduction
    return LigerCrossEntropyFunction.apply(logits, labels, None, NO_PADDING, 0.0, SMOOTHING, "sum")[0]


def _prepare(dtype: torch.dtype, shape: tuple[int, int], direction: str, device: torch.device) -> Prepared:
    random = Random(device)
    logits = random.normal(*shape, dtype=dtype).requires_grad_()
    labels = random.integers(0, shape[1], shape[0])
    slopes = random.uniform(shape[0]) if direction != TOGETHER else torch.ones(shape[0], device=device)
    if direction != TOGETHER:
        return compared(_ours, _torch, (logits, labels), slopes, direction)

    def make(loss: Callable[..., Tensor]) -> Call:
        own = logits.detach().clone().requires_grad_()  # a peer overwrites its logits
        return lambda: torch.autograd.grad(loss(own, labels).sum(), own)

    losses = {OURS: _ours, **({"liger": _liger} if has_liger(device) else {})}
    calls = {name: functools.partial(make, loss) for name, loss in losses.items()}
    return Prepared(calls, exact(_torch, (logits, labels), slopes, direction, torch.float32), calls)


def _linear_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def make_linear(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and weights that give logits of order one, and labels."""
    rows, features, classes = shape
    random, dtype = Random(device), _linear_dtype(device)
    values = random.normal(rows, features, dtype=dtype).requires_grad_()
    weight = random.normal(classes, features).mul_(features**-0.5).to(dtype).requires_grad_()
    return values, weight, random.integers(0, classes, rows)


def _linear_torch(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(values, weight), labels)


def _capped(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(values, weight, labels, softcap=SOFTCAP)


def _capped_torch(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(SOFTCAP * torch.tanh(functional.linear(values, weight) / SOFTCAP), labels)


def _rows(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return a sum of log-probabilities and entropies, as policies' losses are."""
    found: Any = linear_log_probs(values, weight, labels, outputs=("log_probs", "entropy"))
    return (found.log_probs + 0.1 * found.entropy).mean()


def _rows_torch(values: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = functional.linear(values, weight)
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    return (log_p.gather(-1, labels[:, None])[:, 0] - 0.1 * (log_p.exp() * log_p).sum(-1)).mean()


def _linear_liger() -> Callable[..., Tensor]:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    return lambda values, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(values, weight, labels)[0]


def _linear_step(make: Maker, values: Tensor, weight: Tensor, labels: Tensor) -> Call:
    loss = make()

    def step() -> tuple[Tensor, ...]:
        value = loss(values, weight, labels)
        return value.detach(), *torch.autograd.grad(value, (values, weight))

    return step


def _exact_linear(loss_of: LinearLoss, values: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """Compute loss and gradients in float64, some rows at a time: all logits and gradients would be 70 gigabytes."""
    wide = weight.detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64, device=values.device)
    gradients, total = [], torch.zeros_like(wide)
    for part, target in zip(values.detach().split(1024), labels.split(1024), strict=True):
        leaf = part.double().requires_grad_()
        part_loss = loss_of(leaf, wide, target) * (len(target) / len(labels))
        gradient, change = torch.autograd.grad(part_loss, (leaf, wide))
        gradients.append(gradient)
        total += change
        loss += part_loss.detach()
    return loss, torch.cat(gradients), total


# What is computed: ours, and the same by way of all logits. Rows are averages, so that parts can be added up.
LINEAR: dict[str, tuple[LinearLoss, LinearLoss]] = {
    "linear_xentropy": (linear_cross_entropy, _linear_torch),
    "linear_xentropy softcap": (_capped, _capped_torch),
    "linear_log_probs entropy": (_rows, _rows_torch),
}


def _prepare_linear(kind: str, shape: tuple[int, int, int], device: torch.device) -> Prepared:
    ours, plain = LINEAR[kind]
    tensors = make_linear(shape, device)
    # The loss inherits its error from the logits, which are rounded to this dtype.
    expected = [Expected(value, tensors[0].dtype) for value in _exact_linear(plain, *tensors)]
    makers = with_peers(ours, plain, device, liger=_linear_liger if plain is _linear_torch else None)
    theirs = getattr(functional, "linear_cross_entropy", None)  # PyTorch 2.13
    if theirs is not None and plain is _linear_torch and device.type != "cuda":
        makers["torch_linear"] = lambda: lambda values, weight, labels: theirs(values, weight, labels)
    return Prepared({n: functools.partial(_linear_step, make, *tensors) for n, make in makers.items()}, expected)


def _linear_case(kind: str, shape: tuple[int, int, int], device: torch.device) -> Case:
    rows, features, classes = shape
    # Input and weight are read, their gradients written; three matrix products take far longer.
    moved = 2 * features * (rows + classes) * _linear_dtype(device).itemsize
    name = f"{kind} {long_name(_linear_dtype(device))} {times(shape)} step"
    note = "bound by three matrix products, not by the bytes of the floor"
    return Case(name, moved, functools.partial(_prepare_linear, kind, shape), note=note)


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return cases of logits in both directions and in one call, then whole steps of a linear layer and its loss."""
    on_gpu = device.type == "cuda"
    shapes = GPU_SHAPES if on_gpu else CPU_SHAPES
    result = []
    for dtype, shape in [(torch.float32, shapes[0])] if quick else itertools.product(DTYPES, shapes):
        size = math.prod(shape) * dtype.itemsize  # the logits; losses and labels are negligible
        name = f"xentropy {long_name(dtype)} {times(shape)} ls{SMOOTHING}"
        result += passes(name, {"fwd": size, "bwd": 2 * size}, _prepare, dtype, shape)
        if on_gpu and not quick:
            note = "ours leaves the logits as they are"
            result += passes(name, {TOGETHER: 3 * size}, _prepare, dtype, shape, note=note)
    if not quick:
        shapes_of_linear = GPU_LINEAR if on_gpu else CPU_LINEAR
        result += [_linear_case("linear_xentropy", shape, device) for shape in shapes_of_linear]
        result += [_linear_case(kind, shapes_of_linear[0], device) for kind in list(LINEAR)[1:]]
    return result


register(Family("xentropy", "softmax cross-entropy, also of a linear layer's outputs", cases))
