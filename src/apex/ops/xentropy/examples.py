"""Examples of softmax cross-entropy: of logits, and of a linear layer's outputs without all logits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .._examples import Example, Make, Public, Random, Row, Sizes
from .linear import linear_cross_entropy
from .log_probs import linear_log_probs
from .op import XENTROPY, check_logits
from .reference import NO_PADDING

_BF16, _F32 = torch.bfloat16, torch.float32
_GPU = [(dtype, sizes) for dtype in (_F32, _BF16) for sizes in ((8192, 32000), (8192, 131072), (16384, 50257))]
_CPU = [(dtype, sizes) for dtype in (_F32, _BF16) for sizes in ((256, 32000), (2048, 1000))]
_RULES = ("forward_config", "backward_config", "short_config")
_SOFTCAP = 30.0


def _arguments(make: Make, rows: int, classes: int, smoothing: float, padded: bool) -> dict[str, Any]:
    logits, labels = make.normal(rows, classes), make.integers(0, classes, rows)
    if padded:
        labels[2::3] = NO_PADDING
    return {"logits": logits, "labels": labels, "smoothing": smoothing, "padding_idx": NO_PADDING}


def _call(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> Tensor:
    check_logits(logits, labels, smoothing)
    return XENTROPY(logits, labels, smoothing, padding_idx)


def _torch(logits: Tensor, labels: Tensor, smoothing: float, padding_idx: int) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, labels, ignore_index=padding_idx, reduction="none", label_smoothing=smoothing)


def _draw(random: Random) -> Sizes:
    known = (2, 10, 1000, 1000, 30522, 32000, 50257, 128256, 151936, random.length(16, 200_000))
    classes = min(random.choice(known), random.most)
    return random.size(16, min(16384, 2 * random.most // classes)), classes


def _example(name: str, smoothing: float, padded: bool, **others: Any) -> Example:
    return Example(
        name,
        others.pop("function", _call),
        functools.partial(_arguments, smoothing=smoothing, padded=padded),
        torch=others.pop("torch", _torch),
        sizes="rows x classes",
        strided=True,
        usual=(8192, 32000),
        **others,
    )


def _head_arguments(make: Make, rows: int, features: int, classes: int, bias: bool = False) -> dict[str, Any]:
    """Return inputs and weights that give logits of order one."""
    weight = make.normal(classes, features, grad=False).mul_(features**-0.5).requires_grad_()
    arguments = {"input": make.normal(rows, features), "weight": weight, "target": make.integers(0, classes, rows)}
    if not bias:
        return {**arguments, "bias": None}
    arguments["target"][2::3] = -100
    return {**arguments, "bias": make.normal(classes)}


def _head_torch(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, cap: float = 0.0) -> Tensor:
    logits = functional.linear(input, weight, bias)
    return functional.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, target)


def _own_head(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Tensor:
    """Return the loss by the function that PyTorch 2.13 has; without options it would hold all logits."""
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return functional.linear_cross_entropy(input, weight, target, options=options)  # type: ignore[attr-defined, unused-ignore]


def _log_probs(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> tuple[Any, Any]:
    outputs = linear_log_probs(input, weight, target, bias, outputs=("log_probs", "entropy"))
    return outputs.log_probs, outputs.entropy


def _log_probs_torch(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = functional.linear(input, weight, bias)
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def _draw_head(random: Random) -> Sizes:
    features, classes = 8 * random.size(1, 128), random.size(2, min(50257, random.most // 64))
    return random.size(1, max(1, random.most // max(features, classes))), features, classes


def _head(name: str, title: str, gpu: list[Sizes], bias: bool = False, **others: Any) -> Example:
    note = "bound by three matrix products, not by the bytes of the floor"
    return Example(
        name,
        arguments=functools.partial(_head_arguments, bias=bias),
        sizes="rows x features x classes",
        small=[(7, 8, 37)],
        large=[(3000, 512, 50257), (3000, 512, 32000)] if gpu else [],
        draw=_draw_head if gpu else None,
        listed=[
            *(Row("cuda", _BF16, sizes, ["fwd+bwd"], note) for sizes in gpu),
            *(Row("cpu", _F32, (256, 256, 8192), ["fwd+bwd"], note) for _ in gpu[:1]),
        ],
        title=title + " {dtype} {shape}",
        # Float64 logits of all rows would be 70 gigabytes.
        checked=lambda rows, features, classes: (min(rows, 1024), features, classes),
        terms=lambda rows, features, classes: features,
        cancels=True,
        **others,
    )


_HEADS: list[Sizes] = [(4096, 4096, 128256), (16384, 2048, 131072), (8192, 4096, 50257)]

EXAMPLES = [
    _example(
        "xentropy",
        0.1,
        padded=False,
        small=[(7, 48), (4, 1001), (7, 5), (1, 1), (5, 1), (4, 30000)],
        large=[(1000, 32000), (517, 50257), (300, 131072)],
        draw=_draw,
        listed=[*(Row("cuda", *row) for row in _GPU), *(Row("cpu", *row) for row in _CPU)],
        title="xentropy {dtype} {shape} ls0.1",
        public=[
            Public("contrib.xentropy:SoftmaxCrossEntropyLoss.apply", "logits", "labels", "smoothing", "padding_idx"),
        ],
        extensions=["xentropy_cuda"],
        asks={f"xentropy.{rule}": lambda rows, classes, **_: (rows, classes) for rule in _RULES},
    ),
    _example("xentropy_padded", 0.0, padded=True, small=[(7, 64), (4, 1000)], large=[(517, 50257)], draw=_draw),
    _example(
        "xentropy_sum",
        0.1,
        padded=False,
        function=lambda *arguments: _call(*arguments).sum(),
        torch=lambda *arguments: _torch(*arguments).sum(),
        small=[(7, 48)],
        listed=[Row("cuda", *row, ["fwd+grad(in place)"], "ours leaves the logits as they are") for row in _GPU],
        title="xentropy {dtype} {shape} ls0.1",
    ),
    _head(
        "linear_xentropy",
        "linear_xentropy",
        _HEADS,
        function=linear_cross_entropy,
        torch=_head_torch,
        peers={"torch_linear": _own_head} if hasattr(functional, "linear_cross_entropy") else {},
    ),
    _head(
        "linear_xentropy_bias",
        "linear_xentropy bias",
        [],
        bias=True,
        function=functools.partial(linear_cross_entropy, chunk_rows=3),
        torch=_head_torch,
        public=[
            Public("contrib.xentropy:linear_cross_entropy", "input", "weight", "target", "bias"),
            Public(
                "contrib.xentropy:LinearCrossEntropyLoss", "input", "weight", "target", "bias", module=lambda *_: ()
            ),
            Public("contrib.xentropy:linear_log_probs", "input", "weight", "target", "bias"),
        ],
    ),
    _head(
        "linear_xentropy_softcap",
        "linear_xentropy softcap",
        _HEADS[:1],
        function=functools.partial(linear_cross_entropy, softcap=_SOFTCAP),
        torch=functools.partial(_head_torch, cap=_SOFTCAP),
    ),
    _head(
        "linear_log_probs",
        "linear_log_probs entropy",
        _HEADS[:1],
        function=_log_probs,
        torch=_log_probs_torch,
    ),
]
