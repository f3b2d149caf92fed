"""Functions of other packages that benchmarks time beside ours, by the example whose arguments they take."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

# By example: the package and a function that imports it and returns the peer.
PEERS: dict[str, tuple[str, Callable[[], Callable[..., Any]]]] = {}


def installed(example: str) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Return the peer of an example, by the name of its column, if its package is installed."""
    package, make = PEERS.get(example, ("", None))
    if make is None or importlib.util.find_spec(package) is None:
        return {}
    return {package.removesuffix("_kernel").rpartition(".")[2]: make}


def _peer(package: str, *examples: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        PEERS.update(dict.fromkeys(examples, (package, make)))
        return make

    return register


@_peer("liger_kernel", "swiglu_no_bias")
def _liger_swiglu() -> Callable[..., Any]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction  # type: ignore[import-not-found]

    return lambda input, bias, activation: LigerFusedGateUpSiLUMulFunction.apply(input)


@_peer("liger_kernel", "layer_norm")
def _liger_layer_norm() -> Callable[..., Any]:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction  # type: ignore[import-not-found]

    return lambda input, shape, weight, bias, eps: LigerLayerNormFunction.apply(input, weight, bias, eps)


@_peer("liger_kernel", "rms_norm")
def _liger_rms_norm() -> Callable[..., Any]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # type: ignore[import-not-found]

    # weight offset, casting mode, in place
    return lambda input, shape, weight, eps: LigerRMSNormFunction.apply(input, weight, eps, 0.0, "llama", False)


@_peer("liger_kernel", "softmax")
def _liger_softmax() -> Callable[..., Any]:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction  # type: ignore[import-not-found]

    return lambda input, mask, scale, causal: LigerSoftmaxFunction.apply(input * scale)


@_peer("liger_kernel", "xentropy_sum")
def _liger_xentropy() -> Callable[..., Any]:
    """Return Liger-Kernel's function, which overwrites the logits with their gradient.

    It comes after the other implementations have been checked. They are timed on the gradient, which is as good.
    """
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # type: ignore[import-not-found]

    def loss(logits: Any, labels: Any, smoothing: float, padding: int) -> Any:
        # class weights, ignored index, factor of the squared logarithms, smoothing, reduction
        return LigerCrossEntropyFunction.apply(logits, labels, None, padding, 0.0, smoothing, "sum")[0]

    return loss


@_peer("liger_kernel", "linear_xentropy")
def _liger_linear_xentropy() -> Callable[..., Any]:
    from liger_kernel.ops.fused_linear_cross_entropy import (  # type: ignore[import-not-found]
        LigerFusedLinearCrossEntropyFunction,
    )

    return lambda input, weight, target, bias: LigerFusedLinearCrossEntropyFunction.apply(input, weight, target)[0]


@_peer("torch.nn.attention.varlen", "fmha", "fmha_uneven")
def _varlen() -> Callable[..., Any]:
    """Return PyTorch's attention within packed sequences, of half precision and without dropout."""
    from torch.nn.attention.varlen import varlen_attn  # type: ignore[import-not-found, unused-ignore]

    def attend(qkv: Any, cu_seqlens: Any, max_seqlen: int, dropout_p: float) -> Any:
        if dropout_p:
            raise NotImplementedError("no dropout")
        query, key, value = qkv.unbind(1)
        return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)

    return attend


@_peer("torchaudio", "transducer_loss")
def _torchaudio_loss() -> Callable[..., Any]:
    from torchaudio.functional import rnnt_loss  # type: ignore[import-not-found, unused-ignore]

    def loss(x: Any, label: Any, f_len: Any, y_len: Any, ends: Any, frames: int, blank: int) -> Any:
        return rnnt_loss(x, label, f_len, y_len, blank=blank, reduction="none")

    return loss


@_peer("liger_kernel", "rope_qk")
def _liger_rope() -> Callable[..., Any]:
    """Return Liger-Kernel's function, which rotates its arguments in place, with heads before tokens.

    It comes after the other implementations have been checked. They are timed on the rotated values, which are as good.
    """
    from liger_kernel.ops.rope import LigerRopeFunction  # type: ignore[import-not-found]

    def rotate(query: Any, key: Any, cos_: Any, sin_: Any) -> list[Any]:
        tables = (table[None, :, 0, 0] for table in (cos_, sin_))
        results = LigerRopeFunction.apply(query.detach().transpose(1, 2), key.detach().transpose(1, 2), *tables)
        return [result.transpose(1, 2) for result in results]

    return rotate
