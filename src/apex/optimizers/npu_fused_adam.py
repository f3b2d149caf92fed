"""NpuFusedAdam, NpuFusedAdamW and NpuFusedAdamP: Adam and its variants on combined parameters and gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .._distributed.shards import cut_dimensions, local, reduce_over
from ..ops.multi_tensor import rules
from ..ops.multi_tensor.rows import (
    RowLists,
    ShardedRows,
    make_row_lists,
    project_shards,
    projection_thresholds,
    rows_are_stretches,
)
from ._base import LossScaling, Options
from ._buckets import Group, UpdateBucket
from ._npu_base import NpuFusedOptimizerBase
from ._parameter_steps import ParameterSteps
from .fused_adam import FusedAdam

_THRESHOLDS, _ROWS = "thresholds", "rows"


class NpuFusedAdam(NpuFusedOptimizerBase, FusedAdam):
    """Adam with the numbers of `torch.optim.Adam` (L2 decay); their state dicts are interchangeable."""

    counts_by_parameter = True
    _decoupled = False
    # Parameters and gradients are combined into one tensor, so a CPU is as exact as a GPU.
    _rules = (rules.ADAM, rules.ADAM_AMSGRAD)
    _encodable = MappingProxyType({})

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        numbers: dict[str, Any] = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, **numbers, amsgrad=amsgrad, adam_w_mode=self._decoupled, **options)


class NpuFusedAdamW(NpuFusedAdam):
    """AdamW with the numbers of `torch.optim.AdamW`; their state dicts are interchangeable."""

    _decoupled = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


class NpuFusedAdamP(NpuFusedOptimizerBase, ParameterSteps):
    """AdamP (https://arxiv.org/abs/2006.08217): Adam that does not lengthen weights whose length has no effect.

    The length of a parameter of two or more dimensions has no effect if its gradient is nearly orthogonal to it. The
    first test is that for every channel (each index of dimension 0) the cosine of the angle is below `delta` over the
    root of the channel's size. The second test, if the first fails, is that for the parameter as a whole the cosine is
    below `delta` over the root of its size. If one passes, the step loses its component parallel to each channel, or to
    the whole parameter, and the decoupled `weight_decay` is multiplied by `wd_ratio`.
    """

    counts_by_parameter = True
    _measures = True
    _make_lists = staticmethod(make_row_lists)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        defaults = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, delta=delta, wd_ratio=wd_ratio, nesterov=nesterov
        )
        super().__init__(params, defaults, **options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _kind(self, param: Tensor, state: dict[str, Any]) -> Any:
        # A kernel can process a row only if it is a contiguous stretch of memory. Shards may consist of whole rows, or
        # of parts of rows.
        cuts_rows = tuple(dimension > 0 for _, dimension in cut_dimensions(param))
        return super()._kind(param, state), rows_are_stretches(local(param)), cuts_rows

    def _update(self, group: Group, bucket: UpdateBucket, step: Any, scaling: LossScaling, seed: int | None) -> None:
        rows = bucket.lists
        assert isinstance(rows, RowLists)
        limits = bucket.cache.get(_THRESHOLDS)
        if limits is None:
            limits = bucket.cache[_THRESHOLDS] = projection_thresholds(bucket.params, bucket.device)
        beta1, beta2 = group["betas"]
        hyper = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        hyper["step"] = step
        nesterov = bool(group["nesterov"])
        measured = rows.apply(rules.ADAMP_MEASURE, hyper, (nesterov,), **scaling.arguments)
        assert measured is not None
        options = dict(eps=group["eps"], delta=group["delta"], ratio=group["wd_ratio"])
        options["decay"] = group["lr"] * group["weight_decay"]
        if bucket.shard_groups:
            whole = project_shards(measured, limits, self._sharded_rows(bucket), **options)
        else:
            whole = rows.project(measured, limits, **options)
        rule = rules.ADAMP_NESTEROV if nesterov else rules.ADAMP
        rows.apply(rule, hyper, (nesterov,), whole=whole, seed=seed, **scaling.arguments)

    @staticmethod
    def _sharded_rows(bucket: UpdateBucket) -> ShardedRows:
        """Return the rows of a bucket of shards, with functions that add up values over the other shards."""
        rows = bucket.cache.get(_ROWS)
        if rows is None:
            cut = cut_dimensions(bucket.params[0])
            columns = [group for group, dimension in cut if dimension > 0]
            others = [group for group, dimension in cut if dimension == 0]
            rows = bucket.cache[_ROWS] = ShardedRows(
                [local(param) for param in bucket.params],
                bucket.device,
                functools.partial(reduce_over, groups=columns),
                functools.partial(reduce_over, groups=others),
                functools.partial(reduce_over, groups=others, maximum=True),
            )
        return rows
