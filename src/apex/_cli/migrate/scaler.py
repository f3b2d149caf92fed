"""The GradScaler of a file: its construction, the condition that enables it, and apex.amp's code for each use."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst
from libcst import matchers as m

from .casts import PACKAGES
from .code import Code, Node, Use
from .edits import Edits
from .rules import GRAD_SCALER, SCALING, bound
from .values import negated, parameters, passed_values, plain

_IS_NONE = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.Is(), comparator=m.Name("None"))])
_IS_NOT_NONE = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.IsNot(), comparator=m.Name("None"))])


class Scaler:
    """A GradScaler: the statement that makes it, the variables that hold it, and the condition that enables it."""

    def __init__(self, code: Code, edits: Edits, use: Use, amp: str) -> None:
        self._code, self._edits, self._amp = code, edits, amp
        self.made = code.statement(use.node)
        self.enabled, self.names, self.options = "True", set[str](), list[str]()
        self.steps: dict[Node, str] = {}  # calls of `scaler.step`, with the code of their optimizer
        self._handled: list[Node] = []  # uses of the scaler that an edit covers; others are refused
        self._is_none = False  # whether the variable is None if the scaler is off
        self._read(use)

    def _read(self, use: Use) -> None:
        """Read the arguments and the condition of `scaler = GradScaler(...)` and remove it, or refuse it."""
        code, made = self._code, self.made
        names = GRAD_SCALER if use.name.startswith(PACKAGES[1:]) else ["device", *GRAD_SCALER]
        arguments = None if use.call is None else bound(use.call, names)
        if arguments is None or not m.matches(made, m.Assign(targets=[m.AssignTarget()])):
            return self._refuse(use)
        flag = plain(code.text(arguments["enabled"].value)) if "enabled" in arguments else "True"
        conditions = [] if flag == "True" else [flag]
        if isinstance(made.value, cst.IfExp):
            other = made.value.orelse if made.value.body is use.call else made.value.body
            if not m.matches(other, m.Name("None")) or made.value.test is use.call:
                return self._refuse(use)
            test = plain(code.text(made.value.test))
            conditions.append(test if made.value.body is use.call else negated(test))
            self._is_none = True
        elif made.value is not use.call:
            return self._refuse(use)
        self.names.add(code.text(_target(made)))
        conditions += self._tests_around()
        if len(conditions) > 1:
            return self._refuse(use)
        self.enabled = conditions[0] if conditions else "True"
        self.options = [
            f"{ours}={code.text(arguments[theirs].value)}" for ours, theirs in SCALING.items() if theirs in arguments
        ]
        self._remove_assignments()
        return None

    def _refuse(self, use: Use) -> None:
        self._code.refuse(use.node, "call-form", function="GradScaler", problem="not `scaler = GradScaler(...)`")

    def _tests_around(self) -> list[str]:
        """Return the tests of the `if` statements that decide whether the scaler is made.

        An `if` decides it if the variable is None otherwise, or if nothing else is in the block.
        """
        code, tests = self._code, list[str]()
        for block, _ in code.levels(self.made):
            holder = code.parent(block)
            is_else = isinstance(holder, cst.Else)
            holder = code.parent(holder) if is_else else holder
            nones = self._other_assignments()
            if not isinstance(holder, cst.If) or "__name__" in code.reads(holder.test):
                break
            if not nones and code.members(block) != [self.made]:
                break
            test = plain(code.text(holder.test))
            tests.append(negated(test) if is_else else test)
            tests += [test] if isinstance(code.parent(holder), cst.If) else []  # an `elif` has two conditions
            self._is_none = self._is_none or bool(nones)
        return tests

    def _other_assignments(self) -> list[Node]:
        """Return the assignments to the scaler's variable except the one that makes the scaler."""
        code, name = self._code, self._code.text(_target(self.made))
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()]))
        return [assign for assign in assigns if assign is not self.made and code.text(_target(assign)) == name]

    def _remove_assignments(self) -> None:
        """Remove the assignments to the scaler's variable, and `if` statements that are empty without them."""
        code, edits = self._code, self._edits
        assigns = [self.made, *self._other_assignments()]
        for assign in assigns:
            if assign is not self.made and not m.matches(assign.value, m.Name("None")):
                code.refuse(assign, "several-scalers")
            edits.replaced[assign] = []
            self._handled.append(_target(assign))
        for assign in assigns:
            holder = code.parent(code.block(assign))
            holder = code.parent(holder) if isinstance(holder, cst.Else) else holder
            if not isinstance(holder, cst.If) or isinstance(holder.orelse, cst.If):
                continue
            blocks = [holder.body] if holder.orelse is None else [holder.body, holder.orelse.body]
            is_empty = all(member in edits.replaced for block in blocks for member in code.members(block))
            if is_empty and not code.find(holder.test, m.Call()) and not isinstance(code.parent(holder), cst.If):
                edits.replaced[holder] = []

    def means_enabled(self, text: str) -> bool:
        """Return whether an expression tests that the scaler exists or is enabled."""
        return any(text in (f"{name} is not None", f"{name}.is_enabled()", f"bool({name})") for name in self.names)

    def ignore(self, node: Node) -> None:
        """Treat uses of the scaler inside `node` as handled, because `node` is removed as a whole."""
        self._handled += self._code.find(node, m.Name() | m.Attribute())

    def follow_parameters(self) -> None:
        """Remove the scaler from calls of functions of this file, and from their parameters."""
        code, edits, before = self._code, self._edits, set[str]()
        functions = [function for same_name in code.functions.values() for function in same_name]
        while before != self.names:
            before = set(self.names)
            for function in functions:
                for param in parameters(function):
                    if self._receives_scaler(function, param):
                        self.names.add(param.name.value)
        for function in functions:
            kinds = {"params": function.params.params, "kwonly_params": function.params.kwonly_params}
            removed = {
                kind: [index for index, param in enumerate(params) if self._receives_scaler(function, param)]
                for kind, params in kinds.items()
            }
            if not any(removed.values()):
                continue
            edits.expressions[function.params] = _without(removed)
            self._handled += [kinds[kind][index].name for kind, indices in removed.items() for index in indices]
            for call in code.calls_of(function):
                indices = [index for index, arg in enumerate(call.args) if code.text(arg.value) in self.names]
                edits.expressions[call] = _without({"args": indices})
                self._handled += [call.args[index].value for index in indices]

    def _receives_scaler(self, function: Node, param: Node) -> bool:
        """Return whether every call of a function in this file passes the scaler for a parameter."""
        if param not in parameters(function):
            return False
        values = [value for value, _ in passed_values(self._code, function, param.name.value)]
        return bool(values) and all(value in self.names for value in values)

    def replace_uses(
        self, scale_loss: Callable[[Node, Node, list[str]], None], *, always_on: bool, as_casts: bool
    ) -> None:
        """Rewrite every use of the scaler.

        `always_on`: amp.initialize is called without `enabled`. `as_casts`: amp is on exactly when the scaler is.
        """
        code, edits = self._code, self._edits
        calls = [call for call in code.calls if self._is_method(call)]
        named = {name: [call for call in calls if code.called(call) == name] for name in map(code.called, calls)}
        self.steps = {call: code.text(call.args[0].value) for call in named.get("step", []) if len(call.args) == 1}
        for call, optimizer in self.steps.items():
            edits.expressions[call] = f"{optimizer}.step()"
        unscales, updates = named.get("unscale_", []), [call for call in named.get("update", []) if not call.args]
        removed = [call for call in (*unscales, *updates) if code.is_statement(call)]
        edits.replaced |= {code.statement(call): [] for call in removed}
        scales = [call for call in named.get("scale", []) if code.called_on(call) == "backward"]
        for index, call in enumerate(scales):
            function, backward = code.function(call), code.parent(code.parent(call))
            nearby = [name for step, name in self.steps.items() if code.function(step) is function]
            scale_loss(backward, call.args[0].value, list(dict.fromkeys(nearby or self.steps.values())))
            if function in [code.function(earlier) for earlier in scales[:index]]:
                code.refuse(call, "several-losses")
        saves = [*named.get("state_dict", []), *named.get("load_state_dict", [])]
        edits.expressions |= {call.func: f"{self._amp}.{code.called(call)}" for call in saves}
        reads = [call for call in named.get("get_scale", []) if not self._is_during_step(call, scales, updates)]
        scale = f"{self._amp}._amp_state.loss_scalers[0].loss_scale()"
        scale = scale if always_on else f"({scale} if {self._flag()} else 1.0)"
        edits.expressions |= dict.fromkeys(reads, scale)
        self._handled += [call.func.value for call in (*self.steps, *removed, *scales, *saves, *reads)]
        self._replace_tests(as_casts)
        self._refuse_others()
        clips = [call for call in code.calls if code.called(call).startswith("clip_grad")]
        if clips and not unscales:
            code.refuse(clips[0], "gradients")

    def _flag(self) -> str:
        """Return the expression that tells at run time whether amp is enabled."""
        return f"{self._amp}._amp_state.opt_properties.enabled"

    def _is_method(self, call: Node) -> bool:
        """Return whether a call is a method of the scaler."""
        return isinstance(call.func, cst.Attribute) and self._code.text(call.func.value) in self.names

    def _is_during_step(self, node: Node, scales: list[Node], updates: list[Node], depth: int = 0) -> bool:
        """Return whether a node runs between backward pass and `update`, when apex.amp already has the new scale."""
        code, function = self._code, self._code.function(node)
        firsts = [code.position(scale) for scale in scales if code.function(scale) is function]
        lasts = [code.position(update) for update in updates if code.function(update) is function]
        if firsts or lasts:
            is_before = firsts and code.position(node) < min(firsts)
            return not is_before and not (lasts and code.position(node) > max(lasts))
        calls = code.calls_of(function) if function is not None and depth < 5 else []
        return any(self._is_during_step(call, scales, updates, depth + 1) for call in calls)

    def _replace_tests(self, as_casts: bool) -> None:
        """Rewrite tests of the scaler. An `if` loses its `else` branch if that does the same without amp."""
        code, edits = self._code, self._edits
        for name in code.find(code.module, m.Name() | m.Attribute()):
            if code.text(name) not in self.names or not code.is_value(name):
                continue
            parent = code.parent(name)
            test, is_negative = name, False
            if m.matches(parent, _IS_NONE | _IS_NOT_NONE) and parent.left is name:
                test, is_negative = parent, m.matches(parent, _IS_NONE)
            elif m.matches(code.parent(parent), m.Call(func=m.Attribute(attr=m.Name("is_enabled")), args=[])):
                test = code.parent(parent)
            elif not _is_condition(name, parent):
                continue
            is_call = isinstance(test, cst.Call)
            answer = self.enabled if self._is_none or is_call else "True"
            if answer != "True" and code.function(test) is not code.function(self.made):
                answer = self._flag() if as_casts else ""
            if not answer:
                continue
            holder = code.parent(test)
            self._handled.append(name)
            if isinstance(holder, cst.If) and holder.test is test and not is_negative and self._is_same(holder, answer):
                edits.bodies.add(holder)
                continue
            simple = isinstance(holder, cst.If | cst.IfExp | cst.Assign | cst.Arg) or re.fullmatch(r"[\w.]+", answer)
            answer = negated(answer) if is_negative else answer
            edits.expressions[test] = answer if simple else f"({answer})"

    def _is_same(self, statement: Node, answer: str) -> bool:
        """Return whether both branches of an `if` do the same when amp is off, or the first branch always runs."""
        if answer == "True":
            return statement.orelse is None or isinstance(statement.orelse, cst.Else)
        if not isinstance(statement.orelse, cst.Else) or isinstance(self._code.parent(statement), cst.If):
            return False
        return self._plain_lines(statement.body) == self._plain_lines(statement.orelse.body)

    def _plain_lines(self, block: Node) -> list[str]:
        """Return the lines of a block as they would be without a scaler, without comments."""
        names = "|".join(map(re.escape, self.names))
        lines = [re.sub(r"\s+#.*", "", line).rstrip() for line in self._code.text(block).splitlines()]
        lines = [re.sub(rf"\b(?:{names})\.scale\((.*)\)\.backward\(", r"\1.backward(", line) for line in lines]
        lines = [re.sub(rf"\b(?:{names})\.step\((.*)\)$", r"\1.step()", line) for line in lines]
        dropped = re.compile(rf"\s*(?:{names})\.(?:unscale_|update)\(.*\)$|\s*$|\s*#.*")
        return [line for line in lines if not dropped.match(line)]

    def _refuse_others(self) -> None:
        """Refuse every use of the scaler that no edit covers."""
        code = self._code
        attributes = {name.rpartition(".")[2] for name in self.names if "." in name}
        for node in code.find(code.module, m.Name() | m.Attribute()):
            is_attribute = isinstance(node, cst.Attribute) and node.attr.value in attributes
            is_scaler = code.is_value(node) and (code.text(node) in self.names or is_attribute)
            if is_scaler and not any(node is handled for handled in self._handled):
                code.refuse(node, "scaler-use", use=code.text(code.statement(node)).strip().splitlines()[0])


def _target(assign: Node) -> Node:
    """Return the target of an assignment that has one target."""
    return assign.targets[0].target


def _is_condition(node: Node, parent: Node) -> bool:
    """Return whether the parent tests the truth of an expression."""
    if isinstance(parent, cst.If | cst.IfExp | cst.While):
        return parent.test is node
    return isinstance(parent, cst.BooleanOperation) or m.matches(parent, m.UnaryOperation(operator=m.Not()))


def _without(removed: dict[str, list[int]]) -> Callable[[Node], Node]:
    """Return a function that removes a call's arguments, or a function's parameters, by their indices."""

    def change(updated: Node) -> Node:
        for name, indices in removed.items():
            items = [item for index, item in enumerate(getattr(updated, name)) if index not in indices]
            if items and indices and max(indices) >= len(items):
                items[-1] = items[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            updated = updated.with_changes(**{name: items})
        return updated

    return change
