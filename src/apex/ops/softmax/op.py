"""Scaled, masked softmax with dropout: checks, dispatch and autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors
from . import native, reference
from .launches import triton_backward, triton_forward
from .self_check import self_check
from .spec import SoftmaxSpec

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**16
# Below this many elements the host is the limit, and PyTorch's own operator is quicker where it does the same.
NATIVE_BELOW = 1 << 22

FAMILY = _library.register_family(
    _library.OpFamily(
        "softmax",
        "scaled, masked softmax with dropout, forward and backward",
        self_check,
        small_inputs=f"PyTorch's operator below {NATIVE_BELOW:,} elements where there is no mask",
    )
)

_SUPPORTED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def masked_softmax(
    input: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(`scale` * input) over the last dimension, masked, then dropout with probability `dropout`.

    `mask` is broadcast to the input: bool or uint8 hides what is not zero, floating-point is added after the scale; it
    gets no gradient. `causal` hides from query i the keys beyond i + keys - queries. A row of which nothing is left is
    zero. The output has the input's dtype; the arithmetic is float32, or float64 for float64.
    """
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if mask is None and not causal and not dropout and _is_native(input, scale):
        try:
            return native.plain(input, scale)
        except (RuntimeError, IndexError):  # says what is wrong in the same words as for other inputs
            check_arguments(input, None, SoftmaxSpec(scale))
            raise
    spec = SoftmaxSpec(scale, causal, dropout)
    check_arguments(input, mask, spec)
    noise = draw_noise(input, spec) if dropout else None
    if torch.is_grad_enabled() and input.requires_grad:
        return _apply_node(input, mask, noise, spec)
    if torch.compiler.is_compiling():
        return torch.ops.apex.softmax_forward(input, mask, noise, *spec)[0]
    return _forward(input, mask, spec, noise)[0]


def _is_native(input: Tensor, scale: float) -> bool:
    """Whether PyTorch's operator, which knows neither scale nor mask, is the quicker way to the same result.

    On a CPU it is. On a GPU it is for a small input, whose time is the host's: two operators are quicker than an
    autograd node of ours (29 and 38 us on an H200's host), but not than a kernel launch without one.
    """
    if torch._C._is_any_autocast_enabled() or input.dtype not in _SUPPORTED or not input.dim():
        return False  # autocast would make the result float32; the others are refused later
    if input.device.type == "cpu":
        return not _library.runs_triton(FAMILY, input)
    if input.numel() >= NATIVE_BELOW or _library.requested() == "triton":
        return False
    return scale == 1.0 or (input.requires_grad and torch.is_grad_enabled() and native.is_exact(input.dtype, scale))


def check_arguments(input: Tensor, mask: Tensor | None, spec: SoftmaxSpec) -> None:
    """Refuses what does not fit, in clear words, before anything is touched."""
    if input.dtype not in _SUPPORTED or input.dim() == 0:
        raise TypeError(
            f"softmax needs an input of float16, bfloat16, float32 or float64 with at least one dimension, got "
            f"{input.dtype} of shape {list(input.shape)}"
        )
    if input.shape[-1] > LONGEST_ROW:
        raise ValueError(f"input has rows of {input.shape[-1]} elements, at most {LONGEST_ROW} can be addressed")
    if spec.causal:
        if mask is not None:
            raise ValueError("causal=True takes no mask; join the two into one mask")
        if input.dim() < 2:
            raise ValueError(f"causal=True needs an input [..., queries, keys], got shape {list(input.shape)}")
    if not 0.0 <= spec.dropout <= 1.0:
        raise ValueError(f"dropout={spec.dropout} must be a probability, between 0 and 1")
    if mask is not None:
        _check_mask(input, mask)


def _check_mask(input: Tensor, mask: Tensor) -> None:
    if not isinstance(mask, Tensor):
        check_tensors(mask=mask)
    if mask.dtype not in (torch.bool, torch.uint8) and mask.dtype not in _SUPPORTED:
        raise TypeError(f"mask must be bool or uint8 (hides) or floating-point (is added), got {mask.dtype}")
    if mask.device != input.device:
        raise ValueError(f"mask is on {mask.device}, the input on {input.device}")
    sizes = input.shape[input.dim() - mask.dim() :] if mask.dim() <= input.dim() else None
    if sizes is None or any(m != 1 and m != s for m, s in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"mask of shape {list(mask.shape)} cannot be broadcast to the input's {list(input.shape)}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("mask requires a gradient, but none is computed for it; detach it")


def draw_noise(input: Tensor, spec: SoftmaxSpec) -> Tensor | None:
    """What decides which elements are dropped, from the default generator of the input's device.

    None without dropout. Where kernels run, one int64: the seed of Philox streams that both passes draw the same
    numbers from, so that no mask is stored. Elsewhere a bool per element, True where it is kept.
    """
    if not spec.dropout:
        return None
    if input.numel() and _library.runs_triton(FAMILY, input):
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=input.device)
    return torch.rand(input.shape, dtype=torch.float32, device=input.device) >= spec.dropout


def softmax_forward(
    input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and the probabilities before dropout, without autograd; the same tensor where nothing is dropped.

    `noise` is what `draw_noise` gave, or a bool or uint8 per element that is not zero where it is kept.
    """
    check_arguments(input, mask, spec)
    _check_noise(input, spec, noise)
    with torch.no_grad():
        return _forward(input, mask, spec, noise)


def _forward(input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    if not input.numel():
        empty = torch.empty_like(input)
        return empty, empty if noise is None else torch.empty_like(input)
    if _library.runs_triton(FAMILY, input):
        return triton_forward(input, mask, spec, noise)
    if type(input) is Tensor and input.device.type == "cpu":
        return native.forward(input, mask, spec, noise)
    return reference.forward(input, mask, spec, noise)


def softmax_backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, noise: Tensor | None = None) -> Tensor:
    """The gradient of the input, without autograd, from the probabilities and the noise of the forward pass."""
    if dy.shape != probabilities.shape or dy.device != probabilities.device:
        raise ValueError(
            f"dy has shape {list(dy.shape)} on {dy.device}, the probabilities {list(probabilities.shape)} on "
            f"{probabilities.device}"
        )
    check_arguments(probabilities, None, spec)
    _check_noise(probabilities, spec, noise)
    with torch.no_grad():
        return _backward(dy, probabilities, spec, noise)


def _backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, noise: Tensor | None) -> Tensor:
    if not dy.numel():
        return torch.empty_like(probabilities)
    if _library.runs_triton(FAMILY, probabilities):
        return triton_backward(dy, probabilities, spec, noise)
    if type(probabilities) is Tensor and type(dy) is Tensor and dy.device.type == "cpu":
        return native.backward(dy, probabilities, spec, noise)
    return reference.backward(dy, probabilities, spec, noise)


def _check_noise(input: Tensor, spec: SoftmaxSpec, noise: Tensor | None) -> None:
    if (noise is None) != (spec.dropout == 0):
        raise ValueError(f"noise must be given where there is dropout and only there; dropout={spec.dropout}")
    if noise is None:
        return
    if noise.device != input.device:
        raise ValueError(f"noise is on {noise.device}, the input on {input.device}")
    if noise.dtype == torch.int64 and noise.numel() == 1:
        if input.numel() and not _library.runs_triton(FAMILY, input):
            raise ValueError("noise is a seed, which only kernels understand; pass what draw_noise gives for the input")
    elif noise.dtype not in (torch.bool, torch.uint8) or noise.shape != input.shape:
        raise ValueError(
            f"noise must be one int64 or a bool or uint8 per element, got {noise.dtype} of shape {list(noise.shape)}"
        )


def keep_mask(noise: Tensor, probabilities: Tensor, spec: SoftmaxSpec) -> Tensor:
    """One uint8 per element: 1 where `noise` keeps it, 0 where it drops it."""
    if noise.dtype != torch.int64:
        return (noise != 0).to(torch.uint8)
    # What is kept of equal probabilities is not zero.
    equal = torch.zeros(probabilities.shape, dtype=torch.bfloat16, device=probabilities.device)
    return (softmax_forward(equal, None, SoftmaxSpec(dropout=spec.dropout), noise)[0] != 0).to(torch.uint8)


def forward_and_save(ctx: Any, input: Tensor, mask: Tensor | None, noise: Tensor | None, spec: SoftmaxSpec) -> Tensor:
    """The forward of every softmax's autograd Function, for arguments that were checked."""
    if torch.compiler.is_compiling():
        output, probabilities = torch.ops.apex.softmax_forward(input, mask, noise, *spec)
        probabilities = output if noise is None else probabilities
    else:
        output, probabilities = _forward(input, mask, spec, noise)
    ctx.save_for_backward(probabilities, noise)
    ctx.spec = spec
    return output


def backward_from_saved(ctx: Any, dy: Tensor) -> Tensor:
    """The backward of every softmax's autograd Function: the gradient of the input."""
    probabilities, noise = ctx.saved_tensors
    spec = ctx.spec
    if torch.compiler.is_compiling():
        return torch.ops.apex.softmax_backward(dy, probabilities, noise, *spec)
    if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
        if noise is not None:
            raise RuntimeError(
                "softmax with dropout has a first derivative only; use dropout=0 and torch.nn.functional.dropout where "
                "create_graph=True is needed"
            )
        return reference.backward(dy, probabilities, spec)
    return _backward(dy, probabilities, spec, noise)


class SoftmaxFunction(torch.autograd.Function):
    """The autograd node behind `masked_softmax`; its arguments were checked."""

    forward = staticmethod(forward_and_save)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        return backward_from_saved(ctx, dy), None, None, None


_apply_node = _library.quick_apply(SoftmaxFunction)
