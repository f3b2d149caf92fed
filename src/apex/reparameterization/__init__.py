"""Reparameterizations of weights, such as weight normalization: a weight is computed from other parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .reparameterization import Reparameterization
from .weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]


def apply_weight_norm(module: nn.Module, name: str = "", dim: int | None = 0, hook_child: bool = True) -> nn.Module:
    """Compute a weight as `g v / ‖v‖` from a magnitude g and a direction v, and return the module.

    `name` is the weight's name in `module`, for example "weight" or "0.linear.weight"; its parameter becomes two, with
    `_g` and `_v` behind the name. By default all parameters with two or more dimensions are replaced, except the
    weights of embeddings. Norms are computed for each index of dimension `dim`, or of the whole weight if it is None.
    The weight is computed before a forward pass of the module that holds it, or of `module` if not `hook_child`.
    See https://arxiv.org/abs/1602.07868.
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Make parameters of normalized weights again, and return the module; see `remove_reparameterization`."""
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> nn.Module:
    """Compute a weight, or all with two or more dimensions, by a subclass of `Reparameterization`; return the module.

    `apply_weight_norm` describes the arguments.
    """
    if not (isinstance(reparameterization, type) and issubclass(reparameterization, Reparameterization)):
        raise TypeError(f"reparameterization must be a subclass of Reparameterization, got {reparameterization!r}")
    names = [name] if name else list(_names_of_parameters(module))
    for each in names:
        if found := Reparameterization._find(module, each):
            reparameterization.check(each, found[2], dim)
    for each in names:
        Reparameterization.apply(module, each, dim, reparameterization, hook_child)
    return module


def _names_of_parameters(module: nn.Module) -> Iterator[str]:
    """Yield a name for each parameter of each module: one for a module used twice, several for a shared parameter."""
    for prefix, each in module.named_modules():
        yield from (name for name, _ in each.named_parameters(prefix, recurse=False, remove_duplicate=False))


def remove_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> nn.Module:
    """Make parameters of computed weights again, and return the module.

    `name` is the name that the weight has in the module whose forward pass computes it: with `hook_child` the module
    that holds the weight, so that the name has no dots. `remove_all` removes all weights of this one module. Without
    both, all weights of the module and of the modules inside it are removed.
    """
    if not name and not remove_all:
        for each in module.modules():
            remove_reparameterization(each, reparameterization, remove_all=True)
        return module
    hooks = [
        (key, hook)
        for key, hook in module._forward_pre_hooks.items()
        if isinstance(hook, reparameterization) and (remove_all or hook.name == name)
    ]
    if not hooks and not remove_all:
        raise ValueError(f"no reparameterization of {name!r} in {type(module).__name__}")
    for key, hook in hooks:
        hook.remove(module)
        del module._forward_pre_hooks[key]
    return module
