"""Scaled, masked softmax over the last dimension with dropout.

Input and output are `groups` x `queries` x `keys`. `noise` decides which elements are dropped: a seed of one int64 if
kernels run, else one bool per element, True if it is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import FLOATS, check_shape, check_tensors
from .._device import facts, launch_rule
from .._op import Derivative, Kernels, Memory, Op, Saved
from . import config, reference
from .reference import SoftmaxSpec

kernels = _library.LazyModule(f"{__package__}.kernels")

# Positions within a row are 32-bit in the kernels.
LONGEST_ROW = 2**31 - 2**16
# Values of the kernels' MASK and NOISE.
NO_MASK, CAUSAL, HIDES, ADDED = range(4)
NO_NOISE, SEED, KEEP = range(3)


def masked_softmax(
    input: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, causal: bool = False, dropout: float = 0.0
) -> Tensor:
    """Return softmax(`scale` * input) over the last dimension, masked, then dropout with probability `dropout`.

    `mask` is broadcast to the input: bool or uint8 hides elements where it is nonzero, floating-point is added after
    the scale; it gets no gradient. `causal` hides from query i the keys beyond i + keys - queries. A row that is hidden
    completely is zero. The output has the input's dtype; the arithmetic is float32, or float64 for float64.
    """
    spec = SoftmaxSpec(scale, causal, dropout)
    check_arguments(input, mask, spec)
    if mask is None and not causal and not dropout and _is_native(input, scale):
        return torch.softmax(input if scale == 1.0 else input * scale, -1)
    return SOFTMAX(input, _narrowed(mask, input), draw_noise(input, spec), *spec)


def _narrowed(mask: Tensor | None, input: Tensor) -> Tensor | None:
    """Return a float64 mask in float32 if the input is not float64, so that kernels take it."""
    if mask is None or mask.dtype != torch.float64 or input.dtype == torch.float64:
        return mask
    return mask.float()


def _is_native(input: Tensor, scale: float) -> bool:
    """Return whether PyTorch's operator, which has neither scale nor mask, computes the same more quickly on a GPU.

    This holds for a small input, if the host is the limit: two operators are quicker than our autograd node (29 and
    38 us on an H200's host), but slower than a launch without autograd. Half precision must not round the product.
    """
    if torch._C._is_any_autocast_enabled() or not input.is_cuda or _library.requested != "auto":
        return False  # autocast would make the result float32
    exact = input.dtype.itemsize > 2 or (abs(scale) <= 1.0 and abs(math.frexp(scale)[0]) == 0.5)
    differentiable = input.requires_grad and torch.is_grad_enabled()
    return input.numel() < config.NATIVE_BELOW and (scale == 1.0 or (differentiable and exact))


def check_arguments(input: Tensor, mask: Tensor | None, spec: SoftmaxSpec) -> None:
    """Raise for arguments that do not fit together, before anything is changed."""
    if not isinstance(input, Tensor):
        check_tensors(input=input)
    if input.dtype not in FLOATS or input.dim() == 0:
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
    if mask.dtype not in (torch.bool, torch.uint8) and mask.dtype not in FLOATS:
        raise TypeError(f"mask must be bool or uint8 (hides) or floating-point (is added), got {mask.dtype}")
    if mask.device != input.device:
        raise ValueError(f"mask is on {mask.device}, the input on {input.device}")
    sizes = input.shape[input.dim() - mask.dim() :] if mask.dim() <= input.dim() else None
    if sizes is None or any(m != 1 and m != s for m, s in zip(mask.shape, sizes, strict=True)):
        raise ValueError(f"mask of shape {list(mask.shape)} cannot be broadcast to the input's {list(input.shape)}")
    if mask.requires_grad and torch.is_grad_enabled():
        raise ValueError("mask requires a gradient, but none is computed for it; detach it")


def draw_noise(input: Tensor, spec: SoftmaxSpec) -> Tensor | None:
    """Return the noise that decides which elements are dropped, from the default generator of the input's device.

    The noise is None without dropout. If kernels run it is one int64, the seed of a Philox stream: both passes draw the
    same numbers from it, so that no mask is stored. Otherwise it is a bool per element, True if the element is kept.
    """
    if not spec.dropout:
        return None
    if input.numel() != 0 and _library.runs_triton(FAMILY, input):
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=input.device)
    return torch.rand(input.shape, dtype=torch.float32, device=input.device) >= spec.dropout


def softmax_forward(
    input: Tensor, mask: Tensor | None, spec: SoftmaxSpec, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the output and the probabilities before dropout, without autograd; one tensor if nothing is dropped.

    `noise` is the result of `draw_noise`, or a bool or uint8 per element, nonzero if it is kept.
    """
    check_arguments(input, mask, spec)
    _check_noise(input, spec, noise)
    output, probabilities = SOFTMAX.run_or_trace(input, _narrowed(mask, input), noise, *spec)
    return output, output if noise is None else probabilities


def softmax_backward(dy: Tensor, probabilities: Tensor, spec: SoftmaxSpec, noise: Tensor | None = None) -> Tensor:
    """Return the gradient of the input, without autograd, from the probabilities and the noise of the forward pass."""
    check_shape("the gradient", dy, probabilities.shape, probabilities.device)
    check_arguments(probabilities, None, spec)
    _check_noise(probabilities, spec, noise)
    (gradient,) = SOFTMAX.run_or_trace_backward((dy,), (probabilities, noise), spec, (True,))
    assert gradient is not None
    return gradient


def _check_noise(input: Tensor, spec: SoftmaxSpec, noise: Tensor | None) -> None:
    if (noise is None) != (spec.dropout == 0):
        raise ValueError(f"noise must be given where there is dropout and only there; dropout={spec.dropout}")
    if noise is None:
        return
    if noise.device != input.device:
        raise ValueError(f"noise is on {noise.device}, the input on {input.device}")
    if noise.dtype == torch.int64 and noise.numel() == 1:
        if input.numel() != 0 and not _library.runs_triton(FAMILY, input):
            raise ValueError("noise is a seed, which only kernels understand; pass what draw_noise gives for the input")
    elif noise.dtype not in (torch.bool, torch.uint8) or noise.shape != input.shape:
        raise ValueError(
            f"noise must be one int64 or a bool or uint8 per element, got {noise.dtype} of shape {list(noise.shape)}"
        )


def keep_mask(noise: Tensor, probabilities: Tensor, spec: SoftmaxSpec) -> Tensor:
    """Return one uint8 per element: 1 if `noise` keeps it, 0 if it drops it."""
    if noise.dtype != torch.int64:
        return (noise != 0).to(torch.uint8)
    # The softmax of zeros has no zeros, so that dropout alone makes elements zero.
    equal = torch.zeros(probabilities.shape, dtype=torch.bfloat16, device=probabilities.device)
    return (softmax_forward(equal, None, SoftmaxSpec(dropout=spec.dropout), noise)[0] != 0).to(torch.uint8)


def launch_forward(
    input: Tensor, mask: Tensor | None, noise: Tensor | None, scale: float, causal: bool, dropout: float
) -> tuple[Tensor, Tensor | None]:
    shape = input.shape
    heads, mask_strides = 1, [0, 0, 0]
    if causal:
        mask_kind, queries = CAUSAL, shape[-2]
    elif mask is None:
        mask_kind, queries = NO_MASK, input.numel() // shape[-1]
    else:
        mask = _with_plain_rows(mask, shape)
        mask_kind = ADDED if mask.is_floating_point() else HIDES
        queries = shape[-2] if len(shape) > 1 else 1
        heads = shape[-3] if len(shape) > 2 else 1
        for place, (size, stride) in enumerate(zip(mask.shape[-2::-1], mask.stride()[-2::-1], strict=True)):
            mask_strides[2 - place] = 0 if size == 1 else stride
    output = torch.empty_like(input)
    probabilities = None if noise is None else torch.empty_like(input)
    tensors = (input, mask, noise, output, probabilities)
    _launch("softmax_forward", tensors, queries, (heads, *mask_strides), mask_kind, scale, dropout)
    return output, probabilities


def launch_backward(
    dy: Tensor, probabilities: Tensor, noise: Tensor | None, scale: float, causal: bool, dropout: float, *_: Any
) -> Tensor:
    queries = dy.shape[-2] if causal else dy.numel() // dy.shape[-1]
    dx = torch.empty_like(probabilities)
    mask_kind = CAUSAL if causal else NO_MASK
    _launch("softmax_backward", (dy, probabilities, noise, dx), queries, (), mask_kind, scale, dropout)
    return dx


def _launch(
    name: str,
    tensors: tuple[Any, ...],
    queries: int,
    sizes: tuple[int, ...],
    mask_kind: int,
    scale: float,
    dropout: float,
) -> None:
    """Launch a kernel, whose third tensor is the noise; `sizes` are its integers besides the sizes of its rows."""
    first, noise = tensors[0], tensors[2]
    noise_kind = NO_NOISE if noise is None else SEED if noise.dtype == torch.int64 else KEEP
    launch = _prepared_launch(
        name, first.shape, queries, first.dtype.itemsize, sizes, mask_kind, noise_kind, first.device
    )
    launch(tensors, (scale, dropout, reference.kept_scale(dropout) if dropout else 1.0))


@launch_rule
def _prepared_launch(
    name: str,
    shape: torch.Size,
    queries: int,
    itemsize: int,
    sizes: tuple[int, ...],
    mask_kind: int,
    noise_kind: int,
    device: torch.device,
) -> Any:
    *outer, keys = shape
    is_backward = name == "softmax_backward"
    chosen = config.rows_config(queries, keys, mask_kind == CAUSAL, is_backward, itemsize, facts(device))
    blocks, align = -(-queries // chosen.rows), math.gcd(keys, 16)
    return getattr(kernels, name).prepare(
        (math.prod(outer) // queries * blocks,),
        (queries, keys // align, blocks, *sizes),
        MASK=mask_kind,
        NOISE=noise_kind,
        HELD=chosen.held,
        ROWS=chosen.rows,
        BLOCK=chosen.block,
        FULL=queries % chosen.rows == 0 and (keys == chosen.block if chosen.held else keys % chosen.block == 0),
        ALIGN=align,
        num_warps=chosen.num_warps,
    )


def _with_plain_rows(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask of at most four dimensions, with contiguous rows of as many elements as there are keys."""
    keys = shape[-1]
    if mask.dim() > 3 and len(shape) > 4:
        mask = mask.expand(shape).reshape(-1, *shape[-3:])
    if mask.dim() == 0 or mask.shape[-1] != keys:
        mask = mask.expand(*mask.shape[:-1], keys)
    if mask.stride(-1) != 1 and keys != 1:
        mask = mask.contiguous()
    return mask


def _save(arguments: tuple, results: tuple) -> tuple:
    noise = arguments[2]
    return results[0] if noise is None else results[1], noise


def _no_second_derivative(scale: float, causal: bool, dropout: float) -> str | None:
    if not dropout:
        return None
    return (
        "softmax with dropout has a first derivative only; use dropout=0 and torch.nn.functional.dropout where "
        "create_graph=True is needed"
    )


FAMILY = _library.register_family(
    _library.OpFamily(
        "softmax",
        "scaled, masked softmax with dropout, forward and backward",
        small_inputs=f"PyTorch's operator below {config.NATIVE_BELOW:,} elements where there is no mask",
    )
)


SOFTMAX = Op(
    FAMILY,
    "softmax(Tensor input, Tensor? mask, Tensor? noise, float scale, bool causal, float dropout) "
    "-> (Tensor output, Tensor probabilities)",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=lambda input, mask, noise, *settings: (
        input.new_empty(input.shape),
        None if noise is None else input.new_empty(input.shape),
    ),
    saved=Saved("probabilities", "noise", choose=_save),
    memory=Memory(strided=("mask",)),
    derivative=Derivative(
        of=("input",),
        backward=reference.backward,
        shapes=lambda dy, probabilities, *rest: probabilities.new_empty(probabilities.shape),
        once=_no_second_derivative,
    ),
)
