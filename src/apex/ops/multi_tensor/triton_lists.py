"""Tensor lists on a GPU: a rule is one launch over address tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import config, rules
from .launches import Finish, ListLaunches
from .rule import Rule
from .tables import Layout, upload

_EACH, _AVERAGES = Finish(True), Finish(True, averages=True)
_TOTAL, _NORM = Finish(False), Finish(False, root=True)


def _may_finish(noop: Tensor | None, overflow: Tensor | None) -> bool:
    """Whether all programs of a launch see the same `noop`: not those after one that raised it, and then none is last.

    The two may be views of the same number.
    """
    return noop is None or overflow is None


class TritonLists(ListLaunches):
    """Lists of dense tensors on one device, one dtype per list, whose tensors of equal index share their layout.

    `slots` has a list or None for each slot of a rule; `copy` gets a copy of what is written to slot 0.
    """

    def apply(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        flags: tuple[bool, ...] = (),
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        whole: Tensor | None = None,
        overflow: Tensor | None = None,
        culprits: Tensor | None = None,
        checks: tuple[int, ...] = (),
        seed: int | None = None,
    ) -> Tensor | None:
        """Runs `rule`; returns what it measured, float32 [tensors, 2 or more]. See `TorchLists.apply`."""
        alone = whole is None and culprits is None and seed is None and _may_finish(noop, overflow)
        if rule.quantities and self._finishes_each and alone:
            found = torch.empty((len(self.sizes), max(2, rule.quantities)), dtype=torch.float32, device=self.device)
            self._measure(_EACH, rule, hyper, flags, found, noop, grad_scale, overflow, checks)
            return found
        partials, layout = self._run(rule, hyper, flags, noop, grad_scale, whole, overflow, culprits, checks, seed)
        return None if partials is None else self._per_tensor(rule, partials, layout, noop)

    def _per_tensor(self, rule: Rule, partials: Tensor, layout: Layout, noop: Tensor | None) -> Tensor:
        out = torch.empty((len(self.sizes), max(2, rule.quantities)), dtype=torch.float32, device=self.device)
        self._reduce(partials, layout.bounds, out, noop=noop, quantities=rule.quantities, maximum=rule.maximum)
        return out

    def lamb(
        self,
        hyper: dict[str, Any],
        flags: tuple[bool, ...],
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        seed: int | None = None,
    ) -> None:
        """A step of LAMB, whose length per tensor the first pass measures for the second. FLAGS: decoupled decay."""
        found = self.apply(rules.LAMB_MOMENTS, hyper, flags, noop=noop, grad_scale=grad_scale)
        self.apply(rules.LAMB_STEP, hyper, flags, noop=noop, whole=found, seed=seed)

    def total(self, per_tensor: Tensor, *, maximum: bool = False, root: bool = False) -> Tensor:
        """Sum (or maximum) over the tensors of the first quantity, float32 [1]; its root if asked for."""
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        self._reduce(per_tensor, self._bounds_of_all(len(self.sizes)), out, maximum=maximum, root=root)
        return out

    def measured_total(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        *,
        root: bool = False,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
        overflow: Tensor | None = None,
        checks: tuple[int, ...] = (),
    ) -> Tensor:
        """Runs a rule that measures one quantity; returns its sum (or maximum) over all tensors, float32 [1]."""
        out = torch.empty(1, dtype=torch.float32, device=self.device)
        if self._finishes_all and _may_finish(noop, overflow):
            self._measure(_NORM if root else _TOTAL, rule, hyper, (), out, noop, grad_scale, overflow, checks)
            return out
        partials = self._measured_in_parts(rule, hyper, noop, grad_scale, overflow, checks)
        self._reduce(partials, self._bounds_of_all(partials.shape[0]), out, noop=noop, maximum=rule.maximum, root=root)
        return out

    def measured_clip(
        self,
        rule: Rule,
        limit: float,
        margin: float,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, and what brings them down to `limit`, `grad_scale` included; float32 [1] each.

        The factor is overwritten by the next call.
        `rule` measures squares, or absolute values that are maximised. See `kernels_reductions.reduce_partials`.
        """
        norm = torch.empty(1, dtype=torch.float32, device=self.device)
        factor = self._scratch((1,))
        if self._finishes_all:
            finish = _TOTAL if rule.maximum else _NORM
            self._measure(finish, rule, {}, (), norm, noop, grad_scale, factor=factor, by=(limit, margin, 0.0))
            return norm, factor
        partials = self._measured_in_parts(rule, {}, noop, grad_scale, None, ())
        self._reduce(
            partials,
            self._bounds_of_all(partials.shape[0]),
            norm,
            noop=noop,
            maximum=rule.maximum,
            root=not rule.maximum,
            grad_scale=grad_scale,
            clip=(factor, limit, margin),
        )
        return norm, factor

    def _measured_in_parts(
        self,
        rule: Rule,
        hyper: dict[str, Any],
        noop: Tensor | None,
        grad_scale: Tensor | None,
        overflow: Tensor | None,
        checks: tuple[int, ...],
    ) -> Tensor:
        """What a rule that measures one quantity found, so many parts that one program adds them up: [parts, ...]."""
        partials, layout = self._run(rule, hyper, (), noop, grad_scale, None, overflow, None, checks, None)
        assert partials is not None
        return self._per_tensor(rule, partials, layout, noop) if layout.count > config.TOTAL_AT_ONCE else partials

    def measured_average(
        self,
        rule: Rule,
        averages: Tensor,
        share: float,
        *,
        noop: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Moves `averages`, float32 [tensors, 2], in column 0 by `share` towards what `rule` measures of each tensor.

        A negative average is none yet, and becomes what is measured.
        """
        if self._finishes_each:
            self._measure(_AVERAGES, rule, {}, (), averages, noop, grad_scale, by=(0.0, 0.0, share))
            return
        partials, layout = self._run(rule, {}, (), noop, grad_scale, None, None, None, (), None)
        assert partials is not None
        self._reduce(partials, layout.bounds, averages, noop=noop, maximum=rule.maximum, share=share)

    def _bounds_of_all(self, count: int) -> Tensor:
        bounds = self._whole_bounds.get(count)
        if bounds is None:
            bounds = self._whole_bounds[count] = upload([0, count], torch.int32, self.device)
        return bounds
