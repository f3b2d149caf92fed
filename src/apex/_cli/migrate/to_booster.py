"""From apex.amp to the Booster, whose FP16ApexMixedPrecision calls apex.amp itself, at any opt level."""

from __future__ import annotations

import libcst as cst

from .code import Code, Node
from .edits import Edits
from .passes import backward_pass
from .rules import INITIALIZE, bound, literal

_CLIPS = {"clip_grad_norm_": "clip_grad_by_norm", "clip_grad_value_": "clip_grad_by_value"}
_IMPORTS = {"from apex.booster import Booster", "from apex.booster.mixed_precision import FP16ApexMixedPrecision"}


def convert(code: Code) -> Edits:
    """What makes a file use the Booster, or nothing if one place of it cannot be rewritten."""
    edits, uses = Edits(), [use for use in code.uses("apex.amp") if use.name.count(".") == 2]
    starts = [use.node for use in uses if use.last == "initialize"]
    for use in uses:
        if use.last in ("initialize", "scale_loss", "master_params") and code.has_fallback(use):
            code.refuse(use.node, "fallback", name=code.text(use.node))
        elif use.last == "initialize":
            _boost(code, edits, use.call or use.node)
        elif use.last == "scale_loss" and (found := backward_pass(code, use)) is not None:
            optimizer, loss = found.optimizers[0], code.text(found.loss)
            options = [*found.arguments, *([f"loss_id={found.loss_id}"] if found.loss_id != "0" else [])]
            visible = any(code.function(start) in (None, code.function(use.node)) for start in starts)
            line = f"{optimizer}.backward({', '.join([loss, *options])})"
            edits.replaced[found.statement] = [
                f"booster.backward({loss}, {optimizer})" if visible and not options else line
            ]
            if len(found.optimizers) > 1:
                code.refuse(use.node, "several-models")
        elif use.last == "master_params" and use.call is not None:
            _clip(code, edits, use.call)
    return Edits() if code.refusals else edits


def _boost(code: Code, edits: Edits, call: Node) -> None:
    statement, given = code.statement(call), bound(call, INITIALIZE) if isinstance(call, cst.Call) else None
    target = statement.targets[0].target if isinstance(statement, cst.Assign) and statement.value is call else None
    if given is None or "models" not in given or target is None:
        return code.refuse(
            call, "call-form", function="amp.initialize", problem="not `model, optimizer = amp.initialize(...)`"
        )
    model, *optimizer = [given.pop(name).value for name in ("models", "optimizers") if name in given]
    texts = [code.text(each) for each in (model, *optimizer) if literal(each) is not None]
    enabled = given.pop("enabled", None)
    if enabled is not None and literal(enabled.value) is not True:
        return code.refuse(
            enabled, "argument", name="enabled", value=code.text(enabled.value), function="amp.initialize"
        )
    targets = code.parts(target)
    taken = [name for name in ("booster", "Booster") if code.is_taken(name)]
    if taken:
        return code.refuse(call, "names-taken", names=" and ".join(taken))
    if len(targets) != len(texts) or any(isinstance(each, cst.List | cst.Tuple) for each in (model, *optimizer)):
        return code.refuse(call, "several-models")
    level = [code.text(given.pop("opt_level").value)] if "opt_level" in given else []
    options = ", ".join([*level, *(f"{name}={code.text(arg.value)}" for name, arg in given.items())])
    precision = f"mixed_precision=FP16ApexMixedPrecision({options})"
    edits.replaced[statement] = [
        f"booster = Booster(next({texts[0]}.parameters()).device, {precision})",
        f"{', '.join(targets)}, *_ = booster.boost({', '.join(texts)})",
    ]
    edits.needed |= _IMPORTS
    return None


def _clip(code: Code, edits: Edits, call: Node) -> None:
    """Clipping of master parameters by the optimizer; elsewhere its list of them."""
    optimizer, outer = code.text(call.args[0].value), code.parent(code.parent(call))
    name = _CLIPS.get(code.called(outer)) if isinstance(outer, cst.Call) and outer.args[0].value is call else None
    if name is None or len(outer.args) < 2:
        edits.expressions[call] = f"{optimizer}.parameters"
    else:
        func = cst.parse_expression(f"{optimizer}.{name}")
        edits.expressions[outer] = lambda updated: updated.with_changes(func=func, args=updated.args[1:])
