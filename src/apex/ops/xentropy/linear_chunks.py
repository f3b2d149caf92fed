"""Cross-entropy of a linear layer's outputs, a chunk of rows at a time: all logits are never there at once.

One pass over the chunks gives losses and gradients. The gradient of a chunk's logits overwrites them, and two matrix
products take it on to the gradients of input and weight.

Letters: N rows, H features, V classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import _library
from . import native, reference
from .launches import plan
from .op import FAMILY

# Logits of a chunk: a tenth of all, within these limits of elements (192 and 512 MiB in half precision). Smaller chunks
# make slower matrix products: 8192x2048x131072 on an H200 took 24.3 ms in chunks of 512 rows, 22.8 of 1024 and 21.5 of
# 2048, where a linear layer and PyTorch's loss took 22.8. In another run chunks of 768 rows took 23.3, of 832 and 896
# 25.4, of 1024 24.0, and PyTorch 23.7: they need 736 MiB, under an eighth of PyTorch's 6144, and 1024 rows need 800.
CHUNK_ELEMENTS = (3 << 25, 1 << 28)
CHUNKS = 10
# Chunks have a multiple of so many rows, which is a tile of a matrix product.
ROW_MULTIPLE = 128
# Chunks whose sum may be rounded to bfloat16 each time: 0.3% in the mean square, a single rounding being 0.1%.
MOST_ROUNDINGS = 16
# Rows of logits begin at multiples of so many elements: matrix products and kernels are quicker then.
_STRIDE_MULTIPLE = 64
# Matrix products of half precision take a multiple of so many classes on a GPU, 16 bytes, and what is left apart: with
# 50257 classes and 4096 features cuBLAS's took four times as long as those of torch.compile, which pads them.
_CLASS_MULTIPLE = 8
# Classes whose gradients are added at a time where a product cannot add to float32 itself.
_CLASSES_AT_A_TIME = 1 << 14


class Wanted(NamedTuple):
    """Which gradients are computed."""

    input: bool
    weight: bool
    bias: bool


def chunk_size(rows: int, classes: int, asked: int | None = None) -> int:
    """Rows per chunk: as asked for, else equal parts within the limits of elements."""
    if asked is not None:
        return max(1, min(asked, rows))
    fewest, most = CHUNK_ELEMENTS
    most = max(1, min(most, max(fewest, rows * classes // CHUNKS)) // classes)
    if rows <= most:
        return max(1, rows)
    chunks = -(-rows // most)
    return min(most, -(-rows // (chunks * ROW_MULTIPLE)) * ROW_MULTIPLE)


def sum_dtype(weight_dtype: torch.dtype, chunks: int, asked: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which the gradients of weight and bias are summed over the chunks."""
    if asked is not None:
        return asked
    # Sums over all rows, not divided by their number yet, may be too large for float16.
    if weight_dtype == torch.float16 or (weight_dtype == torch.bfloat16 and chunks > MOST_ROUNDINGS):
        return torch.float32
    return weight_dtype


def linear_xentropy(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    row_scale: Tensor | None,
    smoothing: float,
    ignore_index: int,
    wanted: Wanted,
    accumulation_dtype: torch.dtype,
    chunk_rows: int,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Losses (N), and the gradients of sum(losses * row_scale) for input (N x H), weight (V x H) and bias (V).

    Without autograd. Input, weight and bias have one dtype; the gradients of the last two have `accumulation_dtype`.
    """
    rows, features = input.shape
    classes, device = weight.shape[0], input.device
    losses = torch.empty(rows, dtype=reference.compute_dtype(input), device=device)
    input_gradient = torch.empty((rows, features), dtype=input.dtype, device=device) if wanted.input else None
    weight_gradient = bias_gradient = None
    if wanted.weight:
        allocate = torch.empty if rows else torch.zeros
        weight_gradient = allocate((classes, features), dtype=accumulation_dtype, device=device)
    if wanted.bias:
        bias_gradient = torch.zeros(classes, dtype=losses.dtype, device=device)
    stride = -(-classes // _STRIDE_MULTIPLE) * _STRIDE_MULTIPLE
    storage = torch.empty((min(chunk_rows, rows), stride), dtype=input.dtype, device=device)
    parts = _parts_of_products(storage, classes)
    labels = labels.long().contiguous()
    with _library.autocast_off(input):
        for begin in range(0, rows, chunk_rows):
            part = slice(begin, begin + chunk_rows)
            x = input[part]
            logits = storage[: x.shape[0], :classes]
            for chosen in parts:
                if bias is None:
                    torch.mm(x, weight[chosen].t(), out=logits[:, chosen])
                else:
                    torch.addmm(bias[chosen], x, weight[chosen].t(), out=logits[:, chosen])
            scale = None if row_scale is None else row_scale[part]
            _losses_and_gradient(logits, labels[part], losses[part], scale, smoothing, ignore_index, True in wanted)
            if input_gradient is not None:
                # What is left apart first: the large product adds to it before it rounds.
                for chosen in reversed(parts):
                    _add_product(input_gradient[part], logits[:, chosen], weight[chosen], first=chosen is parts[-1])
            if weight_gradient is not None:
                for chosen in parts:
                    _add_product(weight_gradient[chosen], logits[:, chosen].t(), x, first=begin == 0)
            if bias_gradient is not None:
                bias_gradient += logits.sum(0, dtype=bias_gradient.dtype)
    if bias_gradient is not None:
        bias_gradient = bias_gradient.to(accumulation_dtype)
    return losses, input_gradient, weight_gradient, bias_gradient


def _parts_of_products(logits: Tensor, classes: int) -> list[slice]:
    """The classes that matrix products take at a time."""
    whole = classes // _CLASS_MULTIPLE * _CLASS_MULTIPLE
    if not logits.is_cuda or logits.dtype.itemsize != 2 or whole in (0, classes):
        return [slice(0, classes)]
    return [slice(0, whole), slice(whole, classes)]


def _losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    losses: Tensor,
    row_scale: Tensor | None,
    smoothing: float,
    ignore_index: int,
    gradient: bool,
) -> None:
    """Writes the losses and, where the gradient is wanted, overwrites the logits with it."""
    if _library.runs_triton(FAMILY, logits):
        chosen = plan(logits, smoothing, ignore_index)
        if gradient:
            chosen.both(logits, labels, losses, row_scale)
        else:
            losses.copy_(chosen.forward(logits, labels)[0])
        return
    implementation = native if logits.device.type == "cpu" else reference
    found, log_sums = implementation.forward(logits, labels, smoothing, ignore_index)
    losses.copy_(found)
    if gradient:
        scale = torch.ones_like(losses) if row_scale is None else row_scale
        implementation.backward(scale, logits, log_sums, labels, smoothing, ignore_index, out=logits)


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right; `first` stands for a total of zero."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif total.dtype == torch.float32 and _adds_to_float32(left):
        if first:
            torch.mm(left, right, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        for begin in range(0, total.shape[0], _CLASSES_AT_A_TIME):
            part = slice(begin, begin + _CLASSES_AT_A_TIME)
            product = torch.mm(left[part], right)
            if first:
                total[part] = product
            else:
                total[part] += product


def _adds_to_float32(half: Tensor) -> bool:
    """Whether a product of half-precision matrices can be added to float32: since PyTorch 2.8, on NVIDIA's GPUs."""
    return half.is_cuda and torch.version.hip is None and hasattr(torch.ops.aten.addmm, "dtype_out")
