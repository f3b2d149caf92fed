"""Rules of `apex.fuse`, the classes of fused modules, and the comparison of a fused module with the original."""

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
    """Return None: the default of optional functions of a `FusionRule`."""


def unless_overridden(kind: Any, reason: Callable[[Any], str] = nothing) -> Callable[[Any], str]:
    """Return a rule's `reason` function that refuses subclasses of `kind` that may compute something else.

    These are subclasses that override `forward` or a method that `kind.forward` calls.
    """
    methods = ["forward", *(name for name in names_used(kind.forward) if inspect.isfunction(getattr(kind, name, None)))]

    def check(module: Any) -> str:
        for name in methods:
            if getattr(type(module), name) is not getattr(kind, name):
                return f"its class has a {name} of its own"
        return reason(module)

    return check


class FusionRule(NamedTuple):
    """A rule that replaces modules of one kind by fused ones.

    - `matches(module)`: whether the module is of this kind;
    - `reason(module)`: the reason why the module cannot be fused, "" if it can;
    - `forward(class)`: makes the fused forward method for modules of the class;
    - `probe(module)`: a small input, or a tuple of arguments that begins with one, to compare the fused module with
      the original immediately, for kinds that are recognised by attribute names; None for no comparison;
    - `settings(module)`: data that the fused forward reads as `self.fused_settings`;
    - `omitted`: outputs, by key or position, that the fused forward may leave None;
    - `silent`: modules that it refuses are not reported, because names alone do not tell that they are of its kind;
    - `small(module)`: a smaller fused module to compare in place of a large one.
    """

    name: str
    matches: Callable[[Any], bool]
    reason: Callable[[Any], str]
    forward: Callable[[type], Callable[..., Any]]
    probe: Callable[[Any], Tensor | tuple[Tensor, ...] | None] = nothing
    settings: Callable[[Any], Any] = nothing
    omitted: tuple[str, ...] = ()
    silent: bool = False
    small: Callable[[Any], Any] = lambda module: module


# All rules, in the order of their trial; the package's __init__ fills the list.
RULES: list[FusionRule] = []


class FusedModule:
    """A base class of the classes of fused modules, which also derive from the modules' original classes."""

    fused_from: type
    fused_rule: FusionRule
    fused_settings: Any
    # Whether a norm gives its input's dtype under autocast, too, where PyTorch's give float32.
    keeps_dtype = False

    def __repr__(self) -> str:
        # `_get_name` stays as it is, because trainers look up models by that name.
        return f"Fused{super().__repr__()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time, so copying and unpickling must make it again.
        reduced = super().__reduce_ex__(protocol)
        return _make_empty, (self.fused_from, self.fused_rule.name), *reduced[2:]


@functools.cache
def fused_class(original: Any, rule: FusionRule) -> type:
    """Return a subclass of `original` with the rule's forward. It keeps the name, which other libraries look up."""
    names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    names |= {"fused_from": original, "fused_rule": rule, "forward": rule.forward(original)}
    return type(original.__name__, (FusedModule, original), names)


def _make_empty(original: type, name: str) -> Any:
    """Return a module without attributes, of the fused class of `original` by the rule of this name."""
    rule = next(rule for rule in RULES if rule.name == name)
    fused: Any = fused_class(original, rule)
    return fused.__new__(fused)


def replace(module: Any, rule: FusionRule) -> None:
    """Give a module the fused class of a rule."""
    settings, original = rule.settings(module), module.__class__
    module.__dict__.pop("forward", None)  # it is the class's own, or there would be an obstacle
    module.__class__ = fused_class(original, rule)
    if settings is not None:
        module.fused_settings = settings


def restore(module: Any) -> None:
    """Give a fused module its original class."""
    module.__dict__.pop("fused_settings", None)
    if not has_own_forward(module):
        module.__dict__.pop("forward", None)
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


def with_functions(method: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a method whose code sees other functions under the names of `changes`.

    The copy has globals of its own, so that other code of the same library does not change. Decorators around the
    method are copied around it; None if one of them does not keep the function that it wraps in its closure.
    """
    if not isinstance(method, types.FunctionType):
        return None
    inner, names, cells = getattr(method, "__wrapped__", None), method.__globals__, method.__closure__
    if inner is None:
        names = {**names, **changes}
        names.pop("__name__", None)  # torch.compile would look up globals in the module of this name
    else:
        copied = with_functions(inner, changes)
        if copied is None or cells is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        cells = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in cells)
    function = types.FunctionType(method.__code__, names, method.__name__, method.__defaults__, cells)
    functools.update_wrapper(function, method, updated=())
    function.__kwdefaults__ = method.__kwdefaults__
    del function.__wrapped__  # type: ignore[attr-defined]
    if inner is not None:
        function.__wrapped__ = copied  # type: ignore[attr-defined]
    return function


def names_reached(kind: type) -> set[str]:
    """Return the names used by the forward of a class and by the class's methods that it calls.

    Leaves out the names of these methods, and does not follow methods of `nn.Module`.
    """
    used: set[str] = set()
    followed: set[str] = {"forward"}
    waiting = ["forward"]
    while waiting:
        for name in names_used(getattr(kind, waiting.pop())):
            if inspect.isfunction(getattr(kind, name, None)) and not hasattr(nn.Module, name):
                waiting += [name] if name not in followed else []
                followed.add(name)
            else:
                used.add(name)
    return used


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module must really be called, because it has hooks or a replaced forward."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(map(len, hooks)) or has_own_forward(module)


def has_own_forward(module: Any) -> bool:
    """Return whether the forward of a module was replaced in this instance.

    False if the instance has its class's forward as an attribute. Transformers 4.53 to 4.57 leaves it there after a
    call with `output_hidden_states=True`, for which it wraps the forward of layers.
    """
    if "forward" not in module.__dict__:
        return False
    own = module.__dict__["forward"]
    kind: Any = type(module)
    return getattr(own, "__self__", None) is not module or getattr(own, "__func__", None) is not kind.forward


def inherits(module: Any, *kinds: Any) -> bool:
    """Return whether a module without hooks has the forward of one of these classes, or is a fused one of them."""
    kind = getattr(type(module), "fused_from", type(module))
    return not has_hooks(module) and any(isinstance(module, base) and kind.forward is base.forward for base in kinds)


def is_linear(module: Any) -> bool:
    """Return whether a module is a linear layer, or a Conv1D of transformers, whose parameters are plain tensors."""
    kind = type(module)
    is_conv1d = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") and not has_hooks(module)
    return (is_conv1d or inherits(module, nn.Linear)) and type(module.weight) in (nn.Parameter, Tensor)


def random_input(module: nn.Module, *shape: int) -> Tensor:
    """Return a tensor of fixed random numbers with the dtype and device of the module's weights."""
    weight = next(module.parameters(), None)
    dtype, device = (torch.float32, None) if weight is None else (weight.dtype, weight.device)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=generator.device).to(device, dtype)


def trial(module: Any, example: Tensor, *others: Tensor) -> str:
    """Compare a fused module with the original; return the first difference, or "" if there is none.

    Both compute in training and in evaluation mode, from `example` and from negative, large and tiny inputs; `others`
    are the remaining arguments. Such inputs reveal another formula (a clamp, say), not rounding errors: the allowed
    error is four tolerances, and results that overflow in the original are ignored. Gradients of parameters, which are
    costly for large layers, are compared once.

    A module in half precision is compared as a float32 copy, and only its outputs in half precision. Rounding can put a
    number on either side of a ReLU's zero, and the gradients then differ by dozens of tolerances.
    """
    if example.dtype.itemsize == 2:
        error, where = compare(module, (example, *others), {}, gradients_of="")
        if not error <= 4:
            return f"{where} differs"
        module, example = copy.deepcopy(module).float(), example.float()
        others = tuple(argument.float() if argument.is_floating_point() else argument for argument in others)
    error, where = compare(module, (example, *others), {})
    if not error <= 1:
        return f"{where} differs"
    inputs = {"": example, "negative": -example.abs(), "large": example * 2.0**10, "tiny": example * 2.0**-10}
    for training in (True, False):
        with in_mode(module, training):
            for kind, tensor in inputs.items():
                error, where = compare(module, (tensor, *others), {}, gradients_of="inputs", finite_only=True)
                if not error <= 4:
                    mode = "training" if training else "evaluation"
                    return f"{where} differs in {mode} mode" + (f" for {kind} inputs" if kind else "")
    return ""


@contextlib.contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Set the training flag of all modules inside `module`, and restore each afterwards."""
    before = [(inner, inner.training) for inner in module.modules()]
    try:
        for inner, _ in before:
            inner.training = training
        yield
    finally:
        for inner, flag in before:
            inner.training = flag


def compare(
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradients_of: str = "inputs and parameters",
    finite_only: bool = False,
) -> tuple[float, str]:
    """Return the largest error of a fused module as a multiple of the tolerance, and the result that has it.

    Compares outputs, and gradients of the kinds that `gradients_of` names, for random gradients of the outputs. The
    allowed norm of an error is rtol * norm(expected) + atol * sqrt(size), with the tolerances of the least precise
    dtype among inputs and parameters. If `finite_only` is set, results that are not finite in the original are skipped.
    """
    forwards = module.fused_from.forward, type(module).forward
    expected, fused = (_results(module, forward, args, kwargs, gradients_of) for forward in forwards)
    tensors = [*tree_leaves((args, kwargs)), *module.parameters()]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)} & set(TOLERANCES)
    rtol, atol = max([TOLERANCES[dtype] for dtype in dtypes], default=TOLERANCES[torch.float32])
    omitted = {f"output {name}" for name in module.fused_rule.omitted}
    worst, where = 0.0, ""
    for name, wanted in expected.items():
        actual = fused.get(name)
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
    """Call a module with a fixed seed for dropout; return outputs and gradients by name, and restore the buffers.

    Outputs that the rule may omit (the logits of a language model) are not differentiated.
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
    """Restore the buffers, such as running statistics, when the block ends."""
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def copied_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of a call's arguments."""
    return tuple(map(_copied, args)), {name: _copied(value) for name, value in kwargs.items()}


def _copied(value: Any) -> Any:
    """Return a copy of an argument. A float tensor requires a gradient; tensors in tuples (tables, masks) do not."""
    if isinstance(value, Tensor):
        copied = value.detach().clone()
        return copied.requires_grad_() if copied.is_floating_point() else copied
    return copy.deepcopy(value)  # a call may change it: a key-value cache, say


def _named_tensors(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point tensors of a module's output, by key or position."""
    if isinstance(outputs, Tensor):
        outputs = {"": outputs}
    elif not isinstance(outputs, Mapping):
        outputs = dict(enumerate(outputs)) if isinstance(outputs, (tuple, list)) else {}
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield str(name), value
