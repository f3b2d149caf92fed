"""Attention with a mask and a bias that has a gradient, as protein models use it.

Letters: `...` batches, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library
from .._checks import check_floats, check_optional_tensors, number
from .._device import contiguous_strides, empty_on, facts, launch_rule
from .._op import Derivative, Kernels, Memory, Op, Saved
from . import config, reference
from .op_common import (
    FAMILY,
    Problem,
    Strides,
    autocast_dtype,
    dkey_dvalue_launch,
    dquery_dbias_launch,
    dquery_launch,
    output_launch,
    takes_head,
)

# Kernels multiply the stride of a row by the rows of a tile, at most 128, in 32 bits.
LARGEST_ROW_STRIDE = 2**31 // 128


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, inf: float = 1e9
) -> Tensor:
    """Return softmax(q k^T / sqrt(D) + bias + (mask - 1) * inf) v for query [..., H, M, D], key, value [..., H, N, D].

    `mask` (1 to attend, 0 not to) and `bias` are broadcast to [..., H, M, N]. `mask` has no gradient.
    """
    check_floats(query=query, key=key, value=value)
    return attend(query, key, value, mask, bias, inf)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float) -> Tensor:
    """Return `attention` of tensors that are known to be floating-point."""
    if mask is not None and not isinstance(mask, Tensor):
        check_optional_tensors(mask=mask)
    if bias is not None and not (isinstance(bias, Tensor) and bias.dtype.is_floating_point):
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
    """Return the arguments of `ATTENTION`; raise for tensors that do not fit together."""
    shape, of_keys, dtype, device = query.shape, key.shape, query.dtype, query.device
    if len(shape) < 3 or len(of_keys) != len(shape):
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; both must be [..., heads, length, head size]"
        )
    *lead, rows, head_dim = shape
    *lead_of_keys, columns, head_dim_of_keys = of_keys
    if lead_of_keys != lead or head_dim_of_keys != head_dim or head_dim == 0:
        raise ValueError(
            f"query and key have shapes {list(shape)} and {list(of_keys)}; they may differ in their length only"
        )
    if value.shape != of_keys:
        raise ValueError(f"value has shape {list(value.shape)}, key has {list(of_keys)}; they must be equal")
    if not dtype.is_floating_point:
        raise TypeError(f"attention needs floating-point tensors, query is {dtype}")
    if key.device != device or value.device != device:
        name, tensor = ("key", key) if key.device != device else ("value", value)
        raise ValueError(f"{name} is on {tensor.device}, query on {device}")
    if key.dtype != dtype or value.dtype != dtype:
        name, tensor = ("key", key) if key.dtype != dtype else ("value", value)
        raise TypeError(f"{name} is {tensor.dtype}, query {dtype}; they must be equal")
    if mask is not None:
        _check_added("mask", mask, (*lead, rows, columns), device)
        if mask.requires_grad:
            mask = mask.detach()
        if mask.dtype in _library.TOO_WIDE and dtype != torch.float64:
            mask = mask.to(torch.float32)
    if bias is not None:
        _check_added("bias", bias, (*lead, rows, columns), device)
    return query, key, value, mask, bias, number("inf", inf)


def _check_added(name: str, added: Tensor, logits: tuple[int, ...], device: torch.device) -> None:
    """Raise for a mask or bias that cannot be added to logits of this shape."""
    shape = added.shape
    padding = len(logits) - len(shape)
    if added.device != device:
        raise ValueError(f"{name} is on {added.device}, query on {device}")
    for dim, size in enumerate(shape, padding):
        if padding < 0 or (size != 1 and size != logits[dim]):
            raise ValueError(f"{name} has shape {list(shape)}, which does not broadcast to {list(logits)}")


def inference(*arguments) -> Tensor:  # type: ignore[no-untyped-def]
    """Return the output for the arguments of `ATTENTION`, saving nothing for a backward pass."""
    if torch.compiler.is_compiling() or not (_takes(*arguments) and _library.runs_triton(FAMILY, arguments[0])):
        return ATTENTION(*arguments)
    return launch_forward(*arguments, saves=False)[0]  # type: ignore[return-value]


def _takes(query: Tensor, key: Tensor, *others: object) -> bool:
    """Return whether the kernels take tensors of these shapes."""
    return takes_head(query) and query.numel() > 0 and key.numel() > 0


# Sizes, strides and dtype of a tensor: everything that launches depend on.
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
# Sizes and strides of a result.
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def _forms(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple([None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])


class ForwardLaunch(NamedTuple):
    """The prepared kernel of a forward pass, without its tensors and `inf`, and the layouts of its results."""

    main: Any
    output: Layout
    statistics: Layout
    scale: float
    bias: Layout | None  # layout of a copy of the bias with aligned rows, if one is needed


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
    """Return the output, laid out like the query, and the statistics if it `saves` them."""
    device = query.device
    launch = _forward_launch(_forms(query, key, value, mask, bias), saves, device)
    if launch is None:
        if not _takes(query, key):
            return ATTENTION.run_reference(query, key, value, mask, bias, inf)
        query, key, value, mask, bias = _fitted(query, key, value, mask, bias, inf)
        return launch_forward(query, key, value, mask, bias, inf, saves=saves)
    empty = empty_on(device)
    output = empty(*launch.output, query.dtype)
    statistics = empty(*launch.statistics, torch.float32) if saves else None
    if bias is not None and launch.bias is not None:
        padded = empty(*launch.bias, bias.dtype)
        padded[..., : bias.shape[-1]].copy_(bias)
        bias = padded
    tensors = (query, key, value, mask, bias, None, None, None, output, statistics)
    launch.main(tensors, (launch.scale, inf, 1.0))
    return output, statistics


@launch_rule
def _forward_launch(forms: tuple[Any, ...], saves: bool, device: torch.device) -> ForwardLaunch | None:
    """Prepare the forward launch; return None if kernels do not take the tensors as they are."""
    problem_and_strides = _problem(forms, device)
    if problem_and_strides is None:
        return None
    problem, strides = problem_and_strides
    output, o = _like(forms[0])
    bias, pitch = None, config.padded_bias(*problem[:4], problem.bias_group, forms[4][2].itemsize) if forms[4] else 0
    if pitch:
        problem, sizes = problem._replace(bias_pitch=pitch), (*forms[4][0][:-1], pitch)
        bias = (sizes, contiguous_strides(sizes))
    main = output_launch(problem, (*strides, *o), saves, facts(device))
    planes = 2 if problem.mask_group or problem.bias_group else 1
    statistics = (planes, problem.batch, problem.heads, problem.rows)
    return ForwardLaunch(main, output, (statistics, contiguous_strides(statistics)), problem.scale, bias)


class BackwardLaunches(NamedTuple):
    """The prepared kernels of a backward pass, without their tensors and `inf`, and the layouts of its results.

    Each part is two launches for some of the batches. Without `dlogits` there is one part: the gradient of the queries,
    then the gradients of keys and values. With `dlogits`, the first launch computes the gradients of keys, values and
    logits, and the second computes the gradients of queries and bias from the gradients of logits.
    """

    parts: tuple[tuple[Any, Any], ...]
    dquery: Layout
    dkey: Layout
    dvalue: Layout
    scale: float
    dlogits: Layout | None = None
    dbias: Layout = ((), ())
    sums: torch.dtype | None = None  # dtype of the summed gradient of the bias; None if `dlogits` is that gradient


def launch_backward(dout: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of query, key, value and, if wanted, bias.

    `saved` is the saved tensors of `ATTENTION`, then `inf` and the flags of the wanted gradients.
    """
    query, key, value, mask, bias, output, statistics, inf, wanted = saved
    dtype = bias.dtype if bias is not None and wanted[3] else None
    gradients = _gradients(dout, query, key, value, mask, bias, output, statistics, inf, dtype)
    if gradients is not None:
        return gradients
    if not _takes(query, key):
        return ATTENTION.run_reference_backward((dout,), saved[:7], (inf,), wanted)
    *fitted, kernel_bias = _fitted(query, key, value, mask, bias, inf)
    if dtype is not None and kernel_bias.numel() != bias.numel():  # the gradient is summed further below
        dtype = torch.float32
    gradients = _gradients(_readable(dout), *fitted, kernel_bias, _readable(output), statistics, inf, dtype)
    assert gradients is not None
    dquery, dkey, dvalue, dbias = gradients
    if dbias is not None:
        padded = (1,) * (kernel_bias.dim() - bias.dim()) + tuple(bias.shape)
        dbias = dbias.sum_to_size(padded).reshape(bias.shape).to(bias.dtype)
    return dquery, dkey, dvalue, dbias


def _gradients(dout: Tensor, *arguments: Any) -> tuple[Tensor | None, ...] | None:
    """Return the gradients as `launch_backward` does, or None if kernels do not take the tensors as they are.

    `arguments` ends with the dtype of the gradient of the bias, None if that gradient is not wanted.
    """
    query, key, value, mask, bias, output, statistics, inf, dtype = arguments
    device, of_query = query.device, query.dtype
    # Only strides: value has the key's shape and dtype, output and its gradient have the query's.
    strides = (value.stride(), output.stride(), dout.stride())
    launches = _backward_launches(_forms(query, key, mask, bias), strides, (dtype, dout.dtype), device)
    if launches is None:
        return None
    empty, floats = empty_on(device), (launches.scale, inf, 1.0)
    dquery, dkey = empty(*launches.dquery, of_query), empty(*launches.dkey, of_query)
    dvalue, dbias = empty(*launches.dvalue, of_query), None
    tensors = (query, key, value, mask, bias, None, None, None, output, dout, statistics)
    if launches.dlogits is None:
        delta = torch.empty_like(statistics[0])
        ((of_dquery, of_dkey_dvalue),) = launches.parts
        of_dquery((*tensors, delta, dquery), floats)
        of_dkey_dvalue((*tensors, delta, None, dkey, dvalue), floats)
        return dquery, dkey, dvalue, None
    dlogits = empty(*launches.dlogits, of_query)
    if launches.sums is not None:
        dbias = empty(*launches.dbias, launches.sums)
    for of_dkey_dvalue, of_dquery_dbias in launches.parts:
        of_dkey_dvalue((*tensors, None, dlogits, dkey, dvalue), floats)
        of_dquery_dbias((dlogits, key, dquery, dbias), floats[:1])
    dbias = dlogits.as_strided(*launches.dbias) if dbias is None else dbias
    return dquery, dkey, dvalue, dbias if dbias.dtype == dtype else dbias.to(dtype)


@launch_rule
def _backward_launches(
    forms: tuple[Any, ...], strides: tuple[Any, ...], dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> BackwardLaunches | None:
    """Prepare the backward launches; return None if kernels do not take the tensors as they are.

    `forms` describe query, key, mask and bias. `strides` belong to value, output and its gradient. `dtypes` belong
    to the gradient of the bias, None without one, and to the output's gradient.
    """
    (query, key, mask, bias), (v, o, g) = forms, strides
    value, dtype = (key[0], v, key[2]), dtypes[0]
    problem_and_strides, o, g = (
        _problem((query, key, value, mask, bias), device),
        _strides(query[0], o),
        _strides(query[0], g),
    )
    if problem_and_strides is None or o is None or g is None:
        return None
    problem, strides = problem_and_strides
    strides, here = (*strides, *o, *g), facts(device)
    (dquery, dq), (dkey, dk), (dvalue, dv) = map(_like, (query, key, value))
    results, of_keys = (dquery, dkey, dvalue, problem.scale), (*strides, *dk, *dv)
    if dtype is None:
        of_queries = dquery_launch(problem, (*strides, *dq), here)
        return BackwardLaunches(((of_queries, dkey_dvalue_launch(problem, of_keys, None, here)),), *results)

    # Gradients of logits are stored, part by part: computing them again for the bias takes longer.
    batch, heads, rows, columns, *_ = problem
    group, pitch = problem.bias_group, config.pitch(rows)
    at_once = config.batches_at_once(batch, heads * pitch * columns * problem.dtype.itemsize, group)
    batches = config.parts_of_batches(batch, at_once, group)
    # If a group is split into parts, the parts are added one after the other.
    are_dbias = group == len(batches) == 1 and dtype == problem.dtype
    sums = None if are_dbias else torch.float32 if at_once < group else dtype
    key_strides = strides[3:6]
    parts = tuple(
        (
            dkey_dvalue_launch(problem, of_keys, part, here),
            dquery_dbias_launch(problem, (*key_strides, *dq), part, sums is not None, here),
        )
        for part in batches
    )
    stored = (at_once, heads, columns, pitch)
    # The gradient lies in memory as [..., H, N, pitch of M].
    sizes = tuple(bias[0])
    lead = contiguous_strides((*(1,) * (3 - len(sizes)), *sizes[:-2], columns, pitch))[:-2]
    dbias = (sizes, (*lead, 1, pitch)[-len(sizes) :])
    return BackwardLaunches(parts, *results, (stored, contiguous_strides(stored)), dbias, sums)


def _problem(forms: tuple[Any, ...], device: torch.device) -> tuple[Problem, tuple[int, ...]] | None:
    """Return the problem and the strides of query, key and value; None if kernels cannot take the tensors directly."""
    query, key, value, mask, bias = forms
    *lead, heads, rows, head_dim = query[0]
    columns, dtype = key[0][-2], query[2]
    mask_group, bias_group = _group(mask, lead, (1, 1, columns)), _group(bias, lead, (heads, rows, columns))
    q, k, v = _strides(*query), _strides(*key), _strides(*value)
    if q is None or k is None or v is None or mask_group is None or bias_group is None:
        return None
    if head_dim > config.largest_head(dtype.itemsize, facts(device)) or not columns:
        return None
    groups = (mask_group, bias_group)
    return Problem(math.prod(lead), heads, rows, columns, head_dim, dtype, device, *groups), (*q, *k, *v)


def _group(added: Form | None, lead: list[int], inner: tuple[int, int, int]) -> int | None:
    """Return how many batches share a mask or a bias, 0 if there is none; None if kernels do not take it as it is.

    Kernels take a contiguous tensor [..., *inner] that is shared by adjacent batches.
    """
    if added is None:
        return 0
    sizes, strides, dtype = added
    outer = _outer_sizes(sizes, lead)
    padded = (*(1,) * (len(lead) + 3 - len(sizes)), *sizes)
    dense = contiguous_strides(sizes)
    contiguous = all(size == 1 or strides[dim] == dense[dim] for dim, size in enumerate(sizes))
    if padded != (*outer, *inner) or not contiguous or dtype not in _library.TRITON_DTYPES:
        return None
    return math.prod(lead) // math.prod(outer)


def _outer_sizes(sizes: Sequence[int], lead: list[int]) -> list[int]:
    """Return the batch sizes of a mask or bias for the kernels: adjacent batches share it if they can."""
    outer = [1] * (len(lead) + 3 - len(sizes)) + list(sizes[:-3])
    own = len(lead)
    while own and outer[own - 1] == 1:
        own -= 1
    return outer if outer[:own] == lead[:own] else lead


def _fitted(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float
) -> tuple[Any, ...]:
    """Return the tensors, copied if needed, as kernels take them: mask [..., 1, 1, N] and bias [..., H, M, N]."""
    *lead, heads, rows, _ = query.shape
    columns = key.shape[-2]
    if mask is not None and mask.dim() > 1 and (mask.shape[-2] != 1 or (mask.dim() > 2 and mask.shape[-3] != 1)):
        # A mask of single logits instead of whole keys becomes a part of the bias.
        terms = (mask.to(torch.float32) - 1) * inf
        mask, bias = None, terms if bias is None else bias + terms
    added = []
    for tensor, inner in ((mask, (1, 1, columns)), (bias, (heads, rows, columns))):
        if tensor is not None:
            if tensor.dtype not in _library.TRITON_DTYPES:
                tensor = tensor.to(torch.float32)
            tensor = tensor.expand(*_outer_sizes(tensor.shape, lead), *inner).contiguous()
        added.append(tensor)
    return _readable(query), _readable(key), _readable(value), *added


def _readable(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy that kernels can read."""
    return tensor.contiguous() if _strides(tensor.shape, tensor.stride()) is None else tensor


def _strides(sizes: Sequence[int], strides: Sequence[int], *_: torch.dtype) -> Strides | None:
    """Return the strides of batch, head and row for a kernel; None if a kernel cannot address the tensor."""
    row = 0 if sizes[-2] == 1 else strides[-2]
    if (strides[-1] != 1 and sizes[-1] != 1) or row >= LARGEST_ROW_STRIDE:
        return None
    batch = next_stride = None
    for dim in range(len(sizes) - 4, -1, -1):
        size, stride = sizes[dim], strides[dim]
        if size == 1:
            continue
        if batch is None:
            batch = stride
        elif stride != next_stride:
            return None
        next_stride = stride * size
    return batch or 0, strides[-3], row


def _like(form: Form) -> tuple[Layout, Strides]:
    """Return the layout and strides of a result: as in `form` if kernels can write such a tensor, else contiguous."""
    sizes, strides, dtype = form
    strides = torch.empty_like(torch.empty_strided(sizes, strides, dtype=dtype, device="meta")).stride()
    if _strides(sizes, strides) is None:
        strides = contiguous_strides(sizes)
    return (tuple(sizes), strides), _strides(sizes, strides)  # type: ignore[return-value]


def _empty_statistics(query: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
    """Allocate the statistics that the forward kernel saves for the backward pass: one or two numbers per row."""
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
    kernels=Kernels(launch_forward, launch_backward, _takes),
    shapes=_fake,
    saved=Saved("query", "key", "value", "mask", "bias", "output", "statistics"),
    memory=Memory(
        strided=("query", "key", "value", "mask", "bias", "output", "statistics"),
        same_as_first=("output", "query", "key", "value"),
    ),
    derivative=Derivative(of=("query", "key", "value", "bias"), formula=reference.attention),
)
