"""From apex.amp to the Booster, whose FP16ApexMixedPrecision calls apex.amp itself, at any opt level."""

from __future__ import annotations

import libcst as cst

from .code import Code, Node, Use
from .edits import Edits
from .passes import backward_pass
from .rules import INITIALIZE, bound, literal

_CLIPS = {"clip_grad_norm_": "clip_grad_by_norm", "clip_grad_value_": "clip_grad_by_value"}
_IMPORTS = {"from apex.booster import Booster", "from apex.booster.mixed_precision import FP16ApexMixedPrecision"}


def convert(code: Code) -> Edits:
    """Return the edits that make a file use the Booster, or no edits if one place cannot be rewritten."""
    edits, uses = Edits(), [use for use in code.uses("apex.amp") if use.name.count(".") == 2 and use.last in _REWRITES]
    for use in uses:
        if code.has_fallback(use):
            code.refuse(use.node, "fallback", name=code.text(use.node))
        else:
            _REWRITES[use.last](code, edits, use, uses)
    return Edits() if code.refusals else edits


def _boost(code: Code, edits: Edits, use: Use, _: list[Use]) -> None:
    """Replace `amp.initialize` by a Booster and `booster.boost`."""
    call = use.call or use.node
    statement, arguments = code.statement(call), bound(call, INITIALIZE) if isinstance(call, cst.Call) else None
    target = statement.targets[0].target if isinstance(statement, cst.Assign) and statement.value is call else None
    if arguments is None or "models" not in arguments or target is None:
        problem = "not `model, optimizer = amp.initialize(...)`"
        return code.refuse(call, "call-form", function="amp.initialize", problem=problem)
    model, *optimizer = [arguments.pop(name).value for name in ("models", "optimizers") if name in arguments]
    texts = [code.text(argument) for argument in (model, *optimizer) if literal(argument) is not None]
    enabled = arguments.pop("enabled", None)
    if enabled is not None and literal(enabled.value) is not True:
        value = code.text(enabled.value)
        return code.refuse(enabled, "argument", name="enabled", value=value, function="amp.initialize")
    targets = code.parts(target)
    taken = [name for name in ("booster", "Booster") if code.is_taken(name)]
    if taken:
        return code.refuse(call, "names-taken", names=" and ".join(taken))
    if len(targets) != len(texts) or any(
        isinstance(argument, cst.List | cst.Tuple) for argument in (model, *optimizer)
    ):
        return code.refuse(call, "several-models")
    level = [code.text(arguments.pop("opt_level").value)] if "opt_level" in arguments else []
    options = ", ".join([*level, *(f"{name}={code.text(arg.value)}" for name, arg in arguments.items())])
    precision = f"mixed_precision=FP16ApexMixedPrecision({options})"
    edits.replaced[statement] = [
        f"booster = Booster(next({texts[0]}.parameters()).device, {precision})",
        f"{', '.join(targets)}, *_ = booster.boost({', '.join(texts)})",
    ]
    edits.needed |= _IMPORTS
    return None


def _backward(code: Code, edits: Edits, use: Use, uses: list[Use]) -> None:
    """Replace `amp.scale_loss` by `booster.backward`, or by `optimizer.backward` if it has further arguments.

    `optimizer.backward` also serves in functions that cannot see the variable `booster`.
    """
    backward = backward_pass(code, use)
    if backward is None:
        return
    optimizer, loss = backward.optimizers[0], code.text(backward.loss)
    options = [*backward.arguments, *([f"loss_id={backward.loss_id}"] if backward.loss_id != "0" else [])]
    starts = [code.function(start.node) for start in uses if start.last == "initialize"]
    sees_booster = any(function in (None, code.function(use.node)) for function in starts)
    line = f"{optimizer}.backward({', '.join([loss, *options])})"
    if sees_booster and not options:
        line = f"booster.backward({loss}, {optimizer})"
    edits.replaced[backward.statement] = [line]
    if len(backward.optimizers) > 1:
        code.refuse(use.node, "several-models")


def _clip(code: Code, edits: Edits, use: Use, _: list[Use]) -> None:
    """Replace clipping of `amp.master_params` by the optimizer's method, and other uses by `optimizer.parameters`."""
    if use.call is None:
        return
    optimizer, outer = code.text(use.call.args[0].value), code.parent(code.parent(use.call))
    name = _CLIPS.get(code.called(outer)) if isinstance(outer, cst.Call) and outer.args[0].value is use.call else None
    if name is None or len(outer.args) < 2:
        edits.expressions[use.call] = f"{optimizer}.parameters"
    else:
        func: Node = cst.parse_expression(f"{optimizer}.{name}")
        edits.expressions[outer] = lambda updated: updated.with_changes(func=func, args=updated.args[1:])


_REWRITES = {"initialize": _boost, "scale_loss": _backward, "master_params": _clip}  # by function of apex.amp
