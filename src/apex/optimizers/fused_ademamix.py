"""FusedAdEMAMix: AdamW with a second, slower average of gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from ..ops.multi_tensor import rules
from ._base import AllOptions, EncodingOptimizer, LossScaling
from ._buckets import Group, UpdateBucket
from ._checks import check_options


class FusedAdEMAMix(EncodingOptimizer):
    """AdEMAMix (https://arxiv.org/abs/2409.03137) with decoupled weight decay.

        p <- p - lr ((m1 / (1 - beta1^t) + alpha m2) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p)

    m1 and m2 are averages of gradients with beta1 and beta3, v of their squares with beta2. In the first `alpha_warmup`
    steps alpha grows linearly from 0. In the first `beta3_warmup` steps the half-life of m2 grows linearly from the
    half-life of m1. `cautious_weight_decay` decays only elements whose decay has the sign of their update.
    `FusedOptimizer` describes the keyword options, docs/state_formats.md `state_format` and `master_bits`.
    """

    _encodable: Mapping[str, str] = MappingProxyType(
        {"exp_avg_fast": "signed", "exp_avg_slow": "signed", "exp_avg_sq": "root"}
    )

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 2.0,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        alpha_warmup: int | None = None,
        beta3_warmup: int | None = None,
        cautious_weight_decay: bool = False,
        **options: Unpack[AllOptions],
    ) -> None:
        defaults: dict[str, Any] = dict(lr=lr, betas=betas, alpha=alpha, eps=eps, weight_decay=weight_decay)
        defaults |= dict(alpha_warmup=alpha_warmup, beta3_warmup=beta3_warmup)
        super().__init__(params, defaults | {"cautious_weight_decay": cautious_weight_decay}, **options)

    def _check_options(self, options: dict[str, Any]) -> None:
        betas = options["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 3:
            raise ValueError(f"betas={betas!r} are not three numbers in [0, 1)")
        check_options({**options, "betas": betas[:2]})
        check_options({"betas": (betas[2], betas[2])})
        for name in ("alpha_warmup", "beta3_warmup"):
            if options[name] is not None and (not isinstance(options[name], int) or options[name] < 0):
                raise ValueError(f"{name}={options[name]!r} is not a number of steps")
        if options["beta3_warmup"] and not (betas[0] > 0 and betas[2] > 0):
            raise ValueError(f"beta3_warmup needs betas above 0, not {betas}")

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        names = ("lr", "betas", "alpha", "eps", "weight_decay", "alpha_warmup", "beta3_warmup")
        hyper = {**{name: group[name] for name in names}, "step": step}
        flags = (bool(group["cautious_weight_decay"]),)
        bucket.lists.apply(rules.ADEMAMIX, hyper, flags, seed=seed, **scaling.arguments)
