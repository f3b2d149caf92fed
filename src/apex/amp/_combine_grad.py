"""`combine_grad`: an optimizer's gradients in one flat buffer per dtype and device, unscaled in one pass.

Gradients move to the buffers at the end of a backward pass. A user may break that sharing (`p.grad = ...`) at any time;
the next backward pass moves such gradients back, and the results do not depend on it. A parameter without a gradient
keeps None, as without combining; its part of the buffer holds zeros. With `combine_ddp` the buffers are averaged over
all processes before they are unscaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._distributed.collectives import start
from .._distributed.comparison import differing
from .._distributed.experts import refuse_experts
from ..ops.multi_tensor.flat import offsets_of
from ..ops.multi_tensor.flat_gradients import FlatGradients
from ._master_params import AmpOptimizerState
from .scaler import LossScaler, NonfiniteCounts


class _GradientBuffers:
    """Buffers of model parameters of one dtype and device, and of their masters if they have any."""

    def __init__(self, params: list[Tensor], masters: list[Tensor]) -> None:
        self._layout = offsets_of(params)
        self.params = params
        self.grads = FlatGradients(params, *self._layout)
        # Gradients that the optimizer uses, at the same offsets, so that one pass can go from buffer to buffer.
        self.target = FlatGradients(masters, *self._layout) if masters else self.grads
        self._fresh: FlatGradients | None = None
        # The buffer with the gradients of the last backward pass.
        self._source = self.grads

    def collect(self, accumulated: dict[Tensor, Tensor]) -> tuple[Tensor, list[bool]]:
        """Copy the new gradients into a buffer; return it, and for each parameter whether it has a gradient."""
        new = [param.grad for param in self.params]
        self._source = self.grads
        if self.target is self.grads and any(param in accumulated for param in self.params):
            self._source = self._fresh = self._fresh or FlatGradients(self.params, *self._layout)
        self._source.gather(_checked(new))
        return self._source.values, [gradient is not None for gradient in new]

    def unscale(self, present: list[bool], accumulated: dict[Tensor, Tensor], scaler: LossScaler) -> NonfiniteCounts:
        """Unscale the collected gradients and add earlier ones; `present` flags parameters with a new gradient."""
        source, target = self._source, self.target
        if target is self.grads:
            earlier = [accumulated.get(param) for param in self.params]
        else:
            earlier = [master.grad for master in target.members]
            self.grads.attach(present)
        counts = torch.zeros(len(self.params), 2, dtype=torch.int32, device=source.values.device)
        if all(gradient is None for gradient in earlier):
            scaler.unscale(source.parts, target.parts, None, source is target, nonfinite_counts=counts)
        else:
            target.gather(_checked(earlier))
            scaler.unscale_with_stashed(source.parts, target.parts, target.parts, nonfinite_counts=counts)
        target.attach([new or gradient is not None for new, gradient in zip(present, earlier, strict=True)])
        return NonfiniteCounts(self.params, counts)


def _checked(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients; raise an error if one is sparse."""
    if any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
        raise RuntimeError("combine_grad=True takes dense gradients only; an embedding has sparse=True")
    return gradients


class CombinedGradients:
    """The combined gradients of one optimizer; made at the first backward pass, and again if its parameters change."""

    def __init__(self, stash: AmpOptimizerState, check: bool = False, ddp_parts: int | None = None) -> None:
        """Store the options: `check` makes steps refuse gradients elsewhere, `ddp_parts` is for `combine_ddp`."""
        self._stash = stash
        self.check = check
        self._reduction = None if ddp_parts is None else _Reduction(ddp_parts)
        self._by_dtype: list[_GradientBuffers] = []
        self._made_for: list[Any] = []

    def after_backward(self, scaler: LossScaler, reduces: bool = False) -> list[NonfiniteCounts]:
        """Unscale the new gradients, or with `reduces` their mean over processes, and add them to earlier ones."""
        self._make()
        accumulated = self._stash.accumulated_grads
        collected = [buffers.collect(accumulated) for buffers in self._by_dtype]
        present = [has_gradient for _, has_gradient in collected]
        if reduces and self._reduction is not None and self._reduction.is_needed():
            refuse_experts(
                (param for buffers in self._by_dtype for param in buffers.params),
                "combine_ddp",
                "Set optimizer.combine_ddp = False and call apex.transformer.finalize_model_grads before the step",
            )
            present = self._reduction.reduce([buffer for buffer, _ in collected], present)
        pairs = zip(self._by_dtype, present, strict=True)
        counted = [buffers.unscale(has_gradient, accumulated, scaler) for buffers, has_gradient in pairs]
        self._stash.accumulated_grads = {}
        return counted

    def buffers(self) -> list[Tensor]:
        """Return the buffers of the gradients that the optimizer uses."""
        self._make()
        return [buffers.target.values for buffers in self._by_dtype]

    def zero(self) -> None:
        """Set all gradients to zero in place."""
        for buffers in self._by_dtype:
            buffers.grads.values.zero_()
            buffers.target.values.zero_()

    def outside(self) -> list[Tensor]:
        """Return the parameters that the optimizer updates whose gradients lie outside of the buffers."""
        return [param for buffers in self._by_dtype for param in buffers.target.outside()]

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
        for param in stash.all_fp32_from_fp32_params:
            if param.requires_grad:
                sorted_params.setdefault((False, param.dtype, param.device), ([], []))[0].append(param)
        self._by_dtype = [_GradientBuffers(params, masters) for params, masters in sorted_params.values()]
        self._made_for = wanted


class _Reduction:
    """The mean of flat buffers over all processes, each sent in `parts` concurrent messages."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self._checked: list[object] = []

    def is_needed(self) -> bool:
        """Return whether there are other processes. A script that runs alone needs no process group."""
        if dist.is_available() and dist.is_initialized():
            return True
        if dist.is_available() and dist.is_torchelastic_launched():
            raise RuntimeError(
                "amp.initialize was called with combine_ddp=True, and torchrun has started several processes, but they "
                "are not connected: call torch.distributed.init_process_group before the first backward pass"
            )
        return False

    @torch.no_grad()
    def reduce(self, buffers: Sequence[Tensor], present: Sequence[list[bool]]) -> list[list[bool]]:
        """Average the buffers in place; `present` flags the parameters that have gradients in this process.

        Returns flags of the parameters that have gradients in any process.
        """
        self._check(buffers, present)
        if not buffers:
            return []
        flags = [flag for has_gradient in present for flag in has_gradient]
        anywhere = torch.ones(len(flags), dtype=torch.uint8, device=buffers[0].device)
        for position in (position for position, flag in enumerate(flags) if not flag):
            anywhere[position] = 0
        what = "the reduction of combined gradients"
        works = [
            start(what, dist.all_reduce, part)
            for buffer in buffers
            for part in buffer.split(max(1, -(-buffer.numel() // self.parts)))
            if part.numel()
        ]
        works.append(start(what, dist.all_reduce, anywhere, op=dist.ReduceOp.MAX))
        for work in works:
            work.wait()
        for buffer in buffers:
            buffer.mul_(1 / dist.get_world_size())
        # A process that has all gradients need not read the others' flags from the device.
        known = iter(flags if all(flags) else anywhere.bool().tolist())
        return [[next(known) for _ in has_gradient] for has_gradient in present]

    def _check(self, buffers: Sequence[Tensor], present: Sequence[list[bool]]) -> None:
        """Raise an error in all processes if their buffers differ in layout."""
        pairs = zip(buffers, present, strict=True)
        layout = [(str(buffer.dtype), buffer.numel(), len(flags)) for buffer, flags in pairs]
        if layout == self._checked:
            return
        everywhere = differing(layout, buffers, "parameters", None)
        if everywhere:
            other = next(rank for rank, layout_there in enumerate(everywhere) if layout_there != everywhere[0])
            raise RuntimeError(
                f"combine_ddp=True needs the same parameters in all processes, but those of rank 0 and rank "
                f"{other} differ; rank {dist.get_rank()} has {layout} (dtype, elements, parameters). For an "
                "optimizer whose parameters are not shared set optimizer.combine_ddp = False"
            )
        self._checked = list(layout)
