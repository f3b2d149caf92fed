"""Optimizers whose `step` is given gradients, and copies to write, as lists beside the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.multi_tensor import l2norm
from ...ops.multi_tensor.dispatch import check
from ...optimizers._base import run_closure
from ...optimizers._checkpoints import check_saved
from ...optimizers._checks import check_options


class Member(NamedTuple):
    """A parameter, its gradient, and the tensor that gets a copy of the updated parameter, if any."""

    param: Tensor
    gradient: Tensor
    output: Tensor | None


def _check(members: list[Member]) -> None:
    """Raises for what cannot be updated, before anything is."""
    check(([member.param for member in members], [member.gradient for member in members]), ("params", "grads"))
    copied = [member for member in members if member.output is not None]
    outputs = [member.output for member in copied if member.output is not None]
    check(([member.param for member in copied], outputs), ("params", "output_params"))


class ExplicitGradsOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that FP16_Optimizer drives."""

    # As in FusedOptimizer.
    _counts_steps = True
    _may_lack: frozenset[str] = frozenset()
    _check_options = staticmethod(check_options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, after a look at its hyperparameters."""
        if isinstance(param_group, dict):  # else PyTorch complains
            check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        grads: Any = None,
        output_params: Any = None,
        scale: float | Tensor = 1.0,
        grad_norms: Any = None,
    ) -> Any:
        """One optimization step; returns the closure's loss.

        - `grads`: gradients in place of the parameters' own, a list, or a list per group; None where there is none.
        - `output_params`: tensors, laid out like `grads`, that get a copy of the updated parameters.
        - `scale`: what gradients are divided by.
        - `grad_norms`: the norm of each group's gradients, before that division; computed where it is wanted and not
          given.
        """
        loss = run_closure(closure)
        grads, output_params, scale, grad_norms = self._from_amp(grads, output_params, scale, grad_norms)
        by_group = self._members(grads, output_params)
        for group, norm, members in zip(self.param_groups, self._norms(grad_norms, by_group), by_group, strict=True):
            self._update(group, members, scale, norm)
        return loss

    def _from_amp(self, *arguments: Any) -> tuple[Any, ...]:
        """`grads`, `output_params`, `scale` and `grad_norms`, as given or as amp has set them aside."""
        return arguments

    def _update(self, group: dict[str, Any], members: list[Member], scale: float | Tensor, norm: Any) -> None:
        """One step of a group's members, whose gradients have been multiplied by `scale` and then have `norm`."""
        raise NotImplementedError

    def _members(self, grads: Any, output_params: Any) -> list[list[Member]]:
        """What is to be updated, by group: parameters that have a gradient, given or their own."""
        gradients, outputs = (
            self._by_group(tensors, name) for tensors, name in ((grads, "grads"), (output_params, "output_params"))
        )
        found = []
        for group, of_group, copies in zip(self.param_groups, gradients, outputs, strict=True):
            members = []
            for param, gradient, output in zip(group["params"], of_group, copies, strict=True):
                gradient = param.grad if gradient is None else gradient
                if gradient is None:
                    continue
                if gradient.layout != torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not support sparse gradients; torch.optim.SparseAdam does"
                    )
                members.append(Member(param, gradient, output))
            _check(members)
            found.append(members)
        return found

    def _by_group(self, tensors: Any, name: str) -> Iterable[list[Any]]:
        """A tensor or None for every parameter: from nothing, from an iterable for one group, or from one per group."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if tensors is None:
            return [[None] * size for size in sizes]
        tensors = list(tensors)
        of_one_group = all(each is None or isinstance(each, Tensor) for each in tensors)
        if of_one_group and tensors != [None] * len(sizes):
            tensors = [tensors]
        lists = [[None] * size if each is None else list(each) for each, size in zip(tensors, sizes, strict=False)]
        if len(tensors) != len(sizes) or any(map(int.__ne__, map(len, lists), sizes)):
            raise ValueError(f"{name} has lists of {list(map(len, lists))} tensors, the parameter groups {sizes}")
        return lists

    def _norms(self, grad_norms: Any, by_group: list[list[Member]]) -> Iterator[Any]:
        """The norm of each group's gradients, before unscaling: as given, or computed where it is wanted and is not."""
        norms = [None] * len(by_group) if grad_norms is None else list(grad_norms)
        for group, norm, members in zip(self.param_groups, norms, by_group, strict=True):
            if (group.get("max_grad_norm") or 0) > 0 and norm is None and members:
                norm = l2norm([member.gradient for member in members])[0]
            yield norm

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` returned; state keeps the dtype it was saved in."""
        check_saved(self, state_dict)
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.detach().to(param.device, copy=True)
