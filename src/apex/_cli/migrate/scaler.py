"""The GradScaler of a file: how it is made, under which condition, and what apex.amp has for each use of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst
from libcst import matchers as m

from .casts import PACKAGES
from .code import Code, Node, Use
from .edits import Edits
from .rules import GRAD_SCALER, SCALING, bound
from .values import given, negated, parameters, plain

_IS_NONE = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.Is(), comparator=m.Name("None"))])
_IS_NOT_NONE = m.Comparison(comparisons=[m.ComparisonTarget(operator=m.IsNot(), comparator=m.Name("None"))])


class Scaler:
    """A GradScaler: the statement that makes it, the names that hold it, and the condition that it is on."""

    def __init__(self, code: Code, edits: Edits, use: Use, amp: str) -> None:
        self._code, self._edits, self._amp = code, edits, amp
        self.made = code.statement(use.node)
        self.enabled, self.names, self.options = "True", set[str](), list[str]()
        self.steps: dict[Node, str] = {}  # calls of `scaler.step`, and the optimizer as it is called there
        self._handled: list[Node] = []
        self._is_none = False  # whether the variable is None while the scaler is off
        self._read(use)

    def _read(self, use: Use) -> None:
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

        An `if` decides it when the variable is None otherwise, or when little else is in the block.
        """
        code, found = self._code, list[str]()
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
            found.append(negated(test) if is_else else test)
            found += [test] if isinstance(code.parent(holder), cst.If) else []  # an `elif` has two conditions
            self._is_none = self._is_none or bool(nones)
        return found

    def _other_assignments(self) -> list[Node]:
        code, name = self._code, self._code.text(_target(self.made))
        assigns = code.find(code.module, m.Assign(targets=[m.AssignTarget()]))
        return [each for each in assigns if each is not self.made and code.text(_target(each)) == name]

    def _remove_assignments(self) -> None:
        code, edits = self._code, self._edits
        for each in (self.made, *self._other_assignments()):
            if each is not self.made and not m.matches(each.value, m.Name("None")):
                code.refuse(each, "several-scalers")
            edits.replaced[each] = []
            self._handled.append(_target(each))
        for each in (self.made, *self._other_assignments()):
            holder = code.parent(code.block(each))
            holder = code.parent(holder) if isinstance(holder, cst.Else) else holder
            if not isinstance(holder, cst.If) or isinstance(holder.orelse, cst.If):
                continue
            blocks = [holder.body] if holder.orelse is None else [holder.body, holder.orelse.body]
            is_empty = all(member in edits.replaced for block in blocks for member in code.members(block))
            if is_empty and not code.find(holder.test, m.Call()) and not isinstance(code.parent(holder), cst.If):
                edits.replaced[holder] = []

    # Uses -------------------------------------------------------------------------------------------------------------

    def means_enabled(self, text: str) -> bool:
        """Return whether an expression asks whether the scaler is there or on."""
        return any(text in (f"{name} is not None", f"{name}.is_enabled()", f"bool({name})") for name in self.names)

    def ignore(self, node: Node) -> None:
        """Leave out uses of the scaler inside `node`, which is removed as a whole."""
        self._handled += self._code.find(node, m.Name() | m.Attribute())

    def follow_parameters(self) -> None:
        """Remove the scaler from calls of functions of this file, and from their parameters."""
        code, edits, before = self._code, self._edits, set[str]()
        while before != self.names:
            before = set(self.names)
            for function in (each for functions in code.functions.values() for each in functions):
                for param in parameters(function):
                    if self._is_always_given(function, param.name.value):
                        self.names.add(param.name.value)
        for function in (each for functions in code.functions.values() for each in functions):
            kinds = {"params": function.params.params, "kwonly_params": function.params.kwonly_params}
            removed = {
                kind: [place for place, each in enumerate(params) if self._is_always_given(function, each.name.value)]
                for kind, params in kinds.items()
            }
            if not any(removed.values()):
                continue
            edits.expressions[function.params] = _without(removed)
            self._handled += [kinds[kind][place].name for kind, places in removed.items() for place in places]
            for call in code.calls_of(function):
                places = [place for place, arg in enumerate(call.args) if code.text(arg.value) in self.names]
                edits.expressions[call] = _without({"args": places})
                self._handled += [call.args[place].value for place in places]

    def _is_always_given(self, function: Node, name: str) -> bool:
        """Return whether every call of a function in this file gives the scaler for a parameter."""
        if name not in [each.name.value for each in parameters(function)]:
            return False
        values = [value for value, _ in given(self._code, function, name)]
        return bool(values) and all(value in self.names for value in values)

    def replace_uses(
        self, scale_loss: Callable[[Node, Node, list[str]], None], *, always_on: bool, as_casts: bool
    ) -> None:
        """Rewrite every use of the scaler.

        `always_on`: amp.initialize is called without `enabled`. `as_casts`: amp is on exactly when the scaler is.
        """
        code, edits = self._code, self._edits
        calls = [call for call in code.calls if self._method(call)]
        named = {name: [call for call in calls if code.called(call) == name] for name in map(code.called, calls)}
        self.steps = {call: code.text(call.args[0].value) for call in named.get("step", []) if len(call.args) == 1}
        for call, optimizer in self.steps.items():
            edits.expressions[call] = f"{optimizer}.step()"
        unscales, updates = named.get("unscale_", []), [call for call in named.get("update", []) if not call.args]
        gone = [call for call in (*unscales, *updates) if code.is_statement(call)]
        edits.replaced |= {code.statement(call): [] for call in gone}
        scales = [call for call in named.get("scale", []) if code.called_on(call) == "backward"]
        for place, call in enumerate(scales):
            function, backward = code.function(call), code.parent(code.parent(call))
            here = [name for step, name in self.steps.items() if code.function(step) is function]
            scale_loss(backward, call.args[0].value, list(dict.fromkeys(here or self.steps.values())))
            if function in [code.function(each) for each in scales[:place]]:
                code.refuse(call, "several-losses")
        saves = [*named.get("state_dict", []), *named.get("load_state_dict", [])]
        edits.expressions |= {call.func: f"{self._amp}.{code.called(call)}" for call in saves}
        reads = [call for call in named.get("get_scale", []) if not self._is_during_step(call, scales, updates)]
        scale = f"{self._amp}._amp_state.loss_scalers[0].loss_scale()"
        scale = scale if always_on else f"({scale} if {self._flag()} else 1.0)"
        edits.expressions |= dict.fromkeys(reads, scale)
        self._handled += [call.func.value for call in (*self.steps, *gone, *scales, *saves, *reads)]
        self._replace_tests(as_casts)
        self._refuse_others()
        clips = [call for call in code.calls if code.called(call).startswith("clip_grad")]
        if clips and not unscales:
            code.refuse(clips[0], "gradients")

    def _flag(self) -> str:
        return f"{self._amp}._amp_state.opt_properties.enabled"

    def _method(self, call: Node) -> bool:
        return isinstance(call.func, cst.Attribute) and self._code.text(call.func.value) in self.names

    def _is_during_step(self, node: Node, scales: list[Node], updates: list[Node], depth: int = 0) -> bool:
        """Return whether a node runs between backward pass and `update`, where apex.amp has a new scale already."""
        code, function = self._code, self._code.function(node)
        firsts = [code.position(each) for each in scales if code.function(each) is function]
        lasts = [code.position(each) for each in updates if code.function(each) is function]
        if firsts or lasts:
            return not (lasts and code.position(node) > max(lasts)) and not (
                firsts and code.position(node) < min(firsts)
            )
        callers = code.calls_of(function) if function is not None and depth < 5 else []
        return any(self._is_during_step(each, scales, updates, depth + 1) for each in callers)

    def _replace_tests(self, as_casts: bool) -> None:
        """Rewrite conditions on the scaler; an `if` of them loses its `else` if that does the same without amp."""
        code, edits = self._code, self._edits
        for each in code.find(code.module, m.Name() | m.Attribute()):
            if code.text(each) not in self.names or not code.is_value(each):
                continue
            parent = code.parent(each)
            test, is_negative = each, False
            if m.matches(parent, _IS_NONE | _IS_NOT_NONE) and parent.left is each:
                test, is_negative = parent, m.matches(parent, _IS_NONE)
            elif m.matches(code.parent(parent), m.Call(func=m.Attribute(attr=m.Name("is_enabled")), args=[])):
                test = code.parent(parent)
            elif not _is_condition(each, parent):
                continue
            is_call = isinstance(test, cst.Call)
            answer = self.enabled if self._is_none or is_call else "True"
            if answer != "True" and code.function(test) is not code.function(self.made):
                answer = self._flag() if as_casts else ""
            if not answer:
                continue
            holder = code.parent(test)
            self._handled.append(each)
            if isinstance(holder, cst.If) and holder.test is test and not is_negative and self._is_same(holder, answer):
                edits.bodies.add(holder)
                continue
            simple = isinstance(holder, cst.If | cst.IfExp | cst.Assign | cst.Arg) or re.fullmatch(r"[\w.]+", answer)
            answer = negated(answer) if is_negative else answer
            edits.expressions[test] = answer if simple else f"({answer})"

    def _is_same(self, statement: Node, answer: str) -> bool:
        """Return whether the branches of an `if` do the same when amp is off, or the first one always runs."""
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
        gone = re.compile(rf"\s*(?:{names})\.(?:unscale_|update)\(.*\)$|\s*$|\s*#.*")
        return [line for line in lines if not gone.match(line)]

    def _refuse_others(self) -> None:
        code = self._code
        attributes = {name.rpartition(".")[2] for name in self.names if "." in name}
        for each in code.find(code.module, m.Name() | m.Attribute()):
            is_held = isinstance(each, cst.Attribute) and each.attr.value in attributes
            is_name = code.is_value(each) and (code.text(each) in self.names or is_held)
            if is_name and not any(each is other for other in self._handled):
                code.refuse(each, "scaler-use", use=code.text(code.statement(each)).strip().splitlines()[0])


def _target(assign: Node) -> Node:
    """Return what a plain assignment assigns to."""
    return assign.targets[0].target


def _is_condition(node: Node, parent: Node) -> bool:
    """Return whether an expression is tested for being true."""
    if isinstance(parent, cst.If | cst.IfExp | cst.While):
        return parent.test is node
    return isinstance(parent, cst.BooleanOperation) or m.matches(parent, m.UnaryOperation(operator=m.Not()))


def _without(removed: dict[str, list[int]]) -> Callable[[Node], Node]:
    """Return what removes some of a call's arguments or of a function's parameters."""

    def change(updated: Node) -> Node:
        for name, places in removed.items():
            each = [item for place, item in enumerate(getattr(updated, name)) if place not in places]
            if each and places and max(places) >= len(each):
                each[-1] = each[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            updated = updated.with_changes(**{name: each})
        return updated

    return change
