"""`apex.fuse` replaces modules of a model, or an optimizer, by fused ones in place; `apex.unfuse` undoes it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import attention, causal, experts, head, language, layers, norms, optimizers, rotation, vision
from .rule import (
    RULES,
    FusedModule,
    FusionRule,
    compare,
    copied_arguments,
    has_own_forward,
    replace,
    restore,
    trial,
    unchanged_buffers,
)

__all__ = ["Report", "ReportRow", "fuse", "unfuse"]

_COMPILED = "it was compiled by torch.jit; fuse before torch.jit.trace (torch.jit.script takes no fused module)"

_KINDS: tuple[Any, ...] = (norms, language, rotation, head, vision, attention, causal, experts, layers)
RULES += [rule for kind in _KINDS for rule in kind.RULES]


class ReportRow(NamedTuple):
    """A module or optimizer with a fused counterpart; `reason` tells why it was not fused, and is "" if it was."""

    name: str
    kind: str
    rule: str
    reason: str


class Report(list[ReportRow]):
    """A list of the modules that have a fused counterpart. Its text is a table; similar modules share a line."""

    def __str__(self) -> str:
        counts: dict[tuple[str, str, str, str], int] = {}
        for row in self:
            pattern = re.sub(r"(^|(?<=\.))\d+(?=\.|$)|(?<=_)\d+(?=\.)", "*", row.name)
            line = (pattern, row.kind, "no" if row.reason else "yes", row.reason or row.rule)
            counts[line] = counts.get(line, 0) + 1
        if not counts:
            return "nothing here has a fused counterpart that is not in its place already"
        rows = [("module", "class", "", "fused")]
        rows += [(name, f"{kind} x {n}" if n > 1 else kind, a, b) for (name, kind, a, b), n in counts.items()]
        names, kinds = (max(len(row[i]) for row in rows) for i in (0, 1))
        return "\n".join(f"{a:{names}}  {b:{kinds}}  {c:3}  {d}".rstrip() for a, b, c, d in rows)


def fuse(
    target: nn.Module | torch.optim.Optimizer,
    *,
    check: Any = None,
    choose: Callable[[str, nn.Module], bool] | None = None,
    verbose: bool = True,
    padding: str | None = None,
) -> Report:
    """Replace modules of a model, or an optimizer of torch.optim, by fused ones in place; return a report.

    Parameters, module names and state dicts stay; a module's new class is a subclass of the old one. If
    `choose(name, module)` is False, a module is left out. The report lists every module that has a fused counterpart
    and is printed unless `verbose` is False.

    `padding="right"` promises that all padding of a causal language model's training batches is behind the tokens. Its
    decoder then ignores `attention_mask` in training: no token sees padding behind it, and attention keeps its flash
    kernels. The rows of the padding itself get other values, which a loss with ignored labels does not see.

    `check` is an input of the model: a tensor, a tuple of positional arguments or a dict of keyword arguments. The
    model is called with it, and each fused module is compared with the original on the input that it gets there:
    outputs and gradients. A replacement whose error exceeds the tolerance of the dtype is undone and reported.
    """
    if choose is not None and not callable(choose):
        raise TypeError(
            f"choose must be a function of a module's name and the module that returns whether to fuse it, or None, "
            f"got {choose!r}"
        )
    if padding not in causal.PADDINGS:
        raise ValueError(f'padding={padding!r} is not known; use "right", or None for any padding')
    if isinstance(target, torch.optim.Optimizer):
        if check is not None or choose is not None or padding is not None:
            raise ValueError("check, choose and padding are for models, not optimizers")
        kind, reason = type(target).__name__, optimizers.reason(target)
        if not reason:
            optimizers.replace(target)
        report = Report([ReportRow("", kind, type(target).__name__, reason)])
    elif isinstance(target, nn.Module):
        arguments = None if check is None else _call_arguments(check)
        report = Report()
        try:
            for name, module in reversed(_modules(target)):  # children first: trials of layers use fused children
                row = _fuse_module(name, module, choose)
                report += [] if row is None else [row]
            report.reverse()
            causal.configure(target, padding)
            if arguments is not None:
                report = _checked(target, arguments, report)
                causal.configure(target, padding)  # the check may have undone replacements
        except BaseException:  # raised by `choose` or by the model: leave the model as it was
            for row in report:
                if not row.reason:
                    restore(target.get_submodule(row.name))
            raise
    else:
        raise TypeError(f"target must be a torch.nn.Module or a torch.optim.Optimizer, got {type(target).__name__}")
    if verbose:
        print(report)
    return report


def unfuse(target: nn.Module | torch.optim.Optimizer) -> None:
    """Undo `fuse`: give fused modules, or a fused optimizer, their original class."""
    if isinstance(target, torch.optim.Optimizer):
        if hasattr(target, "_fused_from"):
            optimizers.restore(target)
    elif isinstance(target, nn.Module):
        modules = [module for module in target.modules() if isinstance(module, FusedModule)]
        for module in modules:
            if "fused_from" not in vars(type(module)):
                raise RuntimeError(
                    f"{type(module).__name__} was made of a fused module (by fully_shard?): undo that first"
                )
        for module in modules:
            restore(module)
    else:
        raise TypeError(f"target must be a torch.nn.Module or a torch.optim.Optimizer, got {type(target).__name__}")


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of a model by name, without the inner modules of modules compiled by torch.jit."""
    modules: list[tuple[str, nn.Module]] = []
    compiled: list[str] = []
    for name, module in model.named_modules():
        if any(not outer or name.startswith(f"{outer}.") for outer in compiled):
            continue
        modules.append((name, module))
        if isinstance(module, torch.jit.ScriptModule):
            compiled.append(name)
    return modules


def _fuse_module(name: str, module: Any, choose: Callable[[str, nn.Module], bool] | None) -> ReportRow | None:
    """Fuse one module if a rule allows it; return None if no rule matches it or if it is already fused."""
    if isinstance(module, torch.jit.ScriptModule):
        kind = getattr(module, "original_name", type(module).__name__)
        return ReportRow(name, kind, "", _COMPILED)
    rules = [] if isinstance(module, FusedModule) else [rule for rule in RULES if rule.matches(module)]
    if not rules:
        return None
    kind = type(module).__name__
    reasons: list[tuple[str, str]] = []
    for rule in rules:
        reason = "left out by choose" if choose is not None and not choose(name, module) else _obstacle(module, rule)
        if not reason:
            replace(module, rule)
            reason = _probe(module, rule)
            if not reason:
                return ReportRow(name, kind, rule.name, "")
            restore(module)
        reasons += [] if rule.silent else [(rule.name, reason)]
    return ReportRow(name, kind, *reasons[0]) if reasons else None


def _obstacle(module: Any, rule: FusionRule) -> str:
    """Return the reason why a module cannot be fused, "" if it can."""
    if has_own_forward(module):
        return "its forward was replaced in this instance; fuse before that (before amp.initialize, say)"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrized"
    weight = next(module.parameters(), None)
    if weight is not None and not weight.is_floating_point():
        return f"its weights are {weight.dtype}"
    return rule.reason(module) or ""


def _probe(module: Any, rule: FusionRule) -> str:
    """Compare a fused module with the original if the rule asks for it; return the problem, "" if there is none."""
    example = rule.probe(module)
    if example is None:
        return ""
    if any(hasattr(weight, "device_mesh") for weight in module.parameters()):
        return "its weights are sharded, so that it cannot be tried; fuse before fully_shard"
    arguments = example if isinstance(example, tuple) else (example,)
    if arguments[0].is_meta:
        return "its weights are on no device yet, so that it cannot be tried"
    try:
        difference = trial(rule.small(module), *arguments)
    except Exception as problem:  # a foreign module may raise anything
        return f"it cannot be tried: {type(problem).__name__}: {problem}"
    return f"its forward computes something else ({difference})" if difference else ""


def _checked(model: nn.Module, arguments: tuple[tuple[Any, ...], dict[str, Any]], report: Report) -> Report:
    """Call the model, compare each fused module with the original on its input, and undo wrong ones.

    Returns the report, with a reason for each replacement that was undone.
    """
    modules = {row.name: model.get_submodule(row.name) for row in report if not row.reason}
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    handles = []
    for name, module in modules.items():

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
            if name not in calls:
                calls[name] = copied_arguments(args, kwargs)

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), unchanged_buffers(model), torch.random.fork_rng():
            model(*arguments[0], **arguments[1])
    finally:
        for handle in handles:
            handle.remove()
    errors = {name: compare(modules[name], *call) for name, call in calls.items()}
    failed = {
        name: f"undone: {where} is off by {error:.3g} times the tolerance"
        for name, (error, where) in errors.items()
        if not error <= 1
    }
    for name in failed:
        restore(modules[name])
    return Report(row._replace(reason=failed.get(row.name, row.reason)) for row in report)


def _call_arguments(check: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that the user gave as `check`."""
    if isinstance(check, Mapping):
        return (), dict(check)
    if isinstance(check, (tuple, list)):
        return tuple(check), {}
    if isinstance(check, Tensor):
        return (check,), {}
    raise TypeError(f"check must be a tensor, a tuple or a dict of arguments of the model, got {type(check).__name__}")
