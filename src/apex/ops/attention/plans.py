"""From the tensors of an attention with mask and bias to launches: what depends on their kinds is planned once.

Letters: `...` batches, H heads, M queries, N keys, D the size of a head.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _device, _library
from . import launches
from .checks import Kind, check_kinds

# Kernels multiply the stride of a row by the rows of a tile, at most 128, in 32 bits.
LARGEST_ROW_STRIDE = 2**31 // 128

Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None]


class _Added(NamedTuple):
    """How a mask or a bias becomes what the kernels take: [groups, N] or [groups, H, M, N]."""

    group: int  # batches that share one
    expanded: tuple[int, ...] | None  # the shape to expand it to first, if any
    shape: tuple[int, ...]
    as_it_is: bool  # nothing has to be done

    def of(self, tensor: Tensor) -> Tensor:
        if self.as_it_is:
            return tensor
        if tensor.dtype not in _library.TRITON_DTYPES:
            tensor = tensor.to(torch.float32)
        if self.expanded is not None:
            tensor = tensor.expand(self.expanded)
        return tensor.reshape(self.shape).contiguous()


def _added(given: Kind, lead: tuple[int, ...], inner: tuple[int, ...]) -> _Added:
    """`given`, broadcast to [*lead, *inner], with batches that share it kept together where they lie together."""
    shape, strides, dtype, _ = given
    padded = (1,) * (len(lead) + len(inner) - len(shape)) + tuple(shape)
    outer = padded[: len(lead)]
    own = len(lead)
    while own and outer[own - 1] == 1:
        own -= 1
    shared = outer[:own] == lead[:own]
    outer = outer if shared else lead
    groups = math.prod(outer)
    expanded = (*outer, *inner)
    contiguous = torch.empty_strided(shape, strides, dtype=dtype, device="meta").is_contiguous()
    return _Added(
        math.prod(lead) // groups,
        None if expanded == padded else expanded,
        (groups, inner[-1]) if inner[:-1] == (1, 1) else (groups, *inner),
        expanded == padded and contiguous and dtype in _library.TRITON_DTYPES,
    )


def folded(mask: Tensor, bias: Tensor | None, inf: float) -> Tensor:
    """A mask of single logits, not of whole keys, as a part of the bias."""
    terms = (mask.to(torch.float32) - 1) * inf
    return terms if bias is None else bias + terms


def folds(mask: Tensor | None) -> bool:
    """Whether a mask is one of single logits."""
    return mask is not None and mask.dim() > 1 and (mask.shape[-2] != 1 or (mask.dim() > 2 and mask.shape[-3] != 1))


def walk(shape: tuple[int, ...], strides: tuple[int, ...]) -> launches.Strides | None:
    """Strides of batch, head and row with which a kernel can walk through a tensor; None if it cannot."""
    if (strides[-1] != 1 and shape[-1] != 1) or strides[-2] >= LARGEST_ROW_STRIDE:
        return None
    batch = next_stride = None
    for size, stride in zip(reversed(shape[:-3]), reversed(strides[:-3]), strict=True):
        if size == 1:
            continue
        if batch is None:
            batch = stride
        elif stride != next_stride:
            return None
        next_stride = stride * size
    return batch or 0, strides[-3], strides[-2]


class _Operand:
    """A tensor that kernels read, and a result of its shape and, where possible, its order in memory."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        tensor = torch.empty_strided(shape, strides, dtype=torch.float32, device="meta")
        self.is_copied = walk(shape, strides) is None
        if self.is_copied:
            tensor = tensor.contiguous()
        result = empty_like(tensor)
        self.shape = shape
        self.walk = _known(walk(shape, tensor.stride()))
        self.result_strides = result.stride()
        self.result_walk = _known(walk(shape, result.stride()))
        same = result.stride() == torch.empty_like(tensor).stride()
        self._format = torch.preserve_format if same else torch.contiguous_format

    def given(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous() if self.is_copied else tensor

    def empty_result(self, tensor: Tensor) -> Tensor:
        """Room for a result, from what `given` returned."""
        return torch.empty_like(tensor, memory_format=self._format)


def _known(strides: launches.Strides | None) -> launches.Strides:
    assert strides is not None
    return strides


def empty_like(tensor: Tensor) -> Tensor:
    """Memory for a result, laid out like `tensor` where kernels can walk through that; for sizes not known yet too."""
    result = torch.empty_like(tensor)
    if walk(tuple(result.shape), result.stride()) is None:
        return torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return result


class Plan:
    """The launches for tensors of given kinds, forward and backward."""

    def __init__(
        self,
        query: Kind,
        key: Kind,
        value: Kind,
        mask: Kind | None,
        bias: Kind | None,
        inf: float,
        facts: _device.DeviceFacts,
    ) -> None:
        check_kinds(query, key, value, mask, bias)
        shape, _, dtype, device = query
        *lead, heads, rows, head_dim = shape
        columns = key[0][-2]
        batches = tuple(lead)
        self.of_mask = None if mask is None else _added(mask, batches, (1, 1, columns))
        self.of_bias = None if bias is None else _added(bias, batches, (heads, rows, columns))
        self.query, self.key, self.value = (_Operand(tuple(t[0]), t[1]) for t in (query, key, value))
        self.where = device, facts
        self.problem = launches.Problem(
            math.prod(batches),
            heads,
            rows,
            columns,
            head_dim,
            dtype,
            inf,
            self.of_mask.group if self.of_mask else 0,
            self.of_bias.group if self.of_bias else 0,
            others=tuple(None if each is None else each[2] for each in (mask, bias)),
        )
        self.walks = self.query.walk, self.key.walk, self.value.walk, self.query.result_walk
        self._statistics_shape = self.problem.statistics_shape
        self._saved = launches.forward(self.problem, *self.walks, True, *self.where)
        self._unsaved = launches.forward(self.problem, *self.walks, False, *self.where)
        self._backwards: dict[tuple[tuple[int, ...], bool], Backward] = {}

    def taken(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the kernels take, in place of what was given."""
        if self.of_mask is not None and mask is not None:
            mask = self.of_mask.of(mask)
        if self.of_bias is not None and bias is not None:
            bias = self.of_bias.of(bias)
        return self.query.given(query), self.key.given(key), self.value.given(value), mask, bias

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, saves: bool
    ) -> tuple[Tensor, Tensor]:
        """Output and statistics, which are empty unless it `saves` them."""
        query, key, value, mask, bias = self.taken(query, key, value, mask, bias)
        output = self.query.empty_result(query)
        statistics = query.new_empty(self._statistics_shape if saves else (0,), dtype=torch.float32)
        launch = self._saved if saves else self._unsaved
        launch(query, key, value, mask, bias, None, None, output, statistics)
        return output, statistics

    def backward(self, dout_strides: tuple[int, ...], bias_grad: bool) -> Backward:
        """The launches back, with a gradient of the bias or without."""
        known = self._backwards.get((dout_strides, bias_grad))
        if known is None:
            known = self._backwards[dout_strides, bias_grad] = Backward(self, dout_strides, bias_grad)
        return known


class Backward:
    """The launches of a backward pass, for a gradient of the output with given strides."""

    def __init__(self, plan: Plan, dout_strides: tuple[int, ...], bias_grad: bool) -> None:
        problem, where = plan.problem, plan.where
        self.plan, self.dout_strides, self.bias_grad = plan, dout_strides, bias_grad
        self._dout = _Operand(plan.query.shape, dout_strides)
        walks = *plan.walks, self._dout.walk
        results = plan.key.result_walk, plan.value.result_walk
        if not bias_grad:
            self._of_queries = launches.backward_queries(problem, *walks, plan.query.result_walk, *where)
            self._of_keys = launches.backward_keys(problem, *walks, *results, None, *where)
            return
        at_once = launches.batches_at_once(problem)
        self._dlogits_shape = at_once, problem.heads, problem.columns, problem.rows
        self._parts = [
            (
                part,
                launches.backward_keys(problem, *walks, *results, part, *where),
                launches.backward_stored(problem, plan.key.walk, plan.query.result_walk, part, *where),
            )
            for part in launches.parts_of_batches(problem)
        ]

    def run(
        self,
        dout: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        output: Tensor,
        statistics: Tensor,
    ) -> Gradients:
        """Gradients of query, key, value and, if planned, of the bias: that is [groups, H, M, N]."""
        plan = self.plan
        query, key, value, mask, bias = plan.taken(query, key, value, mask, bias)
        given = query, key, value, mask, bias, None, None, output, self._dout.given(dout), statistics
        gradients = plan.query.empty_result(query), plan.key.empty_result(key), plan.value.empty_result(value)
        if self.bias_grad:
            return *gradients, self._run_with_bias(bias, given, *gradients)
        delta = statistics.new_empty(statistics.shape[1:])
        dquery, dkey, dvalue = gradients
        self._of_queries(*given, delta, dquery)
        self._of_keys(*given, delta, None, dkey, dvalue)
        return *gradients, None

    def _run_with_bias(
        self, bias: Tensor | None, given: tuple[Tensor | None, ...], dquery: Tensor, dkey: Tensor, dvalue: Tensor
    ) -> Tensor:
        """The gradient of the bias: that of the logits, [batches, H, N, M], summed over the batches that share it.

        The gradients of logits are stored, part by part, because computing them a second time for the sum takes longer.
        """
        assert bias is not None
        assert self.plan.of_bias is not None
        # In float32 where there is more to add up, because the bias was expanded.
        dtype = bias.dtype if self.plan.of_bias.expanded is None else torch.float32
        group, key = self.plan.problem.bias_group, given[1]
        at_once, *shape = self._dlogits_shape
        dlogits = dquery.new_empty(self._dlogits_shape)
        sums: list[Tensor] = []
        for (first, count), of_keys, of_queries in self._parts:
            of_keys(*given, None, dlogits, dkey, dvalue)
            of_queries(dlogits, key, dquery)
            done = dlogits if count == at_once else dlogits[:count]
            if count <= group:
                total = done.sum(0, keepdim=True, dtype=dtype if count == group else torch.float32)
            else:  # several whole groups
                total = done.view(count // group, group, *shape).sum(1, dtype=dtype)
            if first % group:  # not the first part of its group
                sums[-1] += total
            else:
                sums.append(total)
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).transpose(-1, -2)


@functools.lru_cache(maxsize=4096)
def _plan(
    query: Kind,
    key: Kind,
    value: Kind,
    mask: Kind | None,
    bias: Kind | None,
    inf: float,
    facts: _device.DeviceFacts,
) -> Plan:
    return Plan(query, key, value, mask, bias, inf, facts)


def plan(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None, inf: float) -> Plan:
    """The plan for tensors like these; the mask is one of whole keys."""
    return _plan(
        (query.shape, query.stride(), query.dtype, query.device),
        (key.shape, key.stride(), key.dtype, key.device),
        (value.shape, value.stride(), value.dtype, value.device),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.device),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device),
        inf,
        _device.facts(query.device),
    )
