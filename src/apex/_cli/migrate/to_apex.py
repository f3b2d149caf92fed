"""From torch.amp to apex.amp: autocast and GradScaler become an opt level and amp.scale_loss."""

from __future__ import annotations

from collections.abc import Callable

import libcst as cst
from libcst import matchers as m

from .code import Code, Node, Use
from .edits import Edits
from .passes import Forward, wraps
from .rules import AUTOCAST, GRAD_SCALER, SCALING, bound, literal

PACKAGES = ("torch.amp", "torch.cuda.amp", "torch.cpu.amp")


def convert(code: Code) -> Edits:
    """What makes a file use apex.amp, or nothing if one place of it cannot be rewritten."""
    uses = [use for use in code.uses("torch") if use.name.startswith(PACKAGES) or use.name == "torch.autocast"]
    casts, scalers = ([use for use in uses if use.last == name] for name in ("autocast", "GradScaler"))
    if not casts and not scalers:
        return Edits()
    edits = TorchToAmp(code, casts, scalers).convert()
    edits.needed.add("from apex import amp")
    return Edits() if code.refusals else edits


class TorchToAmp:
    """The amp code of a file, rewritten together or not at all."""

    def __init__(self, code: Code, casts: list[Use], scalers: list[Use]) -> None:
        self._code, self._casts, self._scalers = code, casts, scalers
        self._edits = Edits()
        self._enabled: set[str] = set()  # expressions that switch casts and scaling on
        self._scaler = ""  # the variable that holds the GradScaler
        self._made: Node = None  # the statement that makes it
        # Variables that are assigned something made from `model.parameters()`: models, and the statement.
        self._optimizers: dict[str, list[tuple[list[str], Node]]] = {}
        for assign in code.find(
            code.module, m.Assign(targets=[m.AssignTarget()], value=m.Call(args=[m.AtLeastN(n=1)]))
        ):
            calls = code.find(assign.value.args[0], m.Call(func=m.Attribute(attr=m.Name("parameters"))))
            models = list(dict.fromkeys(code.text(call.func.value) for call in calls))
            if models:
                self._optimizers.setdefault(code.text(assign.targets[0].target), []).append((models, assign))

    def convert(self) -> Edits:
        code = self._code
        for use in code.uses("apex.amp"):
            if use.last in ("initialize", "scale_loss"):
                code.refuse(use.node, "both")
        for other in code.find(code.module, m.AssignTarget(target=m.Name("amp")) | m.Param(name=m.Name("amp"))):
            code.refuse(other, "names-taken", names="amp")
        for use in self._scalers[1:]:
            code.refuse(use.node, "several-scalers")
        options = self._read_scaler() if self._scalers else []
        dtypes = {found: use for use in self._casts if (found := self._uncast(use))}
        for found, use in list(dtypes.items())[1:]:
            code.refuse(use.node, "autocast-type", found=found)
        if not dtypes and not code.refusals:
            code.refuse((self._scalers or self._casts)[0].node, "autocast-elsewhere")
        if code.refusals:
            return self._edits
        dtype = next(iter(dtypes))
        if not self._scaler and dtype == "float16":
            code.refuse(self._casts[0].node, "autocast-only")
        options = [f'opt_level="{"O1" if dtype == "float16" else "O4"}"', *options]
        options += ['loss_scale="dynamic"'] if self._scaler and dtype == "bfloat16" else []
        optimizers = self._replace_scaler() if self._scaler else self._replace_backward()
        if optimizers and not code.refusals:
            self._initialize(optimizers, options)
        return self._edits

    def _read_scaler(self) -> list[str]:
        """What amp.initialize is told instead of the GradScaler."""
        code, use = self._code, self._scalers[0]
        self._made = code.statement(use.node)
        parameters = GRAD_SCALER if use.name.startswith(PACKAGES[1:]) else ["device", *GRAD_SCALER]
        given = None if use.call is None else bound(use.call, parameters)
        if (
            given is None
            or not m.matches(self._made, m.Assign(targets=[m.AssignTarget()]))
            or self._made.value is not use.call
        ):
            code.refuse(use.node, "call-form", function="GradScaler", problem="not `scaler = GradScaler(...)`")
            return []
        self._scaler = code.text(self._made.targets[0].target)
        self._enabled.add(code.text(given["enabled"].value) if "enabled" in given else "True")
        return [f"{ours}={code.text(given[theirs].value)}" for ours, theirs in SCALING.items() if theirs in given]

    def _uncast(self, use: Use) -> str | None:
        """The type that a `with autocast(...)` casts to; the block is replaced by what is in it."""
        code, call = self._code, use.call
        old = use.name.startswith(PACKAGES[1:])
        given = None if call is None else bound(call, ["enabled", "dtype", "cache_enabled"] if old else AUTOCAST)
        item = None if call is None else code.parent(call)
        if given is None or not isinstance(item, cst.WithItem):
            code.refuse(use.node, "autocast-form")
            return None
        enabled = code.text(given["enabled"].value) if "enabled" in given else "True"
        if enabled == "False":
            self._edits.expressions[call] = "amp.disable_casts()"
            return None
        self._enabled |= {enabled} - {f"{self._scaler}.is_enabled()"}
        device = literal(given["device_type"].value) if "device_type" in given else use.name.split(".")[1]
        found = {"cuda": "float16", "cpu": "bfloat16"}.get(str(device), "its device's type")
        found = code.text(given["dtype"].value).rpartition(".")[2] if "dtype" in given else found
        found = "float16" if found == "half" else found
        if found not in ("float16", "bfloat16"):
            code.refuse(use.node, "autocast-type", found=found)
            return None
        self._edits.unwrapped.setdefault(code.parent(item), set()).add(item)
        return found

    def _replace_scaler(self) -> list[str]:
        """Rewrites all uses of the scaler; returns the optimizers that it steps."""
        code, edits, scaler = self._code, self._edits, self._scaler
        edits.replaced[self._made] = []
        handled = [self._made.targets[0].target]
        steps = {
            call: code.text(call.args[0].value) for call in code.method_calls("step", scaler) if len(call.args) == 1
        }
        for call, optimizer in steps.items():
            edits.expressions[call] = f"{optimizer}.step()"
        unscales = code.method_calls("unscale_", scaler)
        gone = [*unscales, *(call for call in code.method_calls("update", scaler) if not call.args)]
        gone = [call for call in gone if code.is_statement(call)]
        edits.replaced |= {code.statement(call): [] for call in gone}
        scales = [call for call in code.method_calls("scale", scaler) if code.called_on(call) == "backward"]
        for place, call in enumerate(scales):
            function, backward = code.function(call), code.parent(code.parent(call))
            here = [name for step, name in steps.items() if code.function(step) is function] or list(steps.values())
            self._scale_loss(backward, call.args[0].value, list(dict.fromkeys(here)))
            if function in [code.function(each) for each in scales[:place]]:
                code.refuse(call, "several-losses")
        saves = [*code.method_calls("state_dict", scaler), *code.method_calls("load_state_dict", scaler)]
        edits.expressions |= {call.func: f"amp.{code.called(call)}" for call in saves}
        asks = [
            call for use in self._casts for call in code.find(use.call, m.Call()) if code.called(call) == "is_enabled"
        ]
        handled += [call.func.value for call in (*steps, *gone, *scales, *saves, *asks)]
        handled += self._without_parameter()
        for each in code.find(code.module, m.Name() | m.Attribute()):
            is_held = "." in scaler and isinstance(each, cst.Attribute) and each.attr.value == scaler.rpartition(".")[2]
            is_name = code.is_value(each) and (code.text(each) == scaler or is_held)
            if is_name and not any(each is other for other in handled):
                code.refuse(each, "scaler-use", use=code.text(code.statement(each)).strip().splitlines()[0])
        clips = [call for call in code.calls if code.called(call).startswith("clip_grad")]
        if clips and not unscales:
            code.refuse(clips[0], "gradients")
        return list(dict.fromkeys(steps.values()))

    def _without_parameter(self) -> list[Node]:
        """Functions of this file that are given the scaler go without; returns the names that go."""
        code, handled = self._code, list[Node]()
        for function in (each for functions in code.functions.values() for each in functions):
            calls = code.calls_of(function)
            places = [
                [code.text(arg.value) for arg in call.args].index(self._scaler)
                for call in calls
                if self._is_given(call)
            ]
            params = [each for each in function.params.params if each.name.value == self._scaler]
            if params and len(places) == len(calls):
                self._edits.expressions[function.params] = _without("params", function.params.params.index(params[0]))
                self._edits.expressions |= {call: _without("args", at) for call, at in zip(calls, places, strict=True)}
                handled += [params[0].name, *(call.args[at].value for call, at in zip(calls, places, strict=True))]
        return handled

    def _is_given(self, call: Node) -> bool:
        return any(self._code.text(arg.value) == self._scaler for arg in call.args)

    def _replace_backward(self) -> list[str]:
        """Without a scaler: rewrites backward passes in functions that step the optimizer, which is returned."""
        code = self._code
        steps = code.method_calls("step", *self._optimizers) if self._optimizers else []
        names = list({code.text(step.func.value) for step in steps})
        if len(names) != 1:
            code.refuse(self._casts[0].node, "optimizer-unknown", optimizer="the optimizer")
            return []
        for call in code.method_calls("backward"):
            if code.is_statement(call) and any(code.function(step) is code.function(call) for step in steps):
                self._scale_loss(call, call.func.value, names)
            else:
                code.refuse(call, "step-elsewhere", optimizer=names[0])
        return names

    def _scale_loss(self, call: Node, loss: Node, optimizers: list[str]) -> None:
        code, name = self._code, "amp_scaled_loss" if self._code.is_taken("scaled_loss") else "scaled_loss"
        of = optimizers[0] if len(optimizers) == 1 else f"[{', '.join(optimizers)}]"
        text = code.text(loss.with_changes(lpar=(), rpar=()))
        arguments = ", ".join(code.text(arg).rstrip(", \n") for arg in call.args)
        line = f"with amp.scale_loss({text}, {of}) as {name}:\n    {name}.backward({arguments})"
        self._edits.replaced[code.statement(call)] = [line]

    def _initialize(self, optimizers: list[str], options: list[str]) -> None:
        """Calls amp.initialize where models and optimizers are there."""
        code, node = self._code, (self._scalers or self._casts)[0].node
        found = [self._optimizers.get(name, []) for name in optimizers]
        places = [statement for each in found for _, statement in each]
        if any(len(each) != 1 for each in found) or len({code.block(place) for place in places}) > 1:
            return code.refuse(node, "optimizer-unknown", optimizer=" and ".join(optimizers))
        together = self._made is not None and code.block(self._made) is code.block(places[0])
        place = max([*places, *([self._made] if together else [])], key=code.position)
        flags = sorted(self._enabled - {"True"})  # a scaler where nothing is cast changes nothing
        if len(flags) > 1 or (flags and not together):
            return code.refuse(node, "not-literal", name="enabled", value=" and ".join(flags))
        models = list(dict.fromkeys(model for each in found for names, _ in each for model in names))
        self._check_models(models, place)
        sides = ", ".join(each[0] if len(each) == 1 else f"[{', '.join(each)}]" for each in (models, optimizers))
        options += [f"enabled={flag}" for flag in flags]
        self._edits.after[place] = [f"{sides} = amp.initialize({sides}, {', '.join(options)})"]
        return None

    def _check_models(self, models: list[str], place: Node) -> None:
        """Models are called under autocast only, not wrapped before `place` and not moved after it."""
        code, forward = self._code, Forward(self._code, set(models))
        forward.covered = set(self._edits.unwrapped)
        for call in code.calls:
            if forward.is_call(call) and not forward.is_covered(call):
                code.refuse(call, "outside-autocast", model=code.text(call.func))
            before = code.position(call) <= code.position(place)
            wrapped = (
                wraps(code, call)
                and code.called(call) != "compile"
                and code.assigns(code.statement(call)) & set(models)
            )
            moved = code.called(call) in ("to", "cuda") and code.text(getattr(call.func, "value", call)) in models
            if code.function(call) is code.function(place) and (wrapped if before else moved):
                change = "wrapped before the optimizer is made" if before else "moved after the optimizer is made"
                code.refuse(call, "model-order", model=models[0], change=change)


def _without(name: str, place: int) -> Callable[[Node], Node]:
    """What removes one of a call's arguments or of a function's parameters."""

    def change(updated: Node) -> Node:
        each = [*getattr(updated, name)]
        del each[place]
        if place == len(each) and each:
            each[-1] = each[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return updated.with_changes(**{name: each})

    return change
