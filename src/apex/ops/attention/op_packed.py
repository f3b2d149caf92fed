"""Attention within packed sequences: `qkv` [total, 3, H, D], sequence i being rows cu_seqlens[i] to cu_seqlens[i + 1].

The host never waits for the device: only kernels read the lengths.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .. import _library
from .._checks import check_tensors, integer, number, values_at_hand
from .._device import launch_rule
from .._op import Derivative, Kernels, Memory, Op, Saved
from . import config, reference
from .op_common import FAMILY, autocast_dtype, launch_packed_backward, launch_packed_forward, takes_head


def packed_attention(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    *,
    generator: torch.Generator | None = None,
    zero_tail: bool = True,
) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v within every sequence, [total, H, D].

    `max_seqlen` is at least the length of the longest sequence. Probabilities are dropped with probability `dropout_p`.
    Rows after the last sequence are zeros; with `zero_tail=False` they may have any value.
    """
    check_tensors(qkv=qkv)
    dtype = autocast_dtype(qkv)
    if dtype is not None:
        qkv = qkv.to(dtype)
    check(qkv, cu_seqlens, max_seqlen, dropout_p)
    seed = draw_seed(qkv.device, generator) if dropout_p > 0 else None
    settings = settings_of(qkv, cu_seqlens, max_seqlen, dropout_p, zero_tail)
    attend = PACKED_ATTENTION if torch.is_grad_enabled() else inference
    return attend(qkv, cu_seqlens, seed, *settings)


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Return a seed for dropout, int64 [1], from the generator of the device."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device, generator=generator)


def settings_of(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float, zero_tail: bool
) -> tuple[int, float, bool, bool]:
    """Return the settings of `PACKED_ATTENTION`; the last one says whether cuDNN is tried first."""
    asks = not (zero_tail or dropout_p) and asks_cudnn(qkv, cu_seqlens.shape[0] - 1, max_seqlen)
    return max_seqlen, dropout_p, zero_tail, asks


def inference(*arguments) -> Tensor:  # type: ignore[no-untyped-def]
    """Return the output for the arguments of `PACKED_ATTENTION`, saving nothing for a backward pass."""
    if torch.compiler.is_compiling() or not (_takes(*arguments) and _library.runs_triton(FAMILY, arguments[0])):
        return PACKED_ATTENTION(*arguments)
    return launch_forward(*arguments, saves=False)[0]  # type: ignore[return-value]


def _takes(qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, max_seqlen: int, *others: object) -> bool:
    """Return whether the kernels take tensors of these shapes."""
    return takes_head(qkv) and qkv.numel() > 0 and cu_seqlens.shape[0] > 1 and max_seqlen > 0


def check(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float) -> None:
    """Raise for arguments that do not fit together; check the lengths if the host can read them without waiting."""
    if type(qkv) not in _library.PLAIN or type(cu_seqlens) not in _library.PLAIN:
        check_tensors(qkv=qkv, cu_seqlens=cu_seqlens)
    shape, bounds_shape = qkv.shape, cu_seqlens.shape
    if len(shape) != 4 or shape[1] != 3 or shape[3] == 0:
        raise ValueError(f"qkv has shape {list(shape)}; it must be [total, 3, heads, head size]")
    if not qkv.is_floating_point():
        raise TypeError(f"attention needs a floating-point tensor, qkv is {qkv.dtype}")
    if len(bounds_shape) != 1 or bounds_shape[0] == 0:
        raise ValueError(
            f"cu_seqlens has shape {list(bounds_shape)}; it must be [sequences + 1], the first row of each "
            "sequence and the end of the last"
        )
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens is {cu_seqlens.dtype}; int32 and int64 are accepted")
    if cu_seqlens.device != qkv.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device}, qkv on {qkv.device}")
    if not 0.0 <= number("p_dropout", dropout_p) < 1.0:
        raise ValueError(f"p_dropout={dropout_p} is not in [0, 1)")
    integer("max_s", max_seqlen)
    bounds = values_at_hand(cu_seqlens)
    if bounds is not None:
        lengths = [end - start for start, end in pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] > shape[0] or any(length < 0 for length in lengths):
            raise ValueError(f"cu_seqlens={bounds} must grow from 0 to at most the {shape[0]} rows of qkv")
        if lengths and max(lengths) > max_seqlen:
            raise ValueError(f"max_s={max_seqlen} is less than the longest sequence, which has {max(lengths)} rows")


def asks_cudnn(qkv: Tensor, sequences: int, length: int) -> bool:
    """Return whether cuDNN's attention, which comes with PyTorch, should first compute packed sequences as one batch.

    Only the device knows the lengths. If there are exactly as many rows as sequences of the greatest length have,
    either all sequences have that length, or rows are left over behind the last one. The host lets cuDNN compute the
    first case. A kernel launched behind it reads `cu_seqlens` and finds nothing to do, or computes everything anew.
    """
    return (
        qkv.is_cuda
        and not torch.compiler.is_compiling()
        and cudnn_takes(qkv.shape, qkv.dtype, sequences, length, qkv.device)
        and _library.runs_triton_now(FAMILY, qkv)  # before the address, which a refused tensor may not have
        and qkv.is_contiguous()
        and qkv.data_ptr() % 16 == 0
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


@launch_rule
def cudnn_takes(shape: torch.Size, dtype: torch.dtype, sequences: int, length: int, device: torch.device) -> bool:
    """Return whether cuDNN's attention takes sequences [total, 3, H, D] of equal lengths, and is the faster one."""
    total, _, heads, head_dim = shape
    return (
        total == sequences * length
        and length >= config.CUDNN_SHORTEST
        and config.CUDNN_FEWEST_ELEMENTS <= total * heads * head_dim < config.CUDNN_MOST_ELEMENTS
        and dtype.itemsize == 2
        and head_dim % 8 == 0
        and head_dim <= 128
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)  # cuDNN is quicker there; other GPUs were not measured
        and torch.backends.cudnn.is_available()
    )


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, saves: bool) -> tuple[Tensor, Tensor | None]:
    """Return the output [total, H, D] and, if it `saves` it, the log of each row's sum of exponentials."""
    output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(query, key, value, None, saves)
    sequences, heads, length, head_dim = output.shape
    # Detached: a view that an autograd Function returns could not be changed in place.
    return output.transpose(1, 2).reshape(sequences * length, heads, head_dim).detach(), logsumexp if saves else None


def launch_forward(
    qkv: Tensor, cu_seqlens: Tensor, seed: Tensor | None, *settings: Any, saves: bool = True
) -> tuple[Tensor | None, ...]:
    """Return the output and, if it `saves` them, statistics [H, total]; cuDNN's have their own order and shape."""
    max_seqlen, dropout_p, zero_tail, cudnn_first = settings
    strides, results = qkv.stride(), None
    if strides[3] != 1:
        qkv = qkv.contiguous()
        strides = qkv.stride()
    shape = qkv.shape
    if cudnn_first:
        # [sequences, H, length, D] each
        query, key, value = tensors = qkv.view(-1, max_seqlen, *shape[1:]).permute(2, 0, 3, 1, 4).unbind(0)
        results = cudnn_attention(query, key, value, saves)
    else:
        tensors = qkv.unbind(1)
    options = (max_seqlen, max_seqlen, None, -1, -1, dropout_p, zero_tail, cudnn_first)
    results = launch_packed_forward(tensors, (cu_seqlens, None, seed), (shape, strides), options, saves, results)
    return results or PACKED_ATTENTION.run_reference(qkv, cu_seqlens, seed, *settings)


def launch_backward(dout: Tensor, *saved: Any) -> Tensor | tuple[Tensor | None, ...]:
    """Return the gradient of qkv; `saved` is the saved tensors of `PACKED_ATTENTION`, its settings and `wanted`."""
    qkv, cu_seqlens, seed, *results, max_seqlen, dropout_p, zero_tail, cudnn_first, wanted = saved
    strides = qkv.stride()
    if strides[3] != 1:
        qkv = qkv.contiguous()
        strides = qkv.stride()
    options = (max_seqlen, max_seqlen, None, -1, -1, dropout_p, zero_tail, cudnn_first)
    bounds = (cu_seqlens, None, seed)
    gradient = launch_packed_backward(dout, qkv.unbind(1), bounds, results, (qkv.shape, strides), options)
    if gradient is None:
        return PACKED_ATTENTION.run_reference_backward((dout,), saved[:5], saved[5:-1], wanted)
    return gradient


def _reference(qkv, cu_seqlens, seed, max_seqlen, dropout_p, *others):  # type: ignore[no-untyped-def]
    output = reference.sdpa_packed_attention(qkv, cu_seqlens, max_seqlen, dropout_p, seed)
    return output, qkv.new_zeros((qkv.shape[2], qkv.shape[0]), dtype=torch.float32)


def _fake(qkv, *others):  # type: ignore[no-untyped-def]
    total, _, heads, head_dim = qkv.shape
    return qkv.new_empty((total, heads, head_dim)), qkv.new_empty((heads, total), dtype=torch.float32)


PACKED_ATTENTION = Op(
    FAMILY,
    "packed_attention(Tensor qkv, Tensor cu_seqlens, Tensor? seed, int max_seqlen, float dropout_p, bool zero_tail, "
    "bool cudnn_first) -> (Tensor output, Tensor statistics)",
    reference=_reference,
    kernels=Kernels(launch_forward, launch_backward, _takes),
    shapes=_fake,
    saved=Saved("qkv", "cu_seqlens", "seed", "output", "statistics"),
    memory=Memory(strided=("qkv",)),
    derivative=Derivative(
        of=("qkv",),
        formula=lambda qkv, cu_seqlens, seed, max_seqlen, dropout_p, *others: reference.padded_attention(
            qkv, cu_seqlens, max_seqlen, dropout_p, seed, sdpa=False
        ),
    ),
)
