"""Base class of optimizers whose `step` takes lists of gradients, and of tensors that get copies of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.multi_tensor import l2norm
from ...ops.multi_tensor.dispatch import check
from ...optimizers._base import run_closure
from ...optimizers._checkpoints import check_saved, load_with_hooks
from ...optimizers._checks import check_options


class Member(NamedTuple):
    """A parameter, its gradient, and the tensor that gets a copy of the updated parameter, if any."""

    param: Tensor
    gradient: Tensor
    output: Tensor | None


def _check(members: list[Member]) -> None:
    """Raise an error if a parameter, gradient or output cannot be used; called before anything is updated."""
    check(([member.param for member in members], [member.gradient for member in members]), ("params", "grads"))
    copied = [member for member in members if member.output is not None]
    outputs = [member.output for member in copied if member.output is not None]
    check(([member.param for member in copied], outputs), ("params", "output_params"))


class ExplicitGradsOptimizer(torch.optim.Optimizer):
    """Base of the optimizers that FP16_Optimizer wraps."""

    # FusedOptimizer describes these attributes; `check_saved` reads them.
    _counts_steps = True
    _may_lack: frozenset[str] = frozenset()
    _check_options = staticmethod(check_options)

    def _state_names(self, group: dict[str, Any]) -> Sequence[str]:
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group after checking its hyperparameters."""
        if isinstance(param_group, dict):  # PyTorch raises for other types
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
        """Perform one optimization step and return the closure's loss.

        - `grads`: gradients instead of the parameters' own, as a list, or a list per group; None for no gradient.
        - `output_params`: tensors, in lists like `grads`, that get a copy of the updated parameters.
        - `scale`: gradients are divided by it.
        - `grad_norms`: the norm of each group's gradients before the division; computed if it is needed and missing.
        """
        loss = run_closure(closure)
        grads, output_params, scale, grad_norms = self._from_amp(grads, output_params, scale, grad_norms)
        by_group = self._members(grads, output_params)
        for group, norm, members in zip(self.param_groups, self._norms(grad_norms, by_group), by_group, strict=True):
            self._update(group, members, scale, norm)
        return loss

    def _from_amp(self, *arguments: Any) -> tuple[Any, ...]:
        """Return `grads`, `output_params`, `scale` and `grad_norms`: the arguments of `step`, or amp's values."""
        return arguments

    def _update(self, group: dict[str, Any], members: list[Member], scale: float | Tensor, norm: Any) -> None:
        """Update a group's members; their gradients have been multiplied by `scale`, and then have the norm `norm`."""
        raise NotImplementedError

    def _members(self, grads: Any, output_params: Any) -> list[list[Member]]:
        """Return the members of each group: its parameters with a gradient, passed to `step` or their own."""
        gradients, outputs = (
            self._by_group(tensors, name) for tensors, name in ((grads, "grads"), (output_params, "output_params"))
        )
        by_group = []
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
            by_group.append(members)
        return by_group

    def _by_group(self, tensors: Any, name: str) -> Iterable[list[Any]]:
        """Return a tensor or None for every parameter; `tensors` is None, a list for one group, or a list per group."""
        sizes = [len(group["params"]) for group in self.param_groups]
        if tensors is None:
            return [[None] * size for size in sizes]
        tensors = list(tensors)
        of_one_group = all(entry is None or isinstance(entry, Tensor) for entry in tensors)
        if of_one_group and tensors != [None] * len(sizes):
            tensors = [tensors]
        pairs = zip(tensors, sizes, strict=False)
        lists = [[None] * size if entry is None else list(entry) for entry, size in pairs]
        if len(tensors) != len(sizes) or any(map(int.__ne__, map(len, lists), sizes)):
            raise ValueError(f"{name} has lists of {list(map(len, lists))} tensors, the parameter groups {sizes}")
        return lists

    def _norms(self, grad_norms: Any, by_group: list[list[Member]]) -> Iterator[Any]:
        """Yield the norm of each group's gradients before unscaling; compute it if it is needed and missing."""
        norms = [None] * len(by_group) if grad_norms is None else list(grad_norms)
        for group, norm, members in zip(self.param_groups, norms, by_group, strict=True):
            if (group.get("max_grad_norm") or 0) > 0 and norm is None and members:
                norm = l2norm([member.gradient for member in members])[0]
            yield norm

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; state keeps the dtype that it was saved in."""
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_saved(self, state_dict)
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, param in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][name] = value.detach().to(param.device, copy=True)
