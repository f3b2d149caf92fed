"""Attention modules: whole steps, forward and backward, compared with code around PyTorch's attention."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from ..compiling import compiled
from ..directions import Random, long_name
from ..registry import OURS, Call, Case, Expected, Family, Prepared, register


@dataclass(frozen=True)
class Setting:
    """An attention module and its inputs; `mask` is "none", "padding", "time" or "causal"."""

    length: int
    batch: int
    mask: str = "none"
    dropout: float = 0.0
    dtype: torch.dtype = torch.float16
    norm_add: bool = False
    encdec: bool = False
    width: int = 1024
    heads: int = 16

    def __str__(self) -> str:
        kind = ("encdec" if self.encdec else "self") + (" norm_add" if self.norm_add else "")
        return (
            f"{kind} {long_name(self.dtype)} {self.length}x{self.batch}x{self.width} {self.mask} dropout {self.dropout}"
        )

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of inputs, outputs, parameters and their gradients; arithmetic takes far longer."""
        activations = (6 if self.encdec else 4) * self.length * self.batch * self.width
        return self.dtype.itemsize * (activations + 8 * self.width * self.width)


# Timed settings may use dropout and half precision; checked settings are small, deterministic and in float32.
CHECKED: dict[str, Any] = {"length": 24, "batch": 3, "width": 64, "heads": 4, "dropout": 0.0, "dtype": torch.float32}


def by_hand(setting: Setting, ours: Any) -> Callable[..., Tensor]:
    """Return attention around `F.scaled_dot_product_attention`, with our modules' parameters and masks."""

    def split(packed: Tensor, parts: int) -> list[Tensor]:
        shape = (*packed.shape[:2], setting.heads, parts, setting.width // setting.heads)
        return [part.permute(1, 2, 0, 3) for part in packed.view(shape).unbind(3)]

    def attend(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        inputs = query
        if setting.norm_add:
            norm = ours.lyr_nrm_gamma_weights, ours.lyr_nrm_beta_weights
            inputs = F.layer_norm(query, (setting.width,), *norm, 1e-5)
        if setting.encdec:
            q, k, v = split(F.linear(inputs, ours.in_proj_weight_q), 1) + split(
                F.linear(key, ours.in_proj_weight_kv), 2
            )
        else:
            q, k, v = split(F.linear(inputs, ours.in_proj_weight), 3)
        seen = None if mask is None else ~mask
        if setting.mask == "padding" and seen is not None:
            seen = seen[:, None, None, :]
        context = F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, dropout_p=setting.dropout, is_causal=setting.mask == "causal"
        )
        outputs = F.linear(context.permute(2, 0, 1, 3).reshape(query.shape), ours.out_proj_weight)
        return query + F.dropout(outputs, setting.dropout) if setting.norm_add else outputs

    return attend


@dataclass(frozen=True)
class Problem:
    """Tensors of a setting; `mask` is True for hidden keys."""

    setting: Setting
    query: Tensor
    key: Tensor
    gradient: Tensor
    mask: Tensor | None
    ours: nn.Module

    @property
    def leaves(self) -> list[Tensor]:
        inputs = [self.query, self.key] if self.setting.encdec else [self.query]
        return [*inputs, *self.ours.parameters()]


def make_problem(setting: Setting, device: torch.device) -> Problem:
    """Make normal inputs; a padding mask hides up to half of each sequence's keys, a time mask the future."""
    random = Random(device)
    shape = (setting.length, setting.batch, setting.width)
    query, key, gradient = (random.normal(*shape, dtype=setting.dtype) for _ in range(3))
    mask = None
    if setting.mask == "padding":
        kept = random.integers(setting.length // 2, setting.length + 1, setting.batch, 1)
        mask = torch.arange(setting.length, device=device)[None] >= kept
    elif setting.mask == "time":
        mask = torch.ones(setting.length, setting.length, dtype=torch.bool, device=device).triu(1)
    kind = EncdecMultiheadAttn if setting.encdec else SelfMultiheadAttn
    ours = kind(setting.width, setting.heads, setting.dropout, include_norm_add=setting.norm_add)
    return Problem(
        setting, query.requires_grad_(), key.requires_grad_(), gradient, mask, ours.to(device, setting.dtype)
    )


def _ours(problem: Problem) -> Callable[[], Tensor]:
    name = "key_padding_mask" if problem.setting.mask == "padding" else "attn_mask"
    mask = "causal" if problem.setting.mask == "causal" else problem.mask
    return lambda: problem.ours(problem.query, problem.key, problem.key, **{name: mask})[0]


def _call(problem: Problem, implementation: str) -> Call:
    leaves, tensors = problem.leaves, (problem.query, problem.key, problem.mask)
    peer = by_hand(problem.setting, problem.ours)
    if implementation == "compile":
        peer = compiled(peer, problem.query.device)
    forward = _ours(problem) if implementation == OURS else functools.partial(peer, *tensors)

    def step() -> Sequence[Tensor]:
        output = forward()
        return (output, *torch.autograd.grad(output, leaves, problem.gradient))

    return step


def expected_results(problem: Problem) -> list[Expected]:
    """Return the output and the gradients of every leaf, in float64."""
    setting = problem.setting
    tensors = [each.detach().double().requires_grad_() for each in (problem.query, problem.key, problem.gradient)]
    wide = dataclasses.replace(
        problem, query=tensors[0], key=tensors[1], gradient=tensors[2], ours=copy.deepcopy(problem.ours).double()
    )
    # Each element is a sum over an embedding or over all tokens, of terms that are such sums themselves.
    terms = setting.width * setting.length * setting.batch
    return [Expected(result.detach(), setting.dtype, terms) for result in _call(wide, "torch")()]


def _prepare(setting: Setting, peers: Sequence[str], device: torch.device) -> Prepared:
    small = make_problem(dataclasses.replace(setting, **CHECKED), device)
    large = functools.cache(functools.partial(make_problem, setting, device))
    names = (OURS, *peers)
    return Prepared(
        {name: functools.partial(_call, small, name) for name in names},
        expected_results(small),
        {name: functools.partial(lambda name: _call(large(), name), name) for name in names},
    )


_SHORT, _MIDDLE, _LONG = (64, 80), (512, 16), (2048, 8)
GPU_SETTINGS = [
    *(Setting(*_SHORT, mask, dropout) for dropout in (0.0, 0.1) for mask in ("none", "padding", "time")),
    *(Setting(*_MIDDLE, mask, dropout) for dropout in (0.0, 0.1) for mask in ("none", "padding")),
    *(Setting(*_LONG, mask, dropout) for dropout in (0.0, 0.1) for mask in ("none", "padding", "time", "causal")),
    Setting(*_LONG, "padding", dtype=torch.bfloat16),
    *(Setting(*shape, "padding", 0.1, encdec=True) for shape in (_SHORT, _MIDDLE)),
    *(Setting(*shape, "none", 0.1, norm_add=True) for shape in (_SHORT, _MIDDLE, _LONG)),
    Setting(*_LONG, "none", norm_add=True),
    Setting(*_MIDDLE, "padding", 0.1, norm_add=True, encdec=True),
]
CPU_SETTINGS = [
    Setting(128, 4, mask, dropout, torch.float32, norm_add, width=256, heads=4)
    for mask, dropout, norm_add in (
        ("none", 0.0, False),
        ("padding", 0.0, False),
        ("causal", 0.0, False),
        ("none", 0.1, False),
        ("none", 0.0, True),
        ("none", 0.1, True),
    )
]


def cases(device: torch.device, quick: bool) -> Sequence[Case]:
    """Return steps of modules of BERT's and of longer lengths; a CPU gets smaller ones."""
    on_gpu = device.type == "cuda"
    settings = GPU_SETTINGS if on_gpu else CPU_SETTINGS
    result = []
    for setting in settings[:1] if quick else settings:
        # torch.compile is a peer only if there are operations around PyTorch's attention to fuse.
        peers = ("torch", "compile") if on_gpu and setting.norm_add else ("torch",)
        # Short sequences keep the host as busy as the GPU: a training loop sees the wall clock time.
        timing = "device" if on_gpu and setting.length > _SHORT[0] else "wall"
        make = functools.partial(_prepare, setting, peers)
        result.append(Case(f"{setting} step", setting.bytes_moved, make, timing))  # type: ignore[arg-type]
    return result


register(Family("multihead_attn", "attention modules, forward and backward", cases))
