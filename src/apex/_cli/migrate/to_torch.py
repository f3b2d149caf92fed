"""From apex to torch: amp to autocast and GradScaler, the rest by the table of counterparts."""

from __future__ import annotations

import libcst as cst
from libcst import matchers as m

from .code import Code, Node, Use
from .edits import Edits
from .passes import Backward, Forward, backward_pass
from .rules import (
    COUNTERPARTS,
    INITIALIZE,
    LEVELS,
    SCALING,
    WITHOUT_EFFECT,
    bound,
    code_of,
    exchanged,
    literal,
    matching,
)

_KNOWN = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict", "disable_casts")


def convert(code: Code, device: str) -> Edits:
    """What makes a file use torch alone, as far as it can."""
    edits, torch, amp = Edits(), code.imported_as("torch"), list[Use]()
    for use in code.uses("apex"):
        if use.name.startswith("apex.amp"):
            amp.append(use)
        else:
            _exchange(code, edits, use, torch)
    refused = len(code.refusals)
    changes = AmpToTorch(code, device, torch, amp).convert() if amp else Edits()
    if len(code.refusals) == refused:
        edits.update(changes)
    if edits:
        edits.needed.add("import torch" if torch == "torch" else f"import torch as {torch}")
    return edits


def _exchange(code: Code, edits: Edits, use: Use, torch: str) -> None:
    """A constructor or a function of apex by torch's."""
    name = f"{use.name.split('.')[1]}.{use.last}"
    choices = COUNTERPARTS.get(name, ())
    choice = matching(use.call, name, choices) if use.call is not None and choices else None
    if not choices or (use.call is None and not choices[0].bare) or any(map(code.is_taken, choices[0].own)):
        code.refuse(use.node, "no-equivalent", name=code.text(use.node))
    elif code.has_fallback(use):
        code.refuse(use.node, "fallback", name=code.text(use.node))
    elif isinstance(choice, tuple):
        code.refuse(use.node, "argument", name=choice[0], value=choice[1], function=use.last)
    elif choice is None:
        edits.expressions[use.node] = f"{torch}.{choices[0].name}"
    else:
        edits.expressions[use.call] = lambda call: exchanged(call, name, choice, torch)


class AmpToTorch:
    """The amp code of a file, rewritten together or not at all."""

    def __init__(self, code: Code, device: str, torch: str, uses: list[Use]) -> None:
        self._code, self._device, self._torch = code, device, torch
        self._uses = {name: [use for use in uses if use.name == f"apex.amp.{name}"] for name in _KNOWN}
        self._others = [use for use in uses if use.name.removeprefix("apex.amp.") not in _KNOWN or use.call is None]
        self._edits = Edits()
        # What amp.initialize asks for.
        self._level, self._is_scaled = "O1", True
        self._dtype: str | None = "float16"
        self._enabled: list[str] = []
        self._scaling: list[str] = []
        self._steps: dict[Node, list[Node]] = {}  # by the block that they are in

    def convert(self) -> Edits:
        code, uses, refused = self._code, self._uses, len(self._code.refusals)
        for use in self._others:
            registers = use.last.startswith("register_") or use.last.endswith("_function")
            code.refuse(use.node, "registration" if registers else "amp-internals", name=code.text(use.node))
        for use in (*uses["initialize"], *uses["scale_loss"]):
            if code.has_fallback(use):
                code.refuse(use.node, "fallback", name=code.text(use.node))
        both = [use for use in code.uses("torch.amp", "torch.cuda.amp") if use.last in ("autocast", "GradScaler")]
        if both:
            code.refuse(both[0].node, "both")
        spread = [use for name in _KNOWN[1:] for use in uses[name]]
        if not uses["initialize"] and spread:
            code.refuse(spread[0].node, "initialize-elsewhere")
        if uses["initialize"] and not uses["scale_loss"]:
            code.refuse(uses["initialize"][0].node, "scale-loss-elsewhere")
        if len(uses["initialize"]) > 1:
            code.refuse(uses["initialize"][1].node, "several-initialize")
        for use in uses["initialize"]:
            self._read(use)
        backwards = [found for use in uses["scale_loss"] if (found := backward_pass(code, use)) is not None]
        functions = [code.function(each.statement) for each in backwards]
        for place, each in enumerate(backwards):
            if functions[place] in functions[:place] or each.loss_id != "0":
                code.refuse(each.statement, "several-losses")
        if len(code.refusals) == refused and uses["initialize"]:
            self._rewrite(uses["initialize"][0].call, backwards)
        return self._edits

    def _read(self, use: Use) -> None:
        """Reads the arguments of amp.initialize."""
        code = self._code
        given = None if use.call is None else bound(use.call, INITIALIZE)
        if given is None or "models" not in given:
            return code.refuse(
                use.node, "call-form", function="amp.initialize", problem="arguments are not written out"
            )
        for name, arg in given.items():
            value, text = literal(arg.value), code.text(arg.value)
            tail = {"half": "float16"}.get(text.rpartition(".")[2], text.rpartition(".")[2])
            if name in ("models", "optimizers", *WITHOUT_EFFECT) or value is None or (name, value) == ("num_losses", 1):
                continue
            if name in SCALING:
                self._scaling.append(f"{SCALING[name]}={text}")
            elif name == "enabled":
                self._enabled += [] if value is True else [text]
            elif name == "opt_level" and value in LEVELS:
                self._level, self._dtype, self._is_scaled = str(value), LEVELS[str(value)], value == "O1"
            elif name == "patch_torch_functions_type" and tail in ("float16", "bfloat16"):
                self._dtype = tail
            elif name == "loss_scale" and value in ("dynamic", 1.0, "1.0"):
                self._is_scaled = value == "dynamic"
            elif value is ...:
                code.refuse(arg, "not-literal", name=name, value=text)
            else:
                rule = {"opt_level": "opt-level", "num_losses": "several-losses"}.get(name, "argument")
                code.refuse(arg, rule, name=name, value=text, function="amp.initialize")
        return None

    def _rewrite(self, call: Node, backwards: list[Backward]) -> None:
        code, edits = self._code, self._edits
        statement = code.statement(call)
        if not isinstance(statement, cst.Assign) or len(statement.targets) > 1 or statement.value is not call:
            return code.refuse(call, "call-form", function="amp.initialize", problem="its result is not assigned")
        outermost = self._conditions(statement)
        state = [*self._uses["state_dict"], *self._uses["load_state_dict"]]
        if self._enabled and not self._is_scaled:
            code.refuse(call, "conditional", problem=f"{self._level} has no loss scale that could say")
        if state and not self._is_scaled:
            code.refuse(state[0].node, "no-loss-scale", level=self._level)
        steps = self._find_steps(backwards) if self._is_scaled else []
        for other in code.method_calls("backward") if self._is_scaled else []:
            if not self._is_alternative(other, backwards):
                code.refuse(other, "several-losses")
        wrapped = {} if self._dtype is None else self._cast(statement, backwards, steps)
        users = [*(each.statement for each in backwards), *steps, *(use.node for use in state)]
        users += wrapped if self._enabled else []  # where the scaler is asked whether it is enabled
        scaler, is_global = self._scaler_name(statement, users)
        if is_global and (self._enabled or code.end_of_imports() is None):
            code.refuse(call, "conditional", problem="a model runs in another function")
        if self._dtype is not None:
            enabled = f", enabled={scaler}.is_enabled()" if self._enabled else ""
            header = f'{self._torch}.autocast("{self._device}", dtype={self._torch}.{self._dtype}{enabled})'
            edits.wrapped = {first: (last, header) for first, last in wrapped.items()}
        for each in backwards:
            loss = code.text(each.loss)
            plain = loss if isinstance(each.loss, cst.Name | cst.Attribute | cst.Subscript | cst.Call) else f"({loss})"
            scaled = f"{scaler}.scale({loss})" if self._is_scaled else plain
            edits.replaced[each.statement] = [f"{scaled}.backward({', '.join(each.arguments)})"]
        for use in self._uses["master_params"]:
            groups = f"{code.text(use.call.args[0].value)}.param_groups"
            edits.expressions[use.call] = f'(p for group in {groups} for p in group["params"])'
        for use in self._uses["disable_casts"]:
            edits.expressions[use.call] = f'{self._torch}.autocast("{self._device}", enabled=False)'
        for use in state:
            edits.expressions[use.node] = f"{scaler}.{use.last}"
        made = []
        if self._is_scaled:
            self._step_and_unscale(backwards, scaler)
            flag = f"enabled={' and '.join(self._enabled)}" if self._enabled else ""
            flag = f"enabled=bool({flag[8:]})" if outermost is not None else flag
            arguments = ", ".join([f'"{self._device}"', *self._scaling, *filter(None, [flag])])
            made = [f"{scaler} = {self._torch}.amp.GradScaler({arguments})"]
        if is_global and made:
            edits.after[code.end_of_imports()] = [f"\n{made.pop()}"]
        if outermost is not None and made:
            edits.before[outermost] = [made.pop()]
        if outermost is not None and code.members(outermost.body) == [statement] and not outermost.orelse:
            edits.replaced[outermost] = []
        edits.replaced[statement] = lambda line: [*_assignment(line.body[0]), *made]
        return None

    def _conditions(self, statement: Node) -> Node | None:
        """Notes what the `if` statements around amp.initialize test; returns the outermost of them."""
        code, outermost = self._code, None
        for block, _ in code.levels(statement):
            holder = code.parent(block)
            if isinstance(holder, cst.If) and "__name__" in code.reads(holder.test):
                break
            if holder is None or isinstance(holder, cst.FunctionDef):
                break
            is_plain = isinstance(holder, cst.If) and not isinstance(code.parent(holder), cst.If)
            if not is_plain or code.find(holder.test, m.Call()):
                code.refuse(statement, "conditional", problem=f"at line {code.line(holder)}")
                break
            test, outermost = code.text(holder.test), holder
            self._enabled.insert(0, f"({test})" if isinstance(holder.test, cst.BooleanOperation) else test)
        return outermost

    def _is_alternative(self, call: Node, backwards: list[Backward]) -> bool:
        """Whether a backward pass is a scaled one, or runs where the scaler is off and that one does not."""
        code, statements = self._code, [each.statement for each in backwards]
        for each in code.ancestors(call):
            if each in statements:
                return True
            if isinstance(each, cst.If) and any(code.inside(statement, each) for statement in statements):
                return bool({code.text(each.test), f"({code.text(each.test)})"} & set(self._enabled))
        return False

    def _scaler_name(self, statement: Node, users: list[Node]) -> tuple[str, bool]:
        """The variable for the scaler, of the function, of `self` or, which the second result says, of the module."""
        code = self._code
        name = next((name for name in ("scaler", "grad_scaler") if not code.is_taken(name)), None)
        if name is None:
            code.refuse(statement, "names-taken", names="scaler and grad_scaler")
        outer = code.function(statement)
        if outer is None or all(code.inside(each, outer) for each in users):
            return str(name), False
        classes = [[up for up in code.ancestors(each) if isinstance(up, cst.ClassDef)] for each in (statement, *users)]
        if all(each and each[-1] is classes[0][-1] for each in classes):
            return f"self.{name}", False
        return str(name), True

    def _cast(self, start: Node, backwards: list[Backward], steps: list[Node]) -> dict[Node, Node]:
        """What runs a model and belongs under autocast: first statements, and the last ones by them."""
        code, wrapped, target = self._code, dict[Node, Node](), start.targets[0].target
        given = bound(start.value, INITIALIZE) or {}
        returned = target.elements[0].value if isinstance(target, cst.Tuple) and "optimizers" in given else target
        forward = Forward(code, {*code.parts(given["models"].value), *code.parts(returned)})
        for each in backwards:
            runs = forward.before(each, start)
            if not runs or forward.runs_model(each.loss):
                code.refuse(each.statement, "forward-elsewhere")
            wrapped |= dict(runs)
        for call in filter(forward.is_call, code.calls):
            earlier = code.function(call) is code.function(start) and code.position(call) < code.position(start)
            if not earlier and not forward.is_covered(call):
                first, last = forward.around(call, [*(each.statement for each in backwards), *steps])
                wrapped[first] = last
        return wrapped

    def _find_steps(self, backwards: list[Backward]) -> list[Node]:
        """Steps of the optimizers of these losses."""
        code = self._code
        optimizers = {name for each in backwards for name in each.optimizers}
        steps = code.method_calls("step", *optimizers)
        for name in optimizers - {code.text(step.func.value) for step in steps}:
            code.refuse(backwards[0].statement, "step-elsewhere", optimizer=name)
        for step in steps:
            self._steps.setdefault(code.block(code.statement(step)), []).append(step)
            if step.args or not code.is_statement(step) or (len(optimizers) > 1 and len(self._steps) > 1):
                code.refuse(step, "step-form", optimizer=code.text(step.func.value))
        return steps

    def _step_and_unscale(self, backwards: list[Backward], scaler: str) -> None:
        """Steps by the scaler, which is then updated; unscales gradients before something else looks at them."""
        code, edits = self._code, self._edits
        for steps in self._steps.values():
            names = [code.text(step.func.value) for step in steps]
            since = 0
            for place, step in enumerate(steps):
                edits.expressions[step] = f"{scaler}.step({names[place]})"
                if place + 1 == len(steps) or names[place + 1] in names[since : place + 1]:
                    edits.after[code.statement(step)] = [f"{scaler}.update()"]
                    since = place + 1
        clips = [call for call in code.calls if code.called(call).startswith("clip_grad")]
        reads = code.find(code.module, m.Attribute(attr=m.Name("grad")))
        reads = [each for each in reads if not m.matches(code.parent(each), m.Call(func=each))]  # autograd.grad(...)
        unscaled = set()
        for node in sorted([*clips, *reads, *(use.node for use in self._uses["master_params"])], key=code.position):
            statement, block = self._unscale_place(node, backwards)
            if statement is not None and block not in unscaled:
                unscaled.add(block)
                exits = code.find(block, m.Continue() | m.Break() | m.Return())
                last = code.position(self._steps[block][-1])
                if any(code.position(statement) < code.position(each) < last for each in exits):
                    code.refuse(node, "gradients")  # without `update`, a second `unscale_` raises
                stepped = dict.fromkeys(code.text(step.func.value) for step in self._steps[block])
                edits.before[statement] = [f"{scaler}.unscale_({name})" for name in stepped]

    def _unscale_place(self, node: Node, backwards: list[Backward]) -> tuple[Node, Node]:
        """The statement to unscale gradients before, and the block with the step; None if they need not be."""
        code, levels = self._code, list(self._code.levels(node))
        losses = [each.statement for each in backwards if code.function(each.statement) is code.function(node)]
        for block, statement in levels:
            members = code.members(block)
            here = members.index(statement)
            with_loss = [place for place, each in enumerate(members) if any(code.inside(loss, each) for loss in losses)]
            steps = [members.index(code.statement(step)) for step in self._steps.get(block, [])]
            if any(place >= here for place in with_loss) or any(place < here for place in steps):
                return (
                    None,
                    None,
                )  # before the backward pass, in another branch than it, or after the step, which unscales
            if with_loss or steps:
                after = next((outer for outer, _ in levels if outer in self._steps), None)
                if after is None or code.in_loop(block, after):
                    break
                return statement, after
        code.refuse(node, "gradients")
        return None, None


def _assignment(statement: cst.Assign) -> list[str]:
    """`net, optimizer = amp.initialize(model, optimizer)` without amp: `net = model`."""
    given = bound(statement.value, INITIALIZE) or {}  # type: ignore[arg-type]
    values: list[Node] = [given[name].value for name in ("models", "optimizers") if name in given]
    values = values if literal(values[-1]) is not None else values[:1]
    target: Node = statement.targets[0].target
    targets = (
        [each.value for each in target.elements] if isinstance(target, cst.Tuple) and len(values) > 1 else [target]
    )
    if len(targets) != len(values):
        return [f"{code_of(target)} = {', '.join(map(code_of, values))}"]
    pairs = [(code_of(left), code_of(right)) for left, right in zip(targets, values, strict=True)]
    flat = str.maketrans("", "", "[]() \n")
    pairs = [(left, right) for left, right in pairs if left.translate(flat) != right.translate(flat)]
    return [" = ".join(", ".join(side) for side in zip(*pairs, strict=True))] if pairs else []
