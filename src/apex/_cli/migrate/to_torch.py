"""From apex to torch: amp becomes autocast and GradScaler, everything else its entry in the table of counterparts."""

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
    """Return the edits that replace apex by torch. The amp code is left out if one place of it is refused."""
    edits, torch, amp_uses = Edits(), code.imported_as("torch"), list[Use]()
    for use in code.uses("apex"):
        if use.name.startswith("apex.amp"):
            amp_uses.append(use)
        else:
            _exchange(code, edits, use, torch)
    refused = len(code.refusals)
    amp_edits = AmpToTorch(code, device, torch, amp_uses).convert() if amp_uses else Edits()
    if len(code.refusals) == refused:
        edits.update(amp_edits)
    if edits:
        edits.needed.add("import torch" if torch == "torch" else f"import torch as {torch}")
    return edits


def _exchange(code: Code, edits: Edits, use: Use, torch: str) -> None:
    """Replace a class or function of apex by torch's counterpart, or refuse."""
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
    """A rewrite of a file's apex.amp code to torch.amp, as a whole or not at all."""

    def __init__(self, code: Code, device: str, torch: str, uses: list[Use]) -> None:
        self._code, self._device, self._torch = code, device, torch
        self._uses = {name: [use for use in uses if use.name == f"apex.amp.{name}"] for name in _KNOWN}
        self._others = [use for use in uses if use.name.removeprefix("apex.amp.") not in _KNOWN or use.call is None]
        self._edits = Edits()
        # Settings from the arguments of amp.initialize and from the `if` statements around it.
        self._level, self._is_scaled = "O1", True
        self._dtype: str | None = "float16"
        self._enabled: list[str] = []
        self._scaling: list[str] = []
        self._steps: dict[Node, list[Node]] = {}  # calls of optimizers' `step`, by the block that contains them

    def convert(self) -> Edits:
        """Return the edits; they are incomplete if a place was refused."""
        code, uses, refused = self._code, self._uses, len(self._code.refusals)
        starts, losses = uses["initialize"], uses["scale_loss"]
        for use in self._others:
            registers = use.last.startswith("register_") or use.last.endswith("_function")
            code.refuse(use.node, "registration" if registers else "amp-internals", name=code.text(use.node))
        torch_uses = [use for use in code.uses("torch.amp", "torch.cuda.amp") if use.last in ("autocast", "GradScaler")]
        refusals = {
            "fallback": [use for use in (*starts, *losses) if code.has_fallback(use)],
            "both": torch_uses[:1],
            "initialize-elsewhere": [] if starts else [use for name in _KNOWN[1:] for use in uses[name]][:1],
            "scale-loss-elsewhere": [] if losses else starts[:1],
            "several-initialize": starts[1:2],
        }
        for rule, refused_uses in refusals.items():
            for use in refused_uses:
                code.refuse(use.node, rule, name=code.text(use.node))
        for use in starts:
            self._read(use)
        backwards = [backward for use in losses if (backward := backward_pass(code, use)) is not None]
        functions = [code.function(backward.statement) for backward in backwards]
        for index, backward in enumerate(backwards):
            if functions[index] in functions[:index] or backward.loss_id != "0":
                code.refuse(backward.statement, "several-losses")
        if len(code.refusals) == refused and starts:
            self._rewrite(starts[0].call, backwards)
        return self._edits

    def _read(self, use: Use) -> None:
        """Read the arguments of amp.initialize into the settings, or refuse them."""
        code = self._code
        arguments = None if use.call is None else bound(use.call, INITIALIZE)
        if arguments is None or "models" not in arguments:
            problem = "arguments are not written out"
            return code.refuse(use.node, "call-form", function="amp.initialize", problem=problem)
        for name, arg in arguments.items():
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
        """Collect the edits of all amp code. `call` is the call of amp.initialize."""
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
        users = [*(backward.statement for backward in backwards), *steps, *(use.node for use in state)]
        users += wrapped if self._enabled else []  # autocast is then written with `enabled=scaler.is_enabled()`
        scaler, is_global = self._scaler_name(statement, users)
        if is_global and (self._enabled or code.end_of_imports() is None):
            code.refuse(call, "conditional", problem="a model runs in another function")
        if self._dtype is not None:
            enabled = f", enabled={scaler}.is_enabled()" if self._enabled else ""
            header = f'{self._torch}.autocast("{self._device}", dtype={self._torch}.{self._dtype}{enabled})'
            edits.wrapped = {first: (last, header) for first, last in wrapped.items()}
        for backward in backwards:
            loss, kinds = code.text(backward.loss), cst.Name | cst.Attribute | cst.Subscript | cst.Call
            plain = loss if isinstance(backward.loss, kinds) else f"({loss})"
            scaled = f"{scaler}.scale({loss})" if self._is_scaled else plain
            edits.replaced[backward.statement] = [f"{scaled}.backward({', '.join(backward.arguments)})"]
        for use in self._uses["master_params"]:
            groups = f"{code.text(use.call.args[0].value)}.param_groups"
            edits.expressions[use.call] = f'(p for group in {groups} for p in group["params"])'
        for use in self._uses["disable_casts"]:
            edits.expressions[use.call] = f'{self._torch}.autocast("{self._device}", enabled=False)'
        for use in state:
            edits.expressions[use.node] = f"{scaler}.{use.last}"
        new_scaler = []  # the line that makes the scaler, until it has been put somewhere
        if self._is_scaled:
            self._step_and_unscale(backwards, scaler)
            flag = " and ".join(self._enabled)
            flags = [f"enabled={flag}" if outermost is None else f"enabled=bool({flag})"] if flag else []
            arguments = ", ".join([f'"{self._device}"', *self._scaling, *flags])
            new_scaler = [f"{scaler} = {self._torch}.amp.GradScaler({arguments})"]
        if is_global and new_scaler:
            edits.after[code.end_of_imports()] = [f"\n{new_scaler.pop()}"]
        if outermost is not None and new_scaler:
            edits.before[outermost] = [new_scaler.pop()]
        if outermost is not None and code.members(outermost.body) == [statement] and not outermost.orelse:
            edits.replaced[outermost] = []
        edits.replaced[statement] = lambda line: [*_assignment(line.body[0]), *new_scaler]
        return None

    def _conditions(self, statement: Node) -> Node | None:
        """Add the tests of the `if` statements around amp.initialize to the settings; return the outermost `if`."""
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
        """Return whether a backward pass is a scaled one, or the other branch of an `if` that tests amp's flag."""
        code, statements = self._code, [backward.statement for backward in backwards]
        for outer in code.ancestors(call):
            if outer in statements:
                return True
            if isinstance(outer, cst.If) and any(code.inside(statement, outer) for statement in statements):
                return bool({code.text(outer.test), f"({code.text(outer.test)})"} & set(self._enabled))
        return False

    def _scaler_name(self, statement: Node, users: list[Node]) -> tuple[str, bool]:
        """Return the name of the scaler's variable, and whether it must be a global of the module.

        It is a local variable if amp.initialize and all `users` are in one function, an attribute of `self` if they
        are in one class.
        """
        code = self._code
        name = next((name for name in ("scaler", "grad_scaler") if not code.is_taken(name)), None)
        if name is None:
            code.refuse(statement, "names-taken", names="scaler and grad_scaler")
        outer = code.function(statement)
        if outer is None or all(code.inside(user, outer) for user in users):
            return str(name), False
        chains = [[up for up in code.ancestors(node) if isinstance(up, cst.ClassDef)] for node in (statement, *users)]
        if all(classes and classes[-1] is chains[0][-1] for classes in chains):
            return f"self.{name}", False
        return str(name), True

    def _cast(self, start: Node, backwards: list[Backward], steps: list[Node]) -> dict[Node, Node]:
        """Return the runs of statements to put under autocast: each run's first statement maps to its last."""
        code, wrapped, target = self._code, dict[Node, Node](), start.targets[0].target
        arguments = bound(start.value, INITIALIZE) or {}
        returned = target.elements[0].value if isinstance(target, cst.Tuple) and "optimizers" in arguments else target
        forward = Forward(code, {*code.parts(arguments["models"].value), *code.parts(returned)})
        for backward in backwards:
            runs = forward.before(backward, start)
            if not runs or forward.runs_model(backward.loss):
                code.refuse(backward.statement, "forward-elsewhere")
            wrapped |= dict(runs)
        for call in filter(forward.is_call, code.calls):
            earlier = code.function(call) is code.function(start) and code.position(call) < code.position(start)
            if not earlier and not forward.is_covered(call):
                first, last = forward.around(call, [*(backward.statement for backward in backwards), *steps])
                wrapped[first] = last
        return wrapped

    def _find_steps(self, backwards: list[Backward]) -> list[Node]:
        """Return the calls of `step` of the optimizers that the backward passes name; refuse unknown forms."""
        code = self._code
        optimizers = {name for backward in backwards for name in backward.optimizers}
        steps = code.method_calls("step", *optimizers)
        for name in optimizers - {code.text(step.func.value) for step in steps}:
            code.refuse(backwards[0].statement, "step-elsewhere", optimizer=name)
        for step in steps:
            self._steps.setdefault(code.block(code.statement(step)), []).append(step)
            if step.args or not code.is_statement(step) or (len(optimizers) > 1 and len(self._steps) > 1):
                code.refuse(step, "step-form", optimizer=code.text(step.func.value))
        return steps

    def _step_and_unscale(self, backwards: list[Backward], scaler: str) -> None:
        """Step through the scaler and update it, and unscale gradients before other code reads them."""
        code, edits = self._code, self._edits
        for steps in self._steps.values():
            names = [code.text(step.func.value) for step in steps]
            updated = 0  # steps before the last `update`
            for index, step in enumerate(steps, 1):
                edits.expressions[step] = f"{scaler}.step({names[index - 1]})"
                if index == len(steps) or names[index] in names[updated:index]:
                    edits.after[code.statement(step)] = [f"{scaler}.update()"]
                    updated = index
        clips = [call for call in code.calls if code.called(call).startswith("clip_grad")]
        reads = code.find(code.module, m.Attribute(attr=m.Name("grad")))
        reads = [read for read in reads if not m.matches(code.parent(read), m.Call(func=read))]  # autograd.grad(...)
        unscaled = set()
        for node in sorted([*clips, *reads, *(use.node for use in self._uses["master_params"])], key=code.position):
            statement, block = self._where_to_unscale(node, backwards)
            if statement is not None and block not in unscaled:
                unscaled.add(block)
                exits = code.find(block, m.Continue() | m.Break() | m.Return())
                last = code.position(self._steps[block][-1])
                if any(code.position(statement) < code.position(leave) < last for leave in exits):
                    code.refuse(node, "gradients")  # without `update`, a second `unscale_` raises
                stepped = dict.fromkeys(code.text(step.func.value) for step in self._steps[block])
                edits.before[statement] = [f"{scaler}.unscale_({name})" for name in stepped]

    def _where_to_unscale(self, node: Node, backwards: list[Backward]) -> tuple[Node, Node]:
        """Return the statement before which to unscale gradients for `node`, and the block that has the step.

        Both are None if the gradients need not be unscaled: `node` is before the backward pass, in another branch, or
        after the step, which unscales them itself.
        """
        code, levels = self._code, list(self._code.levels(node))
        losses = [backward.statement for backward in backwards]
        losses = [loss for loss in losses if code.function(loss) is code.function(node)]
        for block, statement in levels:
            members = code.members(block)
            here = members.index(statement)
            passes = [i for i, member in enumerate(members) if any(code.inside(loss, member) for loss in losses)]
            steps = [members.index(code.statement(step)) for step in self._steps.get(block, [])]
            if any(index >= here for index in passes) or any(index < here for index in steps):
                return None, None
            if passes or steps:
                after = next((outer for outer, _ in levels if outer in self._steps), None)
                if after is None or code.in_loop(block, after):
                    break
                return statement, after
        code.refuse(node, "gradients")
        return None, None


def _assignment(statement: cst.Assign) -> list[str]:
    """Return `net, optimizer = amp.initialize(model, optimizer)` without amp: `net = model`."""
    arguments = bound(statement.value, INITIALIZE) or {}  # type: ignore[arg-type]
    values: list[Node] = [arguments[name].value for name in ("models", "optimizers") if name in arguments]
    values = values if literal(values[-1]) is not None else values[:1]
    target: Node = statement.targets[0].target
    several = isinstance(target, cst.Tuple) and len(values) > 1
    targets = [element.value for element in target.elements] if several else [target]
    if len(targets) != len(values):
        return [f"{code_of(target)} = {', '.join(map(code_of, values))}"]
    pairs = [(code_of(left), code_of(right)) for left, right in zip(targets, values, strict=True)]
    flat = str.maketrans("", "", "[]() \n")
    pairs = [(left, right) for left, right in pairs if left.translate(flat) != right.translate(flat)]
    return [" = ".join(", ".join(side) for side in zip(*pairs, strict=True))] if pairs else []
