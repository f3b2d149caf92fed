"""`combine_grad`: the gradients of an optimizer in one flat buffer per dtype and device, unscaled there in one pass.

Gradients move to their places when a backward pass is over. A user may break that sharing (`p.grad = ...`) at any time:
what was moved away is moved back at the next backward pass, and the numbers do not depend on it. A parameter without a
gradient keeps having none, as without combining; its place holds zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._host import on_host
from ..ops.multi_tensor.flat import FlatBuffer, flat, offsets_of
from ._combined_ddp import CombinedReduction
from ._master_params import AmpOptimizerState
from .scaler import LossScaler, NonfiniteCounts


class _FlatGradients(FlatBuffer):
    """A buffer with a place for the gradient of each of some tensors of one dtype and device."""

    def __init__(self, members: list[Tensor], offsets: list[int], size: int) -> None:
        super().__init__(members, offsets, size)
        self.members = members
        # The views in one dimension, for passes that count for each gradient.
        self.parts = list(map(flat, self.views))

    def put(self, gradients: list[Tensor | None]) -> None:
        """Copies gradients to their places, zeros where there is none."""
        moved, values = [], []
        for index, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if gradient is None:
                view.zero_()
            elif gradient.layout != torch.strided:
                raise RuntimeError("combine_grad=True takes dense gradients only; an embedding has sparse=True")
            elif not self.holds(index, gradient):
                moved.append(view)
                values.append(gradient.detach())
        if moved:
            torch._foreach_copy_(moved, values)

    def give(self, has_gradient: list[bool]) -> None:
        """Makes the places the gradients."""
        for member, view, has in zip(self.members, self.views, has_gradient, strict=True):
            member.grad = view if has else None

    def moved_away(self) -> list[Tensor]:
        """Members whose gradient is somewhere else."""
        return [
            member
            for member, view in zip(self.members, self.views, strict=True)
            if member.grad is not None and member.numel() and member.grad.data_ptr() != view.data_ptr()
        ]


class _Kind:
    """Model parameters of one dtype and device, and their masters where they have any."""

    def __init__(self, params: list[Tensor], masters: list[Tensor]) -> None:
        offsets, size = offsets_of(params)
        self.params = params
        self._layout = offsets, size
        self.grads = _FlatGradients(params, offsets, size)
        # At the same offsets, so that one pass can go from one buffer to the other.
        self.masters = _FlatGradients(masters, offsets, size) if masters else None
        self._fresh: _FlatGradients | None = None
        # Where the gradients of the last backward pass are.
        self._source = self.grads

    def collect(self, stashed: dict[Tensor, Tensor]) -> tuple[Tensor, list[bool]]:
        """Puts the new gradients together; returns the buffer, and which parameters have one."""
        new = [param.grad for param in self.params]
        earlier = any(stashed.get(param) is not None for param in self.params)
        if earlier and self.masters is None:
            self._fresh = self._fresh or _FlatGradients(self.params, *self._layout)
            self._source = self._fresh
        else:
            self._source = self.grads
        self._source.put(new)
        return self._source.values, [gradient is not None for gradient in new]

    def unscale(self, present: list[bool], stashed: dict[Tensor, Tensor], scaler: LossScaler) -> NonfiniteCounts:
        """Unscales what was collected, and adds it to what was there before; `present` has a gradient."""
        if self.masters is not None:
            return self._unscale_to_masters(self.masters, present, scaler)
        earlier = [stashed.get(param) for param in self.params]
        if self._source is self.grads:
            counted = self._run(scaler, self.grads, self.grads, None)
        else:
            self.grads.put(earlier)
            counted = self._run(scaler, self._source, self.grads, self.grads)
        self.grads.give([new or gradient is not None for new, gradient in zip(present, earlier, strict=True)])
        return counted

    def _unscale_to_masters(self, masters: _FlatGradients, present: list[bool], scaler: LossScaler) -> NonfiniteCounts:
        earlier = [master.grad for master in masters.members]
        self.grads.give(present)
        if all(gradient is None for gradient in earlier):
            counted = self._run(scaler, self.grads, masters, None)
        else:
            masters.put(earlier)
            counted = self._run(scaler, self.grads, masters, masters)
        masters.give([new or gradient is not None for new, gradient in zip(present, earlier, strict=True)])
        return counted

    def _run(
        self, scaler: LossScaler, source: _FlatGradients, target: _FlatGradients, earlier: _FlatGradients | None
    ) -> NonfiniteCounts:
        """Unscales the buffer as a whole where the host can count afterwards what is not finite, else by its parts."""
        at_once = on_host(source.values) and on_host(scaler.overflow)
        tensors = lambda each: [each.values] if at_once else each.parts  # noqa: E731
        nonfinite_counts = torch.zeros(len(self.params), 2, dtype=torch.int32, device=source.values.device)
        counters = None if at_once else nonfinite_counts
        if earlier is None:
            in_place = source is target
            scaler.unscale(tensors(source), tensors(target), models_are_masters=in_place, nonfinite_counts=counters)
        else:
            scaler.unscale_with_stashed(tensors(source), tensors(earlier), tensors(target), nonfinite_counts=counters)
        if at_once and scaler.overflow_known_on_host():
            counts = [[place.isinf().sum(), place.isnan().sum()] for place in target.views]
            nonfinite_counts = torch.tensor(counts, dtype=torch.int32, device=nonfinite_counts.device)
        return NonfiniteCounts(self.params, nonfinite_counts)


class CombinedGradients:
    """The buffers of one optimizer; made at the first backward pass, and anew when its parameters change."""

    def __init__(self, stash: AmpOptimizerState, check: bool, reduction: CombinedReduction | None = None) -> None:
        self._stash = stash
        self.check = check
        self._reduction = reduction
        self._kinds: list[_Kind] = []
        self._made_for: list[Any] = []

    def after_backward(self, scaler: LossScaler, reduces: bool = False) -> list[NonfiniteCounts]:
        """Unscales the new gradients, or with `reduces` their mean, and adds them to what was there before."""
        self._make()
        stashed = self._stash.accumulated_grads
        collected = [kind.collect(stashed) for kind in self._kinds]
        present = [each for _, each in collected]
        if reduces and self._reduction is not None and self._reduction.is_needed():
            present = self._reduction.reduce([buffer for buffer, _ in collected], present)
        counted = [kind.unscale(each, stashed, scaler) for kind, each in zip(self._kinds, present, strict=True)]
        self._stash.accumulated_grads = {}
        return counted

    def buffers(self) -> list[Tensor]:
        """The buffers that hold the gradients of what the optimizer updates."""
        self._make()
        return [(kind.masters or kind.grads).values for kind in self._kinds]

    def zero(self) -> None:
        """Zeroes all gradients in place."""
        for kind in self._kinds:
            for each in (kind.grads, kind.masters):
                if each is not None:
                    each.values.zero_()

    def moved_away(self) -> list[Tensor]:
        """What the optimizer is about to update with gradients that are not in the buffers."""
        return [param for kind in self._kinds for param in (kind.masters or kind.grads).moved_away()]

    def _make(self) -> None:
        stash = self._stash
        wanted = [(p.data_ptr(), p.dtype, p.shape, p.stride(), p.requires_grad) for p in stash.model_params]
        if wanted == self._made_for:
            return
        sorted_params: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        for param, master in zip(stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True):
            params, masters = sorted_params.setdefault((True, param.dtype, param.device), ([], []))
            params.append(param)
            masters.append(master)
        for param in filter(lambda param: param.requires_grad, stash.all_fp32_from_fp32_params):
            sorted_params.setdefault((False, param.dtype, param.device), ([], []))[0].append(param)
        self._kinds = [_Kind(params, masters) for params, masters in sorted_params.values()]
        self._made_for = wanted
