"""Uses of autocast in a file: in `with` statements, variables and decorators, with their dtypes and conditions."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst
from libcst import matchers as m

from .code import Code, Node, Use
from .edits import Edits
from .rules import AUTOCAST, bound, literal
from .values import negated, plain

PACKAGES = ("torch.amp", "torch.cuda.amp", "torch.cpu.amp")
_NULL = ("nullcontext", "suppress")  # contexts that do nothing, called without arguments


@dataclass(frozen=True)
class Cast:
    """A use of autocast. `dtype` is "float16", "bfloat16" or an expression; `enabled` is "True" or an expression."""

    node: Node
    dtype: str
    enabled: str


class Casts:
    """The uses of autocast in a file. Reading a use also adds the edits that remove it."""

    def __init__(self, code: Code, edits: Edits, torch: str, amp: str) -> None:
        self._code, self._edits, self._torch, self._amp = code, edits, torch, amp
        self.casts: list[Cast] = []
        self.covered: set[Node] = set()  # `with` statements and functions that ran under autocast
        self.classes: set[str] = set()  # classes whose `forward` is decorated

    def read(self, use: Use) -> None:
        """Record and remove a use of autocast, or refuse it."""
        code, call = self._code, use.call
        arguments = None if call is None else bound(call, _parameters(use))
        if arguments is None:
            return code.refuse(use.node, "autocast-form")
        enabled = plain(code.text(arguments["enabled"].value)) if "enabled" in arguments else "True"
        if enabled == "False":
            if not isinstance(code.parent(call), cst.WithItem | cst.Decorator):
                code.refuse(use.node, "autocast-form")
            self._edits.expressions[call] = f"{self._amp}.disable_casts()"
            return None
        dtype = self._dtype(use, arguments)
        condition = self._remove(call)
        conditions = [text for text in (condition or "", enabled) if text != "True"]
        if condition is None or len(conditions) > 1:
            return code.refuse(use.node, "autocast-form")
        self.casts.append(Cast(use.node, dtype, "".join(conditions) or "True"))
        return None

    def _dtype(self, use: Use, arguments: dict[str, cst.Arg]) -> str:
        """Return the dtype that a use of autocast casts to: by its arguments, or else the device type's default."""
        code = self._code
        if "dtype" in arguments and literal(arguments["dtype"].value) is not None:
            text = code.text(arguments["dtype"].value)
            name = {"half": "float16"}.get(text.rpartition(".")[2], text.rpartition(".")[2])
            return name if name in ("float16", "bfloat16") else text
        argument = arguments["device_type"].value if "device_type" in arguments else None
        device = use.name.split(".")[1] if argument is None else literal(argument)
        text = f'"{device}"' if argument is None else code.text(argument)
        return {"cuda": "float16", "cpu": "bfloat16"}.get(str(device), f"{self._torch}.get_autocast_dtype({text})")

    def _remove(self, call: Node) -> str | None:
        """Remove a call of autocast; return the condition under which it is used, or None if its form is unknown."""
        code, parent = self._code, self._code.parent(call)
        if isinstance(parent, cst.WithItem):
            return None if parent.asname is not None else self._unwrap(parent)
        if isinstance(parent, cst.Decorator):
            return self._undecorate(parent)
        chosen, condition = call, "True"
        if isinstance(parent, cst.IfExp):
            other = parent.orelse if parent.body is call else parent.body
            is_null = isinstance(other, cst.Call) and code.called(other) in _NULL and not other.args
            if parent.test is call or not is_null:
                return None
            test = plain(code.text(parent.test))
            chosen, condition = parent, test if parent.body is call else negated(test)
            if isinstance(code.parent(parent), cst.WithItem):
                return self._unwrap(code.parent(parent)) and condition
        assign = code.parent(chosen)
        name = m.Name() | m.Attribute(value=m.Name("self"))
        if not m.matches(assign, m.Assign(targets=[m.AssignTarget(name)])) or assign.value is not chosen:
            return None
        return condition if self._unwrap_variable(assign) else None

    def _unwrap(self, item: Node) -> str:
        """Remove an item of a `with` statement. Return the condition under which autocast is used: "True", always."""
        statement = self._code.parent(item)
        self._edits.unwrapped.setdefault(statement, set()).add(item)
        self.covered.add(statement)
        return "True"

    def _unwrap_variable(self, assign: Node) -> bool:
        """Remove a variable that holds an autocast, and return True, if it only occurs in `with` statements."""
        code, target = self._code, assign.targets[0].target
        name, items = code.text(target), list[Node]()
        kind = m.Name() if isinstance(target, cst.Name) else m.Attribute()
        for node in code.find(code.module, kind):
            if node is target or code.text(node) != name or not code.is_value(node):
                continue
            item = code.parent(node)
            if not isinstance(item, cst.WithItem) or item.asname is not None:
                return False
            items.append(item)
        for item in items:
            self._unwrap(item)
        self._edits.replaced[assign] = []
        return bool(items)

    def _undecorate(self, decorator: Node) -> str | None:
        """Remove the decorator of a function and return "True": autocast is always used. Return None for a class."""
        code, function = self._code, self._code.parent(decorator)
        if not isinstance(function, cst.FunctionDef):
            return None
        holder = code.parent(code.block(function))
        if isinstance(holder, cst.ClassDef) and function.name.value == "forward":
            self.classes.add(holder.name.value)
        self._edits.expressions[decorator] = lambda decorator: cst.RemoveFromParent()
        self.covered.add(function)
        return "True"


def _parameters(use: Use) -> list[str]:
    """Return the parameters of an autocast; torch.cuda.amp's has no device type."""
    return ["enabled", "dtype", "cache_enabled"] if use.name.startswith(PACKAGES[1:]) else AUTOCAST
