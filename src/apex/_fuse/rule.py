"""A rule of `apex.fuse`, the class that a replaced module gets, and the comparison of both ways to compute."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops._tolerance import TOLERANCES


def nothing(module: Any) -> Any:
    """No reason against a replacement, no input to try it with, no settings."""


def unless_overridden(kind: Any, reason: Callable[[Any], str] = nothing) -> Callable[[Any], str]:
    """The reason of a rule for modules of the class `kind` and of subclasses that compute the same."""
    return lambda module: (
        reason(module) if module.__class__.forward is kind.forward else "its class has a forward of its own"
    )


class Rule(NamedTuple):
    """How modules of one kind are replaced.

    `matches` says whether a module is of this kind and `reason` why it stays as it is ("" if it does not). `forward`
    makes the new forward method from the class of the module. `probe` gives a small input on which the replaced module
    is held against the original at once, for modules that are recognised by their looks; `settings` gives what the new
    forward needs to know besides, which it finds as `self.fused_settings`.
    """

    name: str
    matches: Callable[[Any], bool]
    reason: Callable[[Any], str]
    forward: Callable[[type], Callable[..., Any]]
    probe: Callable[[Any], Tensor | None] = nothing
    settings: Callable[[Any], Any] = nothing


# All rules, in the order in which they are tried; the package fills it.
RULES: list[Rule] = []


class FusedModule:
    """What the classes of replaced modules have in common; each is a subclass of the class that a module had."""

    fused_from: type
    fused_rule: Rule
    fused_settings: Any

    def _get_name(self) -> str:
        return f"Fused{self.fused_from.__name__}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: a copy or a pickled module makes it again.
        reduced = super().__reduce_ex__(protocol)
        return _make_empty, (self.fused_from, self.fused_rule.name), *reduced[2:]


@functools.cache
def fused_class(original: Any, rule: Rule) -> type:
    """The subclass of `original` with the forward of `rule`; its name, by which other libraries know it, stays."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"fused_from": original, "fused_rule": rule, "forward": rule.forward(original)}
    return type(original.__name__, (FusedModule, original), names)


def _make_empty(original: type, name: str) -> Any:
    """A module without attributes, of the class that the rule of this name makes of `original`."""
    rule = next(rule for rule in RULES if rule.name == name)
    made: Any = fused_class(original, rule)
    return made.__new__(made)


def replace(module: Any, rule: Rule) -> None:
    settings, original = rule.settings(module), module.__class__
    module.__class__ = fused_class(original, rule)
    if settings is not None:
        module.fused_settings = settings


def restore(module: Any) -> None:
    """Gives a replaced module its own class again."""
    module.__dict__.pop("fused_settings", None)
    module.__class__ = module.fused_from


def names_used(method: Any) -> tuple[str, ...]:
    """Attributes and globals that a method's code names; () if there is no code."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return () if code is None else code.co_names


def has_hooks(module: nn.Module) -> bool:
    """Whether something waits for this module to be called, so that it must be."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(map(len, hooks)) or "forward" in module.__dict__


def random_input(module: nn.Module, *shape: int) -> Tensor:
    """The same numbers at every call, in the dtype and on the device of the module's weights."""
    weight = next(module.parameters(), None)
    dtype, device = (torch.float32, None) if weight is None else (weight.dtype, weight.device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device).to(device, dtype)


def compare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, str]:
    """How far a replaced module is from the original, as a multiple of the tolerance, and in what.

    Outputs and the gradients of inputs and parameters, for random gradients of the outputs. An error's norm may be the
    dtype's relative tolerance times the norm of what is right, plus the absolute one times the root of the size. The
    dtype is that of least precision among inputs and parameters.
    """
    found = [_results(module, forward, args, kwargs) for forward in (module.fused_from.forward, type(module).forward)]
    tensors = [*tree_leaves((args, kwargs)), *module.parameters()]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)} & set(TOLERANCES)
    rtol, atol = max([TOLERANCES[dtype] for dtype in dtypes], default=TOLERANCES[torch.float32])
    worst, where = 0.0, ""
    for name, wanted in found[0].items():
        actual = found[1].get(name)
        if actual is None:
            error = math.inf if bool(wanted.any()) else 0.0
        elif actual.shape != wanted.shape:
            error = math.inf
        else:
            limit = rtol * wanted.double().norm() + atol * math.sqrt(wanted.numel())
            error = float((actual.double() - wanted.double()).norm() / limit)
        if not error <= worst:  # also NaN
            worst, where = math.inf if math.isnan(error) else error, name
    return worst, where


def _results(
    module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Tensor]:
    """Outputs and gradients by name, of one call with dropout of a fixed seed; buffers are left as they were."""
    inputs = copied_arguments(args, kwargs)
    with unchanged_buffers(module), torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        outputs = dict(_named_tensors(forward(module, *inputs[0], **inputs[1])))
        if "loss" in outputs:  # the logits beside a loss are what a replaced head does without
            outputs.pop("logits", None)
        sources: dict[str, Any] = {f"of input {i}": t for i, t in enumerate([*inputs[0], *inputs[1].values()])}
        sources |= {f"of {name}": parameter for name, parameter in module.named_parameters()}
        sources = {n: t for n, t in sources.items() if isinstance(t, Tensor) and t.requires_grad}
        results = [t for t in outputs.values() if t.requires_grad]
        torch.manual_seed(1)
        directions = [torch.randn_like(t) for t in results]
        gradients: Any = ()
        if results and sources:
            gradients = torch.autograd.grad(results, [*sources.values()], directions, allow_unused=True)
    named = {f"output {name}".strip(): t.detach() for name, t in outputs.items()}
    return named | {f"gradient {n}": g for n, g in zip(sources, gradients, strict=False) if g is not None}


@contextlib.contextmanager
def unchanged_buffers(module: nn.Module) -> Iterator[None]:
    """Within this, calls leave no trace in running statistics."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def copied_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}


def _copied(value: Any) -> Any:
    """A copy of an argument. A tensor by itself gets a gradient; those in tuples (tables, masks) do not."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() else copied
    return copy.deepcopy(value)  # a cache of keys and values, say, which a call changes


def _named_tensors(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of what a module returned."""
    if isinstance(outputs, Tensor):
        outputs = {"": outputs}
    elif not isinstance(outputs, Mapping):
        outputs = dict(enumerate(outputs)) if isinstance(outputs, (tuple, list)) else {}
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield str(name), value
