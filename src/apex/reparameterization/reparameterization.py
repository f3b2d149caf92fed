"""The base of reparameterizations: a hook that computes a weight before a module's forward pass."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Reparameterization:
    """A weight that is computed from other parameters; subclasses define the parameters and the formula.

    An object is a hook of `module` that runs before its forward pass. `name` is the weight's name in that module and
    `dim` a dimension that subclasses use. With gradients the weight is computed once until a backward pass or an update
    of its parameters: all steps of a recurrent network use one tensor. Under `torch.no_grad` it is computed at each
    forward pass, because an update through `param.data`, as of moving averages, does not tell PyTorch.
    `retain_forward` is accepted, and has no effect.
    """

    def __init__(self, name: str, dim: int | None, module: nn.Module, retain_forward: bool = True) -> None:
        self.name, self.dim, self.module, self.retain_forward = name, dim, module, retain_forward
        self.reparameterization_names: list[str] = []
        self.evaluated = False
        self._computed_from: Any = None
        self._weight: Tensor | None = None

    def compute_weight(self, module: nn.Module | None = None, name: str | None = None) -> Tensor:
        """Return the weight `name` of a module, computed from its parameters."""
        raise NotImplementedError

    def reparameterize(
        self, name: str, weight: Tensor, dim: int | None
    ) -> tuple[Sequence[str], Sequence[nn.Parameter]]:
        """Return names and values of the parameters that will replace a weight."""
        raise NotImplementedError

    @staticmethod
    def apply(
        module: nn.Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization] | None = None,
        hook_child: bool = True,
    ) -> Reparameterization | None:
        """Replace a weight's parameter, and return the hook.

        Weights of embeddings, of one dimension, and parameters of a reparameterization stay as they are: None.
        """
        if reparameterization is None:
            raise TypeError("reparameterization must be a subclass of Reparameterization, got None")
        found = Reparameterization._find(module, name)
        if found is None:
            return None
        holder, own_name, weight = found
        reparameterization.check(name, weight, dim)
        owners = [other for other in module.modules() for each in other._parameters.values() if each is weight]
        if len(owners) > 1:
            warnings.warn(
                f"{name!r} is shared by {len(owners)} modules; from now on it differs between them", stacklevel=3
            )
        hook = reparameterization(own_name, dim, holder) if hook_child else reparameterization(name, dim, module)
        names, parameters = hook.reparameterize(own_name, weight, dim)
        del holder._parameters[own_name]
        for each, parameter in zip(names, parameters, strict=True):
            holder.register_parameter(each, parameter)
        hook.reparameterization_names = list(names)
        hooked = holder if hook_child else module
        with torch.no_grad():
            setattr(holder, own_name, hook.compute_weight(holder, own_name))
        hooked.register_forward_pre_hook(hook)
        return hook

    @classmethod
    def check(cls, name: str, weight: Tensor, dim: int | None) -> None:
        """Raise if a weight cannot be computed with this `dim`; called for all weights before any is replaced."""

    @staticmethod
    def _find(module: nn.Module, name: str) -> tuple[nn.Module, str, nn.Parameter] | None:
        """Return a weight, the module that holds it and its name there, or None if the weight stays as it is."""
        holder, own_name = Reparameterization.get_module_and_name(module, name)
        if holder is None or own_name is None or isinstance(holder, (nn.Embedding, nn.EmbeddingBag)):
            return None  # rows of an embedding may have sparse gradients
        weight = holder._parameters.get(own_name)
        if weight is None:
            raise ValueError(f"{name!r} is no parameter of {type(module).__name__}")
        if isinstance(weight, nn.UninitializedParameter) or not isinstance(weight, nn.Parameter):
            raise TypeError(f"{name!r} has no values yet; run a forward pass first")
        if weight.dim() <= 1 or any(each is weight for each in _parameters_of_hooks(module)):
            return None
        return holder, own_name, weight

    @staticmethod
    def get_module_and_name(module: nn.Module, name: str) -> tuple[nn.Module | None, str | None]:
        """Return the module that holds the weight with a dotted name, and its name there; None for an empty name."""
        if not name:
            return None, None
        path, _, own_name = name.rpartition(".")
        return module.get_submodule(path), own_name

    def get_params(self, module: nn.Module) -> list[Tensor]:
        """Return the parameters of `module` that determine the weight."""
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: nn.Module) -> None:
        """Make a parameter of the weight's present value; the hook itself stays."""
        holder, name = Reparameterization.get_module_and_name(module, self.name)
        assert holder is not None
        assert name is not None
        parameters = self.get_params(holder)
        with torch.no_grad():
            weight = nn.Parameter(self.compute_weight(holder, name), any(each.requires_grad for each in parameters))
        delattr(holder, name)
        for each in self.reparameterization_names:
            del holder._parameters[each]
        holder.register_parameter(name, weight)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Compute the weight before a forward pass of `module`."""
        holder, name = Reparameterization.get_module_and_name(module, self.name)
        assert holder is not None
        assert name is not None
        if torch.compiler.is_compiling():  # a graph computes it at each call
            setattr(holder, name, self.compute_weight(holder, name))
            return
        if not torch.is_grad_enabled():
            self.evaluated, self._weight = False, None
            setattr(holder, name, self.compute_weight(holder, name))
            return
        parameters = self.get_params(holder)
        source = [(p._version, p.data_ptr(), p.dtype, p.requires_grad) for p in parameters]
        if self.evaluated and self._computed_from == source and getattr(holder, name) is self._weight:
            return
        weight = self.compute_weight(holder, name)
        if weight.requires_grad:
            weight.register_hook(functools.partial(self._forget, holder, name))
        setattr(holder, name, weight)
        self.evaluated, self._computed_from, self._weight = True, source, weight

    def _forget(self, holder: nn.Module, name: str, gradient: Tensor) -> None:
        """Make the next forward pass compute the weight again, because a backward pass has freed its graph."""
        weight = self._weight
        self.evaluated, self._weight = False, None
        if weight is not None and id(getattr(holder, name, None)) == id(weight):
            setattr(holder, name, weight.detach())  # modules with tensors of a graph cannot be copied


def _parameters_of_hooks(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that determine reparameterized weights of the module and of the modules inside it."""
    for each in module.modules():
        for hook in each._forward_pre_hooks.values():
            if isinstance(hook, Reparameterization):
                holder, _ = Reparameterization.get_module_and_name(each, hook.name)
                assert holder is not None
                yield from hook.get_params(holder)
