"""Attention within packed sequences: `qkv` [total, 3, H, D], sequence i being rows cu_seqlens[i] to cu_seqlens[i + 1].

Nothing waits for the device: lengths are read by the kernels only.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _device, _library
from .._checks import check_tensors, values_at_hand
from . import dense, launches, native
from .family import FAMILY, autocast_dtype, takes_head


def packed_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    *,
    generator: torch.Generator | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v within every sequence, [total, H, D].

    `max_seqlen` is the length of the longest sequence, or more. Probabilities are dropped with probability `dropout_p`.
    Rows after the last sequence are zeros; with `zero_tail=False` they may be anything.
    """
    check_tensors(qkv=qkv)
    dtype = autocast_dtype(qkv)
    if dtype is not None:
        qkv = qkv.to(dtype)
    check(qkv, cu_seqlens, max_seqlen, dropout_p)
    seed = draw_seed(qkv.device, generator) if dropout_p > 0 else None
    if not runs_kernels(qkv, cu_seqlens, max_seqlen):
        return native.packed_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return PackedAttentionFunction.apply(qkv, cu_seqlens, seed, max_seqlen, dropout_p, zero_tail)
    return forward(qkv, cu_seqlens, seed, max_seqlen, dropout_p, zero_tail, saves=False)[0]


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """A seed for dropout, int64 [1], from the generator of the device."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device, generator=generator)


def runs_kernels(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> bool:
    """Whether the kernels take these tensors."""
    return (
        takes_head(qkv)
        and qkv.numel() > 0
        and cu_seqlens.shape[0] > 1
        and max_seqlen > 0
        and _library.runs_triton(FAMILY, qkv)
    )


def check(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float) -> None:
    """Raises for arguments that do not fit; lengths are looked at where that needs no wait."""
    check_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    if qkv.dim() != 4 or qkv.shape[1] != 3 or qkv.shape[3] == 0:
        raise ValueError(f"qkv has shape {list(qkv.shape)}; it must be [total, 3, heads, head size]")
    if not qkv.is_floating_point():
        raise TypeError(f"attention needs a floating-point tensor, qkv is {qkv.dtype}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [sequences + 1], the first row of each "
            "sequence and the end of the last"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; int32 and int64 are accepted")
    if cu_seqlens.device != qkv.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, qkv on {qkv.device}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"p_dropout={dropout_p} is not in [0, 1)")
    bounds = values_at_hand(cu_seqlens)
    if bounds is not None:
        lengths = [end - start for start, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] > qkv.shape[0] or any(length < 0 for length in lengths):
            raise ValueError(f"cu_seqlens={bounds} must grow from 0 to at most the {qkv.shape[0]} rows of qkv")
        if lengths and max(lengths) > max_seqlen:
            raise ValueError(f"max_s={max_seqlen} is less than the longest sequence, which has {max(lengths)} rows")


class Plan:
    """The launches for packed sequences of one shape: everything but their tensors."""

    def __init__(
        self,
        problem: launches.Problem,
        strides: tuple[int, ...],
        device: torch.device,
        facts: _device.DeviceFacts,
    ) -> None:
        heads, head_dim, total = problem.heads, problem.head_dim, problem.total
        made = (0, head_dim, 3 * heads * head_dim)
        self._copies = strides[3] != 1
        given = made if self._copies else (0, strides[2], strides[0])
        out = (0, head_dim, heads * head_dim)
        where = device, facts
        self._filled = problem.filled
        self._sequences, self._length = problem.batch, problem.rows
        self._out_shape = total, heads, head_dim
        self._statistics_shape = problem.statistics_shape
        self._unsaved = launches.forward(problem, given, given, given, out, False, *where)
        self._saved = launches.forward(problem, given, given, given, out, True, *where)
        self._of_queries = launches.backward_queries(problem, given, given, given, out, out, made, *where)
        self._of_keys = launches.backward_keys(problem, given, given, given, out, out, made, made, None, *where)

    def _taken(self, qkv: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """What the kernels take, copied where they cannot walk through it."""
        return qkv.contiguous() if self._copies else qkv, cu_seqlens.contiguous()

    def forward(
        self, qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, saves: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Output and, if it `saves` them, statistics, for `backward` of the same plan."""
        qkv, cu_seqlens = self._taken(qkv, cu_seqlens)
        if self._filled:
            query, key, value = dense.split(qkv, self._sequences, self._length)
            output, statistics = dense.forward(query, key, value, saves)
        else:
            query, key, value = qkv.unbind(1)
            output = qkv.new_empty(self._out_shape)
            statistics = qkv.new_empty(self._statistics_shape, dtype=torch.float32) if saves else None
        launch = self._saved if saves else self._unsaved
        launch(query, key, value, None, None, cu_seqlens, seed, output, statistics)
        return output, statistics

    def backward(
        self, dout: Tensor, qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, output: Tensor, statistics: Tensor
    ) -> Tensor:
        """The gradient of qkv."""
        qkv, cu_seqlens = self._taken(qkv, cu_seqlens)
        dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
        delta = torch.empty_like(statistics)
        queries, keys, values = qkv.unbind(1)
        dqueries, dkeys, dvalues = dqkv.unbind(1)
        dout = dout.contiguous()
        self._of_queries(queries, keys, values, None, None, cu_seqlens, seed, output, dout, statistics, delta, dqueries)
        self._of_keys(
            queries, keys, values, None, None, cu_seqlens, seed, output, dout, statistics, delta, None, dkeys, dvalues
        )
        return dqkv


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    sequences: int,
    max_seqlen: int,
    dropout_p: float,
    zero_tail: bool,
    filled: bool,
    lengths_dtype: torch.dtype,
    device: torch.device,
    facts: _device.DeviceFacts,
) -> Plan:
    total, _, heads, head_dim = shape
    problem = launches.Problem(
        sequences,
        heads,
        max_seqlen,
        max_seqlen,
        head_dim,
        dtype,
        total=total,
        tail=zero_tail,
        dropout_p=dropout_p,
        filled=filled,
        others=(lengths_dtype,),
    )
    return Plan(problem, strides, device, facts)


def _planned(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, zero_tail: bool, may_ask_cudnn: bool
) -> Plan:
    """The plan for tensors like these.

    One that asks cuDNN first has statistics in an order of its own, which are for its own `backward` only.
    """
    device = qkv.device
    sequences = cu_seqlens.shape[0] - 1
    filled = may_ask_cudnn and not zero_tail and dropout_p == 0 and dense.takes(qkv, sequences, max_seqlen)
    return _plan(
        qkv.shape,
        qkv.stride(),
        qkv.dtype,
        sequences,
        max_seqlen,
        dropout_p,
        zero_tail,
        filled,
        cu_seqlens.dtype,
        device,
        _device.facts(device),
    )


def forward(
    qkv: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    dropout_p: float,
    zero_tail: bool,
    *,
    saves: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Output and, if it `saves` them, statistics [1, H, total]."""
    if not runs_kernels(qkv, cu_seqlens, max_seqlen):
        output = native.packed_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
        total, _, heads, _ = qkv.shape
        return output.contiguous(), qkv.new_zeros((1, heads, total), dtype=torch.float32)
    plan = _planned(qkv, cu_seqlens, max_seqlen, dropout_p, zero_tail, may_ask_cudnn=not saves)
    return plan.forward(qkv, cu_seqlens, seed, saves)


def backward(
    dout: Tensor,
    qkv: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    max_seqlen: int,
    dropout_p: float,
    zero_tail: bool,
) -> Tensor:
    """Gradient of qkv."""
    if not runs_kernels(qkv, cu_seqlens, max_seqlen):
        return native.padded_backward(dout, qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    plan = _planned(qkv, cu_seqlens, max_seqlen, dropout_p, zero_tail, may_ask_cudnn=False)
    return plan.backward(dout, qkv, cu_seqlens, seed, output.contiguous(), statistics)


def forward_and_save(
    ctx: Any,
    qkv: Tensor,
    cu_seqlens: Tensor,
    seed: Tensor | None,
    max_seqlen: int,
    dropout_p: float,
    zero_tail: bool,
) -> Tensor:
    """The forward of every packed attention's autograd Function; arguments were checked."""
    ctx.options = options = max_seqlen, dropout_p, zero_tail
    ctx.graph = ctx.plan = statistics = None
    if torch.compiler.is_compiling():
        output, statistics = torch.ops.apex.packed_attention_forward(qkv, cu_seqlens, seed, *options)
    elif runs_kernels(qkv, cu_seqlens, max_seqlen):
        # Kept for the way back, because autograd's thread runs Python at 0.6 times the speed.
        ctx.plan = _planned(qkv, cu_seqlens, *options, may_ask_cudnn=True)
        output, statistics = ctx.plan.forward(qkv, cu_seqlens, seed, True)
    elif ctx.needs_input_grad[0]:
        ctx.graph = native.Graph(
            lambda qkv: native.packed_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed), [qkv], [True]
        )
        output = ctx.graph.output
    else:
        output, statistics = forward(qkv, cu_seqlens, seed, *options)
    ctx.save_for_backward(qkv, cu_seqlens, seed, output, statistics)
    return output


def backward_from_saved(ctx: Any, dout: Tensor) -> Tensor:
    """The backward of every packed attention's autograd Function."""
    qkv, cu_seqlens, seed, output, statistics = ctx.saved_tensors
    if ctx.plan is not None and not torch.is_grad_enabled():
        return ctx.plan.backward(dout, qkv, cu_seqlens, seed, output, statistics)
    if torch.compiler.is_compiling():
        return torch.ops.apex.packed_attention_backward(dout, qkv, cu_seqlens, seed, output, statistics, *ctx.options)
    if torch.is_grad_enabled():  # create_graph=True: the gradients themselves must be differentiable
        max_seqlen, dropout_p, _ = ctx.options
        return native.padded_backward(dout, qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    if ctx.graph is not None:
        return ctx.graph.backward(dout)[0]
    return backward(dout, qkv, cu_seqlens, seed, output, statistics, *ctx.options)


class PackedAttentionFunction(torch.autograd.Function):
    """The autograd node behind `packed_attention`."""

    forward = staticmethod(forward_and_save)

    @staticmethod
    def backward(ctx, dout):  # type: ignore[override]
        return backward_from_saved(ctx, dout), None, None, None, None, None
