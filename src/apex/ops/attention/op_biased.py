"""Attention with a mask and a bias that has a gradient, as protein models use it.

Letters: `...` batches, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors
from .._device import facts
from .._op import Op
from . import config, reference
from .op_common import (
    FAMILY,
    Problem,
    Strides,
    autocast_dtype,
    dkey_dvalue_launch,
    dquery_from_dlogits_launch,
    dquery_launch,
    output_launch,
    takes_head,
)

# Kernels multiply the stride of a row by the rows of a tile, at most 128, in 32 bits.
LARGEST_ROW_STRIDE = 2**31 // 128


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, inf: float = 1e9
) -> Tensor:
    """softmax(q k^T / sqrt(D) + bias + (mask - 1) * inf) v, for query [..., H, M, D] and key, value [..., H, N, D].

    `mask` (1 to attend, 0 not to) and `bias` are broadcast to [..., H, M, N]. `mask` has no gradient.
    """
    check_floats(query=query, key=key, value=value)
    check_optional_tensors(mask=mask)
    if bias is not None:
        check_floats(bias=bias)
    dtype = autocast_dtype(query)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if bias is not None and bias.dtype == torch.float64 != query.dtype:
        bias = bias.to(torch.float32)
    arguments = checked_arguments(query, key, value, mask, bias, inf)
    return ATTENTION(*arguments) if torch.is_grad_enabled() else inference(*arguments)


def checked_arguments(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> tuple:
    """The arguments of `ATTENTION`; raises for tensors that do not fit together."""
    shape, of_keys, dtype, device = query.shape, key.shape, query.dtype, query.device
    if len(shape) < 3 or len(of_keys) != len(shape):
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; both must be [..., heads, length, head size]"
        )
    if of_keys[:-2] != shape[:-2] or of_keys[-1] != shape[-1] or shape[-1] == 0:
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; they may differ in their length only"
        )
    if value.shape != of_keys:
        raise ValueError(f"value has shape {list(value.shape)}, key has {list(of_keys)}; they must be equal")
    logits = (*shape[:-1], of_keys[-2])
    for name, added in (("mask", mask), ("bias", bias)):
        if added is not None and not _broadcasts(added.shape, logits):
            raise ValueError(f"{name} has shape {list(added.shape)}, which does not broadcast to {list(logits)}")
    if not dtype.is_floating_point:
        raise TypeError(f"attention needs floating-point tensors, query is {dtype}")
    for name, given in (("key", key), ("value", value), ("mask", mask), ("bias", bias)):
        if given is not None and given.device != device:
            raise ValueError(f"{name} is on {given.device}, query on {device}")
        if name in ("key", "value") and given is not None and given.dtype != dtype:
            raise TypeError(f"{name} is {given.dtype}, query {dtype}; they must be equal")
    if mask is not None and mask.requires_grad:
        mask = mask.detach()
    if mask is not None and mask.dtype in _library.TOO_WIDE and dtype != torch.float64:
        mask = mask.to(torch.float32)
    return query, key, value, mask, bias, inf


def _broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    padding = len(full) - len(shape)
    if padding < 0:
        return False
    for size, wanted in zip(shape, full[padding:], strict=True):  # noqa: SIM110  half the time of a generator
        if size != 1 and size != wanted:
            return False
    return True


def inference(*arguments) -> Tensor:  # type: ignore[no-untyped-def]
    """The output alone, of arguments like those of `ATTENTION`: nothing is kept for a backward pass."""
    if torch.compiler.is_compiling() or not (_takes(*arguments) and _library.runs_triton(FAMILY, arguments[0])):
        return ATTENTION(*arguments)
    return launch_forward(*arguments, saves=False)[0]  # type: ignore[return-value]


def _takes(query: Tensor, key: Tensor, *others: object) -> bool:
    """Whether the kernels take tensors of these shapes."""
    return takes_head(query) and query.numel() > 0 and key.numel() > 0


def launch_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    inf: float,
    *,
    saves: bool = True,
) -> tuple[Tensor | None, ...]:
    """Output, laid out like the query, and statistics if it `saves` them."""
    if not _takes(query, key):
        return ATTENTION.run_reference(query, key, value, mask, bias, inf)
    (query, q), (key, k), (value, v) = _with_strides(query), _with_strides(key), _with_strides(value)
    problem, mask, bias = _problem(query, key, mask, bias, inf)
    output, o = _empty_like(query)
    statistics = _empty_statistics(query, mask, bias) if saves else None
    tensors = (query, key, value, mask, bias, None, None, output, statistics)
    problem.launch(output_launch, tensors, (*q, *k, *v, *o), saves)
    return output, statistics


def launch_backward(dout: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Gradients of query, key, value and, if wanted, bias; `saved` is what `ATTENTION` saves, then `inf`."""
    query, key, value, mask, bias, output, statistics, inf, wanted = saved
    if not _takes(query, key):
        return ATTENTION.run_reference_backward((dout,), saved[:7], (inf,), wanted)
    (query, q), (key, k), (value, v) = _with_strides(query), _with_strides(key), _with_strides(value)
    (output, o), (dout, g) = _with_strides(output), _with_strides(dout)
    (dquery, dq), (dkey, dk), (dvalue, dv) = _empty_like(query), _empty_like(key), _empty_like(value)
    problem, kernel_mask, kernel_bias = _problem(query, key, mask, bias, inf)
    given = (query, key, value, kernel_mask, kernel_bias, None, None, output, dout, statistics)
    strides = (*q, *k, *v, *o, *g)
    if bias is None or kernel_bias is None or not wanted[3]:
        delta = torch.empty_like(statistics[0])
        problem.launch(dquery_launch, (*given, delta, dquery), (*strides, *dq))
        problem.launch(dkey_dvalue_launch, (*given, delta, None, dkey, dvalue), (*strides, *dk, *dv), None)
        return dquery, dkey, dvalue, None

    # Gradients of logits are stored, part by part: computing them a second time for the bias takes longer.
    batch, heads, rows, columns, *_ = problem
    group, pitch = problem.bias_group, config.pitch(rows)
    at_once = config.batches_at_once(batch, heads * pitch * columns * query.dtype.itemsize, group)
    dlogits = query.new_empty((at_once, heads, columns, pitch))
    # In float32 where there is more to add up, because the bias was expanded.
    dtype = kernel_bias.dtype if kernel_bias.numel() == bias.numel() else torch.float32
    sums: list[Tensor] = []
    for first, count in config.parts_of_batches(batch, at_once, group):
        batches = (first, count)
        problem.launch(dkey_dvalue_launch, (*given, None, dlogits, dkey, dvalue), (*strides, *dk, *dv), batches)
        of_dquery = dquery_from_dlogits_launch(problem, (*k, *dq), batches, facts(query.device))
        of_dquery((dlogits, key, dquery), problem.floats()[:1])
        stored = dlogits[:count]
        if count <= group:
            total = stored.sum(0, keepdim=True, dtype=dtype if count == group else torch.float32)
        else:  # several whole groups
            total = stored.view(count // group, group, heads, columns, pitch).sum(1, dtype=dtype)
        if first % group:  # not the first part of its group
            sums[-1] += total
        else:
            sums.append(total)
    dbias = (sums[0] if len(sums) == 1 else torch.cat(sums))[..., :rows].transpose(-1, -2)
    return dquery, dkey, dvalue, _summed_like(dbias, bias, query, key).to(bias.dtype)


def _problem(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> tuple[Problem, Tensor | None, Tensor | None]:
    """The problem, and mask [..., N] and bias [..., H, M, N] as the kernels take them."""
    *lead, heads, rows, head_dim = query.shape
    columns = key.shape[-2]
    mask_group = bias_group = 0
    if mask is not None and mask.dim() > 1 and (mask.shape[-2] != 1 or (mask.dim() > 2 and mask.shape[-3] != 1)):
        # A mask of single logits, not of whole keys, becomes a part of the bias.
        terms = (mask.to(torch.float32) - 1) * inf
        mask, bias = None, terms if bias is None else bias + terms
    if mask is not None:
        mask, mask_group = _grouped(mask, lead, (1, 1, columns))
    if bias is not None:
        bias, bias_group = _grouped(bias, lead, (heads, rows, columns))
    problem = Problem(
        math.prod(lead), heads, rows, columns, head_dim, query.dtype, query.device, inf, mask_group, bias_group
    )
    return problem, mask, bias


def _grouped(tensor: Tensor, lead: list[int], inner: tuple[int, int, int]) -> tuple[Tensor, int]:
    """A mask or bias broadcast to [..., *inner], and the number of batches that share one.

    Batches that share it are kept together where they lie together.
    """
    padded = (1,) * (len(lead) + 3 - tensor.dim()) + tuple(tensor.shape)
    outer = list(padded[: len(lead)])
    own = len(lead)
    while own and outer[own - 1] == 1:
        own -= 1
    if outer[:own] != lead[:own]:
        outer = lead
    groups = math.prod(outer)
    if tensor.dtype not in _library.TRITON_DTYPES:
        tensor = tensor.to(torch.float32)
    if (*outer, *inner) != padded:
        tensor = tensor.expand(*outer, *inner)
    return tensor.contiguous(), math.prod(lead) // groups


def _summed_like(dbias: Tensor, bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The gradient of what the kernels took, summed over what `bias` was broadcast along."""
    if dbias.numel() != bias.numel():
        full = (*query.shape[:-1], key.shape[-2])
        padded = (1,) * (len(full) - bias.dim()) + tuple(bias.shape)
        groups = dbias.shape[0]
        lead = padded[:-3] if math.prod(padded[:-3]) == groups else full[:-3]
        dbias = dbias.reshape(*lead, *full[-3:]).sum_to_size(padded)
    return dbias.reshape(bias.shape)


def _strides(tensor: Tensor) -> Strides | None:
    """Strides of batch, head and row with which a kernel can read or write a tensor; None if it cannot."""
    shape, strides = tensor.shape, tensor.stride()
    if (strides[-1] != 1 and shape[-1] != 1) or strides[-2] >= LARGEST_ROW_STRIDE:
        return None
    batch = next_stride = None
    for place in range(len(shape) - 4, -1, -1):
        size, stride = shape[place], strides[place]
        if size == 1:
            continue
        if batch is None:
            batch = stride
        elif stride != next_stride:
            return None
        next_stride = stride * size
    return batch or 0, strides[-3], strides[-2]


def _with_strides(tensor: Tensor) -> tuple[Tensor, Strides]:
    """The tensor, or a copy that kernels can read, and its strides."""
    strides = _strides(tensor)
    if strides is None:
        tensor = tensor.contiguous()
        strides = _strides(tensor)
    assert strides is not None
    return tensor, strides


def _empty_like(tensor: Tensor) -> tuple[Tensor, Strides]:
    """Memory for a result, laid out like `tensor` where kernels can write that, and its strides."""
    result = torch.empty_like(tensor)
    strides = _strides(result)
    if strides is None:
        return _with_strides(torch.empty_like(tensor, memory_format=torch.contiguous_format))
    return result, strides


def _empty_statistics(query: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """Memory for what the forward kernel leaves for the backward pass: one or two numbers per row."""
    planes, (*lead, heads, rows, _) = 1 if mask is None and bias is None else 2, query.shape
    return torch.empty(planes, math.prod(lead), heads, rows, dtype=torch.float32, device=query.device)


def _reference(query, key, value, mask, bias, inf):  # type: ignore[no-untyped-def]
    output = reference.sdpa_attention(query, key, value, mask, bias, inf)
    return output, _empty_statistics(query, mask, bias).zero_()


def _fake(query, key, value, mask, bias, inf):  # type: ignore[no-untyped-def]
    return torch.empty_like(query), _empty_statistics(query, mask, bias)


ATTENTION = Op(
    FAMILY,
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? bias, float inf) "
    "-> (Tensor output, Tensor statistics)",
    reference=_reference,
    forward=launch_forward,
    backward=launch_backward,
    fake=_fake,
    saves=("query", "key", "value", "mask", "bias", "output", "statistics"),
    gradients=("query", "key", "value", "bias"),
    strided=("query", "key", "value", "mask", "bias", "output", "statistics"),
    same_layout=("output", "query", "key", "value"),
    takes=_takes,
    formula=reference.attention,
    sums_rounded_products=True,
    checks=[
        {
            **dict.fromkeys(("query", "key", "value"), (3, 2, 40, 24)),
            "mask": lambda generator: (
                torch.rand(3, 1, 1, 40, generator=generator, dtype=torch.float32, device="cpu") > 0.3
            ).float(),
            "bias": (1, 2, 40, 40),
            "inf": 1e9,
        }
    ],
)
