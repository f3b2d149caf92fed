"""A rule of `apex.fuse`, the class that a replaced module gets, and the comparison of both ways to compute."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..ops._tolerance import TOLERANCES


def nothing(module: Any) -> Any:
    """No reason against a replacement, no input to try it with, no settings."""


def unless_overridden(kind: Any, reason: Callable[[Any], str] = nothing) -> Callable[[Any], str]:
    """Return the `reason` function of a rule for the class `kind` and for subclasses that compute the same.

    A subclass computes the same if it overrides neither `forward` nor a method that `kind.forward` calls.
    """
    methods = ["forward", *(name for name in names_used(kind.forward) if inspect.isfunction(getattr(kind, name, None)))]

    def check(module: Any) -> str:
        for name in methods:
            if getattr(type(module), name) is not getattr(kind, name):
                return f"its class has a {name} of its own"
        return reason(module)

    return check


class Rule(NamedTuple):
    """How modules of one kind are replaced.

    `matches` says whether a module is of this kind and `reason` why it stays as it is ("" if it does not). `forward`
    makes the new forward method from the class of the module. `probe` gives a small input on which the replaced module
    is held against the original at once, for modules that are recognised by their looks; `settings` gives what the new
    forward needs to know besides, which it finds as `self.fused_settings`. `omitted` names outputs, by key or position,
    that the new forward may leave None.
    """

    name: str
    matches: Callable[[Any], bool]
    reason: Callable[[Any], str]
    forward: Callable[[type], Callable[..., Any]]
    probe: Callable[[Any], Tensor | None] = nothing
    settings: Callable[[Any], Any] = nothing
    omitted: tuple[str, ...] = ()


# All rules, in the order in which they are tried; the package fills it.
RULES: list[Rule] = []


class FusedModule:
    """What the classes of replaced modules have in common; each is a subclass of the class that a module had."""

    fused_from: type
    fused_rule: Rule
    fused_settings: Any

    def __repr__(self) -> str:
        # Not in `_get_name`: trainers look up models by that name.
        return f"Fused{super().__repr__()}"

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
    """Return the attributes and globals that a method's code names, inner functions included; () without code."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return () if code is None else tuple(dict.fromkeys(_names_in(code)))


def _names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names in a code object and in the code of its lambdas, comprehensions and inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def names_reached(kind: type) -> set[str]:
    """Return the names that the forward of a class uses, with the names used by methods of the class that it names.

    The names of these methods are left out; methods that `nn.Module` has are not followed.
    """
    found: set[str] = set()
    followed: set[str] = {"forward"}
    waiting = ["forward"]
    while waiting:
        for name in names_used(getattr(kind, waiting.pop())):
            if inspect.isfunction(getattr(kind, name, None)) and not hasattr(nn.Module, name):
                waiting += [name] if name not in followed else []
                followed.add(name)
            else:
                found.add(name)
    return found


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


def trial(module: Any, example: Tensor) -> str:
    """Return in what a replaced module differs from the original, "" if in nothing.

    Both compute in training and in evaluation mode, from `example` and from negative, large and tiny inputs. These are
    to show another formula (a clamp, say), not rounding: four times the tolerance is allowed, and results that overflow
    in the original say nothing. Gradients of parameters, the costly part for large layers, are compared once.

    Of a module in half precision, a float32 copy is tried, and outputs in half precision besides. Two ways to round can
    put a number on two sides of a ReLU's zero, after which gradients differ by dozens of tolerances.
    """
    if example.dtype.itemsize == 2:
        error, where = compare(module, (example,), {}, gradients_of="")
        if not error <= 4:
            return f"{where} differs"
        module, example = copy.deepcopy(module).float(), example.float()
    error, where = compare(module, (example,), {})
    if not error <= 1:
        return f"{where} differs"
    inputs = {"": example, "negative": -example.abs(), "large": example * 2.0**10, "tiny": example * 2.0**-10}
    for training in (True, False):
        with in_mode(module, training):
            for kind, tensor in inputs.items():
                error, where = compare(module, (tensor,), {}, gradients_of="inputs", finite_only=True)
                if not error <= 4:
                    mode = "training" if training else "evaluation"
                    return f"{where} differs in {mode} mode" + (f" for {kind} inputs" if kind else "")
    return ""


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flag of all modules inside `module`, and restore each afterwards."""
    before = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in before:
            each.training = training
        yield
    finally:
        for each, flag in before:
            each.training = flag


def compare(
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradients_of: str = "inputs and parameters",
    finite_only: bool = False,
) -> tuple[float, str]:
    """Return how far a replaced module is from the original, as a multiple of the tolerance, and in what.

    Outputs are compared, and the gradients of the kinds that `gradients_of` names, for random gradients of the outputs.
    An error's norm may be the dtype's relative tolerance times the norm of what is right, plus the absolute one times
    the root of the size. The dtype is that of least precision among inputs and parameters. With `finite_only`, results
    of which the original's are not finite are left out.
    """
    forwards = module.fused_from.forward, type(module).forward
    found = [_results(module, forward, args, kwargs, gradients_of) for forward in forwards]
    tensors = [*tree_leaves((args, kwargs)), *module.parameters()]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)} & set(TOLERANCES)
    rtol, atol = max([TOLERANCES[dtype] for dtype in dtypes], default=TOLERANCES[torch.float32])
    omitted = {f"output {name}" for name in module.fused_rule.omitted}
    worst, where = 0.0, ""
    for name, wanted in found[0].items():
        actual = found[1].get(name)
        if finite_only and not bool(wanted.isfinite().all()):
            continue
        if actual is None:
            error = math.inf if name not in omitted and bool(wanted.any()) else 0.0
        elif actual.shape != wanted.shape:
            error = math.inf
        else:
            limit = rtol * wanted.double().norm() + atol * math.sqrt(wanted.numel())
            error = float((actual.double() - wanted.double()).norm() / limit)
        if not error <= worst:  # also NaN
            worst, where = math.inf if math.isnan(error) else error, name
    return worst, where


def _results(
    module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], gradients_of: str
) -> dict[str, Tensor]:
    """Return outputs and gradients by name, of one call with dropout of a fixed seed; buffers are left as they were.

    The loss of a model that may leave out its logits is differentiated alone.
    """
    inputs = copied_arguments(args, kwargs)
    with unchanged_buffers(module), torch.random.fork_rng(), torch.enable_grad():
        torch.manual_seed(0)
        outputs = dict(_named_tensors(forward(module, *inputs[0], **inputs[1])))
        sources: dict[str, Any] = {}
        if "inputs" in gradients_of:
            sources |= {f"of input {i}": t for i, t in enumerate([*inputs[0], *inputs[1].values()])}
        if "parameters" in gradients_of:
            sources |= {f"of {name}": parameter for name, parameter in module.named_parameters()}
        sources = {n: t for n, t in sources.items() if isinstance(t, Tensor) and t.requires_grad}
        results = [t for name, t in outputs.items() if t.requires_grad and name not in module.fused_rule.omitted]
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
