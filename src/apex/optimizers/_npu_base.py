"""Base class of Ascend's optimizers: parameters and gradients in combined buffers, one per device and dtype.

Parameters and gradients are views of the buffers, so that one operator on a buffer (a norm, a clip, an all-reduce)
serves all. A user can break that sharing at any time: `p.grad = ...`, `model.zero_grad()`, `model.half()`. Every step
compares all addresses and moves tensors back to the buffers; the results never depend on it.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import Tensor

from .._distributed.norms import total_norm
from .._distributed.shards import local
from ..ops._host import HOST
from ..ops.multi_tensor import flat
from ..ops.multi_tensor.dispatch import DTYPES
from ..ops.multi_tensor.flat_gradients import FlatGradients
from ..ops.multi_tensor.tables import lie_at
from ._base import FusedOptimizer

logger = logging.getLogger("apex.optimizers")

_grad_of = operator.attrgetter("grad")


def _alike(tensor: Tensor | None, other: Tensor) -> bool:
    """Return whether `tensor` exists and has the other's shape, dtype, device and layout; strides may differ."""
    return tensor is not None and (tensor.shape, tensor.dtype, tensor.device, tensor.layout) == (
        other.shape,
        other.dtype,
        other.device,
        other.layout,
    )


class Combination:
    """Parameters of one device and dtype in one flat buffer, `params`, and their gradients in another, `grads`."""

    def __init__(self, members: list[Tensor], groups: list[int]) -> None:
        """Combine the members; `groups` has the parameter group of each, and a group's members are consecutive."""
        self.members = members
        self._groups = groups
        self._offsets, size = flat.offsets_of(members)
        self._params = flat.FlatBuffer(members, self._offsets, size)
        self._params.adopt(members)
        self._addresses = list(map(Tensor.data_ptr, self._params.views))
        self._gradients = FlatGradients(members, self._offsets, size)
        self.params, self.grads = self._params.values, self._gradients.values

    def holds_params(self) -> bool:
        """Move parameters that got other memory back to the buffer; return False if that is impossible.

        On success all parameters lie in the buffer at `_addresses`.
        """
        if lie_at(self.members, self._addresses):
            return True
        addresses = list(map(Tensor.data_ptr, self.members))
        moved = [index for index, address in enumerate(addresses) if address != self._addresses[index]]
        for index in moved:
            member, view = self.members[index], self._params.views[index]
            if not _alike(member, view) or member.stride() != view.stride():
                return False
        if flat.overlapping(self.members):
            return False
        # Cloned first: a parameter may now use the memory of another.
        values = [self.members[index].detach().clone() for index in moved]
        for index, value in zip(moved, values, strict=True):
            self.members[index].data = self._params.views[index].copy_(value)
        return True

    def gather(self) -> None:
        """Move gradients that have other memory to the buffer."""
        gradients = list(map(_grad_of, self.members))
        if self._gradients.holds_all(gradients):
            return
        views = self._gradients.views
        pairs = zip(gradients, views, strict=True)
        for index in self._gradients.gather([grad if _alike(grad, view) else None for grad, view in pairs]):
            self.members[index].grad = views[index]

    def zero(self) -> None:
        """Set every gradient to zero and make it a view of the buffer; gradients that are None stay None."""
        self.grads.zero_()
        gradients = list(map(_grad_of, self.members))
        if self._gradients.holds_all(gradients):
            return
        for member, gradient, view in zip(self.members, gradients, self._gradients.views, strict=True):
            if gradient is not None:
                member.grad = view if _alike(gradient, view) else gradient.detach().zero_()

    def part_of_group(self, buffer: Tensor, group: int) -> Tensor | None:
        """Return the part of `buffer` that belongs to a parameter group, or None."""
        indices = [index for index, number in enumerate(self._groups) if number == group]
        if not indices:
            return None
        end = self._offsets[indices[-1]] + flat.aligned_size(self.members[indices[-1]])
        return buffer[self._offsets[indices[0]] : end]

    def mask(self) -> Tensor:
        """Return a tensor shaped like the buffers: 1 for elements of gradients, 0 in the gaps."""
        mask = torch.zeros_like(self.grads)
        for offset, member in zip(self._offsets, self.members, strict=True):
            mask[offset : offset + member.numel()] = 1
        return mask


class CombinedTensors:
    """All combinations of an optimizer, made again when its parameters change."""

    def __init__(self) -> None:
        self.combinations: list[Combination] = []
        self._params: list[list[Tensor]] = []
        # Parameters that are not combined: frozen, sharded, overlapping.
        self.loose: list[Tensor] = []
        self._frozen: list[Tensor] = []
        self._reported = False

    def knows(self, groups: list[dict[str, Any]]) -> bool:
        """Return whether the groups' parameters are the combined ones."""
        return len(groups) == len(self._params) and all(
            len(group["params"]) == len(params) and all(map(operator.is_, group["params"], params))
            for group, params in zip(groups, self._params, strict=True)
        )

    def update(self, groups: list[dict[str, Any]]) -> None:
        """Make the buffers hold the current parameters and gradients."""
        if not self.knows(groups) or any(param.requires_grad for param in self._frozen):
            self._build(groups)
        elif not all(combination.holds_params() for combination in self.combinations):
            if not self._reported:
                logger.warning(
                    "parameters were given memory outside of the combined buffer; they are combined anew, "
                    "which takes a copy of all of them each time"
                )
                self._reported = True
            self._build(groups)
        for combination in self.combinations:
            combination.gather()

    def _build(self, groups: list[dict[str, Any]]) -> None:
        params = [param for group in groups for param in group["params"]]
        owners = [index for index, group in enumerate(groups) for _ in group["params"]]
        able = [index for index, param in enumerate(params) if _can_be_combined(param)]
        shared = flat.overlapping([params[index] for index in able])
        chosen = [index for position, index in enumerate(able) if position not in shared]
        kinds: dict[Any, list[int]] = {}
        for index in chosen:
            kinds.setdefault((params[index].device, params[index].dtype), []).append(index)
        # One combination after the other, each replacing the old memory before the next is made, so that one extra
        # buffer is enough. If this fails half way, `_params` stays empty and the next call starts again.
        self.combinations, self._params = [], []
        for indices in kinds.values():
            self.combinations.append(
                Combination([params[index] for index in indices], [owners[index] for index in indices])
            )
        taken = set(chosen)
        self.loose = [param for index, param in enumerate(params) if index not in taken]
        self._frozen = [param for param in self.loose if not param.requires_grad]
        self._params = [list(group["params"]) for group in groups]

    def __deepcopy__(self, memo: dict[int, Any]) -> CombinedTensors:
        return CombinedTensors()


def _can_be_combined(param: Tensor) -> bool:
    return (
        param.requires_grad
        and local(param) is param
        and type(param) in (Tensor, torch.nn.Parameter)
        and param.layout == torch.strided
        and param.dtype in DTYPES
        and not param.is_meta
    )


class NpuFusedOptimizerBase(FusedOptimizer):
    """Base of Ascend's optimizers, on every device; `FusedOptimizer` describes the keyword options.

    At the first step, or the first access to the buffers, trainable parameters move to one buffer per device and dtype,
    with a group's parameters next to each other. Their gradients move to another buffer as they appear.
    `get_optimizer_combined_params` and `get_optimizer_combined_grads` return the buffers. Parameters that share memory
    with each other, or are distributed, are not moved but are updated too.

    `zero_grad()` sets the gradients to zero and keeps them in their buffer. `zero_grad(set_to_none=True)` sets them to
    None with PyTorch's meaning (a step skips a parameter without a gradient), at the price of a copy per step.
    """

    is_npu_fused_optimizer = True

    def __init__(self, *args: Any, **options: Any) -> None:
        self._combined = CombinedTensors()
        super().__init__(*args, **{"set_grad_none": False, **options})

    def _before_step(self) -> None:
        self._combined.update(self.param_groups)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set the gradients to zero; with `set_to_none` set them to None, and later ones move to the buffer again."""
        if set_to_none is None:
            set_to_none = self.set_grad_none
        if set_to_none or not self._combined.knows(self.param_groups):
            super().zero_grad(set_to_none=set_to_none)
        else:
            self._zero_combined()

    # Kept out of compiled graphs, which have no addresses.
    @torch._disable_dynamo  # torch.compiler.disable would import the compiler here: 1.8 s
    @torch.no_grad()
    def _zero_combined(self) -> None:
        for combination in self._combined.combinations:
            combination.zero()
        for param in self._combined.loose:
            if param.grad is not None:
                param.grad.detach_().zero_()

    def get_optimizer_combined_params(self) -> list[Tensor]:
        """Return the buffers of the parameters, one per device and dtype."""
        return [combination.params for combination in self._combinations()]

    def get_optimizer_combined_grads(self) -> list[Tensor]:
        """Return the buffers of the gradients, one per device and dtype; a missing gradient is zeros."""
        return [combination.grads for combination in self._combinations()]

    def get_optimizer_combined_grad_masks(self) -> list[Tensor]:
        """Return a mask for each buffer of gradients: 1 for elements of gradients, 0 in the gaps between them."""
        return [combination.mask() for combination in self._combinations()]

    @property
    def combined_params_indexed_by_group(self) -> list[list[Tensor]]:
        """Return for each parameter group its parts of the parameters' buffers."""
        return self._by_group("params")

    @property
    def combined_grads_indexed_by_group(self) -> list[list[Tensor]]:
        """Return for each parameter group its parts of the gradients' buffers."""
        return self._by_group("grads")

    def _by_group(self, name: str) -> list[list[Tensor]]:
        combinations = self._combinations()
        parts = [
            [combination.part_of_group(getattr(combination, name), index) for combination in combinations]
            for index in range(len(self.param_groups))
        ]
        return [[part for part in group if part is not None] for group in parts]

    @torch.no_grad()
    def _combinations(self) -> list[Combination]:
        self._combined.update(self.param_groups)
        return self._combined.combinations

    def _all_gradients(self) -> list[Tensor]:
        """Return the buffers of the gradients and the gradients outside of them."""
        combined = self.get_optimizer_combined_grads()  # the first call finds the parameters outside
        return combined + [param.grad for param in self._combined.loose if param.grad is not None]

    @torch.no_grad()
    def clip_optimizer_grad_norm_fused(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their joint norm is at most `max_norm`; return the norm before that.

        Runs on the buffers and does not wait for the device.
        """
        gradients = self._all_gradients()
        if not gradients:
            return torch.zeros((), dtype=torch.float32, device=HOST)
        total = total_norm(gradients, norm_type)
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in map(local, gradients):
            gradient.mul_(factor.to(gradient.device))
        return total

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._combined = CombinedTensors()
