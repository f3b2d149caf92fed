"""Softmax cross-entropy of whole logits, with label smoothing and padding.

Logits are (..., classes), labels (...). Beside the losses the log of each row's sum of exponentials (`log_sums`) is
computed, which the backward pass needs. Rows of logits may be slices of longer ones: they are not copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_shape, check_tensors
from .._device import contiguous_strides, empty_on, facts, launch_rule
from .._op import Derivative, Kernels, Memory, Op, Saved
from . import config, reference
from .reference import NO_PADDING

kernels = _library.LazyModule(f"{__package__}.kernels")

# Positions within a row are 32-bit in the kernels.
MOST_CLASSES = 2**31 - 2**16


def xentropy_forward(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = NO_PADDING
) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and the log of its sum of exponentials, in float32 (float64 for float64 logits).

    Runs without autograd. Rows whose label is `padding_idx` get zeros.
    """
    check_logits(logits, labels, smoothing)
    return XENTROPY.run(logits, labels, float(smoothing), padding_idx)  # type: ignore[return-value]


def xentropy_backward(
    loss_gradient: Tensor,
    logits: Tensor,
    log_sums: Tensor,
    labels: Tensor,
    smoothing: float = 0.0,
    padding_idx: int = NO_PADDING,
) -> Tensor:
    """Return the contiguous gradient of the logits, from `loss_gradient` and the results of `xentropy_forward`."""
    check_logits(logits, labels, smoothing)
    check_shape("loss_gradient", loss_gradient, labels.shape, logits.device)
    check_shape("log_sums", log_sums, labels.shape, logits.device)
    settings = (float(smoothing), padding_idx)
    return XENTROPY.run_backward((loss_gradient,), (logits, log_sums, labels), settings, (True,))[0].contiguous()  # type: ignore[union-attr]


def check_logits(logits: Tensor, labels: Tensor, smoothing: float) -> None:
    """Raise for arguments that do not fit together."""
    check_tensors(logits=logits, labels=labels)
    shape = logits.shape
    if not shape or labels.shape != shape[:-1]:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected one for each row of logits of shape {list(shape)}"
        )
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be floating-point, got {logits.dtype}")
    if type(logits) not in _library.PLAIN and _cuts_classes(logits):
        raise ValueError(
            "logits is a DTensor that is cut over its classes; redistribute it to Shard(0) or Replicate(), or use "
            "apex.transformer.tensor_parallel.vocab_parallel_cross_entropy on the local shards"
        )
    if not 1 <= shape[-1] <= MOST_CLASSES:
        raise ValueError(f"logits of shape {list(shape)} have {shape[-1]} classes, expected 1 to {MOST_CLASSES}")
    check_labels(labels, logits.device, smoothing)


def _cuts_classes(logits: Any) -> bool:
    """Return whether logits are distributed (DTensor) such that no process has all classes of a row."""
    return any(placement.is_shard(logits.dim() - 1) for placement in getattr(logits, "placements", ()))


def check_labels(labels: Tensor, device: torch.device, smoothing: float) -> None:
    if labels.dtype is not torch.int64 and labels.dtype is not torch.int32:
        raise TypeError(f"labels must be int64 or int32, got {labels.dtype}")
    if labels.device != device:
        raise ValueError(f"labels are on {labels.device}, the logits on {device}")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"label smoothing {smoothing} is not between 0 and 1")


def launch_forward(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    rows = _whole_rows(logits)
    losses = torch.empty_like(labels, dtype=torch.float32)
    log_sums = torch.empty_like(losses)
    sizes = (*rows.shape, rows.stride()[0], padding_idx)
    if rows.shape[1] <= config.SHORT_ROW:
        launch = _short_launch((*sizes, 1), smoothing > 0, rows.dtype, rows.device)
        launch((rows, labels.long(), losses, log_sums, None), (smoothing,))
    else:
        launch = _forward_launch(sizes, smoothing > 0, False, 0, rows.dtype, rows.device)
        launch((rows, labels.long(), None, losses, log_sums, *[None] * 8), (smoothing, 0.0, 1.0, 1.0))
    return losses, log_sums


def launch_rows(
    logits: Tensor,
    labels: Tensor,
    transform: Sequence[float],
    padding_idx: int,
    found: Mapping[str, Tensor],
    class_weight: Tensor | None = None,
    *,
    losses: Tensor | None = None,
    scale: Tensor | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    gradient: bool = False,
) -> None:
    """Write the statistics that `reference.statistics` names, "top" and the losses into `found`.

    With `gradient`, overwrite the logits with the gradient of the losses, times the number `scale` if there is one.
    """
    mode, inner, outer = _factors(transform, logits)
    sizes = (*logits.shape, logits.stride(0), padding_idx)
    launch = _forward_launch(sizes, smoothing > 0, gradient, mode, logits.dtype, logits.device)
    log_sums = found.get("lse")
    if log_sums is None:
        log_sums = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    names = ("own", "mean", "weighted", "entropy", "squares", "peak", "top")
    tensors = (logits, labels, scale, losses, log_sums, class_weight, *map(found.get, names))
    launch(tensors, (smoothing, z_loss, inner, outer))


def launch_row_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    coefficients: Tensor,
    class_weight: Tensor | None,
    transform: Sequence[float],
    padding_idx: int,
    entropy: bool,
    out: Tensor,
) -> None:
    """Write `reference.row_gradient` to `out`, which may be the logits; `entropy`: the second coefficient is used."""
    mode, inner, outer = _factors(transform, logits)
    strides = (logits.stride(0), out.stride(0))
    launch = _row_gradient_launch(logits.shape, strides, padding_idx, mode, entropy, logits.dtype, logits.device)
    scale, _, temperature = transform
    scaled = coefficients if mode == 0 else coefficients * (scale / temperature)
    launch((logits, labels, log_sums, scaled.contiguous(), class_weight, out), (inner, outer))


def launch_scale(values: Tensor, factor: Tensor) -> None:
    """Multiply contiguous values by a number on the device; a number of one costs nothing but the launch."""
    programs = config.SCALE_PROGRAMS * facts(values.device).multiprocessors
    sizes = (values.numel(), programs)
    kernels.scale_in_place((programs,), (values, factor), sizes, BLOCK=config.SCALE_BLOCK, num_warps=8)


def _factors(transform: Sequence[float], logits: Tensor) -> tuple[int, float, float]:
    """Return the kernels' kind of transform and its factors within and outside of the hyperbolic tangent."""
    scale, cap, temperature = transform
    if cap:
        approximate = logits.dtype == torch.bfloat16 and facts(logits.device).backend == "cuda"
        return 3 if approximate else 2, scale / cap, cap / temperature
    return int(scale != temperature), scale / temperature, 1.0


@launch_rule
def _row_gradient_launch(
    shape: torch.Size,
    strides: tuple[int, int],
    padding_idx: int,
    mode: int,
    entropy: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    (rows, classes), itemsize = shape, dtype.itemsize
    chosen = config.backward_config(rows, classes, itemsize, facts(device))
    return kernels.row_gradient.prepare(
        (rows * chosen.splits,),
        (rows, chosen.splits, *strides, classes, padding_idx),
        TRANSFORM=mode,
        ENTROPY=entropy,
        EDGES=strides[1] % config.ALIGNMENT != 0 or classes % config.ALIGNMENT != 0,
        SAME_STRIDE=strides[0] == strides[1],
        GROUPS=chosen.groups,
        LANES=chosen.lanes,
        VECTOR=16 // itemsize,
        num_warps=chosen.num_warps,
    )


def launch_backward(
    dlosses: Tensor, logits: Tensor, log_sums: Tensor, labels: Tensor, smoothing: float, padding_idx: int, *_: Any
) -> Tensor:
    """Return the gradient of the logits; `dlosses` may be one value for all rows, with strides of 0."""
    rows, device = _whole_rows(logits), logits.device
    loss_stride = int(any(dlosses.stride()))
    if loss_stride and not dlosses.is_contiguous():
        dlosses = dlosses.contiguous()
    if labels.dtype is not torch.int64:
        labels = labels.long()
    sizes = (rows.stride()[0], padding_idx, loss_stride)
    dtypes = (logits.dtype, dlosses.dtype, log_sums.dtype)
    launch, is_short, layout = _backward_launch(logits.shape, sizes, smoothing > 0, dtypes, device)
    gradient = empty_on(device)(*layout, dtypes[0])
    if is_short:
        launch((rows, labels, dlosses, log_sums, gradient), (smoothing,))
    else:
        launch((dlosses, rows, log_sums, labels, gradient), (smoothing,))
    return gradient


@launch_rule
def _backward_launch(
    shape: torch.Size,
    sizes: tuple[int, int, int],
    smoothed: bool,
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> tuple[Any, bool, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the kernel, whether it is the kernel for short rows, and sizes and strides of the gradient."""
    itemsize = dtypes[0].itemsize
    (*outer, classes), (row_stride, padding_idx, loss_stride) = shape, sizes
    rows, layout = math.prod(outer), (tuple(shape), contiguous_strides(tuple(shape)))
    if classes <= config.SHORT_ROW:
        return _short_rows((rows, classes, *sizes), True, smoothed, itemsize, device), True, layout
    chosen = config.backward_config(rows, classes, itemsize, facts(device))
    launch = kernels.xentropy_backward.prepare(
        (rows * chosen.splits,),
        (chosen.splits, row_stride, classes, padding_idx, loss_stride),
        EDGES=classes % config.ALIGNMENT != 0,
        SAME_STRIDE=row_stride == classes,
        GROUPS=chosen.groups,
        LANES=chosen.lanes,
        VECTOR=16 // itemsize,
        num_warps=chosen.num_warps,
    )
    return launch, False, layout


def _whole_rows(logits: Tensor) -> Tensor:
    """Return the logits as rows x classes, copied unless the elements of each row are contiguous."""
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    stride = rows.stride()
    return rows if stride[1] == 1 and stride[0] >= rows.shape[1] else rows.contiguous()


@launch_rule
def _forward_launch(
    sizes: tuple[int, ...],
    smoothed: bool,
    gradient: bool,
    mode: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Prepare the kernel for statistics of rows, and with `gradient` also for the gradient in place of the logits."""
    (rows, classes, row_stride, padding_idx), itemsize = sizes, dtype.itemsize
    chosen = config.forward_config(rows, classes, itemsize, gradient, facts(device))
    return kernels.xentropy_forward.prepare(
        (rows,),
        (row_stride, classes, padding_idx),
        SMOOTHED=smoothed,
        TRANSFORM=mode,
        EDGES=row_stride % config.ALIGNMENT != 0 or classes % config.ALIGNMENT != 0,
        GRADIENT=gradient,
        STREAM=gradient and classes * itemsize >= config.STREAMED_ROW,
        GROUPS=chosen.groups,
        LANES=chosen.lanes,
        VECTOR=16 // itemsize,
        num_warps=chosen.num_warps,
    )


@launch_rule
def _short_launch(sizes: tuple[int, ...], smoothed: bool, dtype: torch.dtype, device: torch.device) -> Any:
    return _short_rows(sizes, False, smoothed, dtype.itemsize, device)


def _short_rows(sizes: tuple[int, ...], backward: bool, smoothed: bool, itemsize: int, device: torch.device) -> Any:
    """Prepare the kernel with several short rows per program, for losses or gradients."""
    rows, classes, row_stride, padding_idx, loss_stride = sizes
    chosen = config.short_config(rows, classes, itemsize, facts(device))
    return kernels.xentropy_short_rows.prepare(
        (-(-rows // chosen.rows_per_program),),
        (rows, row_stride, classes, padding_idx, loss_stride),
        BACKWARD=backward,
        SMOOTHED=smoothed,
        ROWS=chosen.rows_per_program,
        BLOCK=chosen.block,
        MULTIPLE=math.gcd(row_stride, classes, 16 // itemsize),
        num_warps=chosen.num_warps,
    )


def _fake(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(labels.shape, dtype=_library.compute_dtype(logits))
    return losses, torch.empty_like(losses)


FAMILY = _library.register_family(
    _library.OpFamily("xentropy", "softmax cross-entropy, also of a linear layer's outputs")
)

XENTROPY = Op(
    FAMILY,
    "xentropy(Tensor logits, Tensor labels, float smoothing, int padding_idx) -> (Tensor losses, Tensor log_sums)",
    reference=reference.forward,
    kernels=Kernels(launch_forward, launch_backward),
    shapes=_fake,
    saved=Saved("logits", "log_sums", "labels"),
    memory=Memory(strided=("logits", "losses")),
    derivative=Derivative(of=("logits",), backward=reference.backward),
)
