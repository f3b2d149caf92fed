"""A parsed Python file, with lookups of imported names, enclosing blocks, calls and assignments."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, QualifiedNameProvider

from .rules import ADVICE

Node = Any  # a node of LibCST's syntax tree
_NAME = m.Name() | m.Attribute()
_MUTATING_METHODS = ("append", "extend", "insert", "update", "setdefault")


@dataclass(frozen=True)
class Refusal:
    """A line that is not rewritten, with the rule that forbids it and advice for the user."""

    line: int
    rule: str
    advice: str


@dataclass(frozen=True)
class Use:
    """A reference to an imported object: its full dotted `name`, its node, and the call of it."""

    name: str
    node: Node
    call: Node  # None if the object is not called here

    @property
    def last(self) -> str:
        """The last part of the dotted name."""
        return self.name.rpartition(".")[2]


class Code:
    """A parsed file. "Statement" means a compound statement or one simple statement, also if it shares its line."""

    def __init__(self, source: bytes) -> None:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.module = wrapper.module
        self.text: Callable[[Node], str] = self.module.code_for_node
        providers = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)
        facts: Any = wrapper.resolve_many(providers)
        self._parents, self._positions, self._qualified = (facts[provider] for provider in providers)
        self.refusals: list[Refusal] = []
        # Nodes by type. LibCST's own search walks through the whole file each time, which takes half a second.
        self._nodes: dict[str, list[Node]] = {}
        for node in sorted(self._parents, key=self.position):
            self._nodes.setdefault(type(node).__name__, []).append(node)
        self.calls = self.find(self.module, m.Call())
        self.functions: dict[str, list[Node]] = {}
        for function in self.find(self.module, m.FunctionDef()):
            self.functions.setdefault(function.name.value, []).append(function)

    def refuse(self, node: Node, rule: str, **details: str) -> None:
        """Record that `node` is not rewritten because of `rule`; `details` fill in the advice."""
        self.refusals.append(Refusal(self.line(node), rule, ADVICE[rule].format(**details)))

    def find(self, node: Node, pattern: Any) -> list[Node]:
        """Return the nodes at or inside `node` that match a LibCST pattern, in the order of the file."""
        kinds = {type(option).__name__ for option in getattr(pattern, "options", (pattern,))}
        end, matches = self._positions[node].end, list[Node]()
        for nodes in (self._nodes.get(kind, []) for kind in kinds):
            first = bisect.bisect_left(nodes, self.position(node), key=self.position)
            last = bisect.bisect_right(nodes, (end.line, end.column), key=self.position)
            matches += [inner for inner in nodes[first:last] if m.matches(inner, pattern) and self.inside(inner, node)]
        return sorted(matches, key=self.position)

    def position(self, node: Node) -> tuple[int, int]:
        """Return the line and the column at which a node starts."""
        start = self._positions[node].start
        return start.line, start.column

    def line(self, node: Node) -> int:
        """Return the line at which a node starts."""
        return self.position(node)[0]

    def parent(self, node: Node) -> Node:
        """Return the node that directly contains `node`; None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """Yield the node, its parent, its parent's parent and so on up to the module."""
        while node is not None:
            yield node
            node = self.parent(node)

    def inside(self, node: Node, outer: Node) -> bool:
        """Return whether `node` is `outer` or a part of it."""
        return any(ancestor is outer for ancestor in self.ancestors(node))

    def uses(self, *packages: str) -> list[Use]:
        """Return the references to objects imported from these packages, without the import statements."""
        uses = []
        for node in self.find(self.module, _NAME):
            parent, name = self.parent(node), self._imported_name(node, packages)
            is_prefix = isinstance(parent, cst.Attribute) and self._imported_name(parent, packages)
            is_bound = isinstance(parent, cst.ImportAlias | cst.ImportFrom) or m.matches(
                parent, m.AssignTarget(m.Name())
            )
            if name and not is_prefix and not is_bound:
                call = parent if isinstance(parent, cst.Call) and parent.func is node else None
                uses.append(Use(name, node, call))
        return uses

    def _imported_name(self, node: Node, packages: tuple[str, ...]) -> str | None:
        """Return the full dotted name that an expression refers to, if it was imported from one of the packages."""
        if set(self.text(node)) & set("(["):  # an attribute of a call's result, not of an import
            return None
        names = sorted(name.name for name in self._qualified_names(node) if name.source.name == "IMPORT")
        return next((name for name in names if name.startswith(tuple(f"{package}." for package in packages))), None)

    def _qualified_names(self, node: Node) -> Any:
        names: Any = self._qualified.get(node) or ()
        return names() if callable(names) else names

    def has_fallback(self, use: Use) -> bool:
        """Return whether the file also defines the name itself. `name = None` for a failed import does not count."""
        root = self.text(use.node).partition(".")[0]
        node = next(iter(self.find(use.node, m.Name(root))), use.node)
        kinds = {name.source.name for name in self._qualified_names(node)}
        assigned = self.find(self.module, m.Assign(targets=[m.AssignTarget(target=m.Name(root))]))
        only_none = assigned and all(m.matches(assign.value, m.Name("None")) for assign in assigned)
        return len(self._qualified_names(node)) > 1 and not (kinds == {"IMPORT", "LOCAL"} and only_none)

    def imported_as(self, module: str) -> str:
        """Return the name under which this file imports a module: "t" after `import torch as t`."""
        aliases = [alias for statement in self.find(self.module, m.Import()) for alias in statement.names]
        return next((alias.evaluated_alias or module for alias in aliases if alias.evaluated_name == module), module)

    def end_of_imports(self) -> Node | None:
        """Return the last statement of the first run of imports at the top level of the file."""
        imports = [isinstance(line, cst.Import | cst.ImportFrom | cst.Try) for line in self.members(self.module)]
        first = imports.index(True) if True in imports else len(imports)
        last = imports.index(False, first) if False in imports[first:] else len(imports)
        return self.members(self.module)[last - 1] if first < last else None

    def is_taken(self, name: str) -> bool:
        """Return whether the file uses a name for anything."""
        return bool(self.find(self.module, m.Name(name)))

    def statement(self, node: Node) -> Node:
        """Return the innermost statement that contains a node."""
        kinds = cst.BaseSmallStatement | cst.BaseCompoundStatement
        return next(ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, kinds))

    def block(self, statement: Node) -> Node:
        """Return the block that lists a statement: the module, an indented block, or a suite on the colon's line."""
        parent = self.parent(statement)
        while isinstance(parent, cst.SimpleStatementLine | cst.If):  # an `elif` belongs to the block of its `if`
            parent = self.parent(parent)
        return parent

    def members(self, block: Node) -> list[Node]:
        """Return the statements of a block."""
        if isinstance(block, cst.SimpleStatementSuite):
            return list(block.body)
        lines = [line.body if m.matches(line, m.SimpleStatementLine()) else [line] for line in block.body]
        return [statement for line in lines for statement in line]

    def levels(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """Yield each block around a node, innermost first, and the block's statement that contains the node.

        The last block is the body of the innermost function or class, or the module.
        """
        above = list(self.ancestors(node))
        for depth, block in enumerate(above):
            if isinstance(block, cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite):
                yield block, next(ancestor for ancestor in above if ancestor in self.members(block))
                if depth + 1 == len(above) or isinstance(above[depth + 1], cst.FunctionDef | cst.ClassDef):
                    return

    def function(self, node: Node) -> Node | None:
        """Return the innermost function that contains a node."""
        return next((ancestor for ancestor in self.ancestors(node) if isinstance(ancestor, cst.FunctionDef)), None)

    def in_loop(self, node: Node, block: Node) -> bool:
        """Return whether a loop inside of `block` contains the node."""
        above = list(self.ancestors(node))
        return any(isinstance(ancestor, cst.For | cst.While) for ancestor in above[: above.index(block)])

    def reads(self, node: Node) -> set[str]:
        """Return the names that occur in a node, and the attributes of names: `a` and `a.b`."""
        return {self.text(name) for name in self.find(node, m.Name() | m.Attribute(value=m.Name()))}

    def assigns(self, statement: Node) -> set[str]:
        """Return the variables that a statement, or a statement inside of it, assigns or changes in place."""
        assigning = m.AssignTarget() | m.AugAssign() | m.AnnAssign() | m.For() | m.NamedExpr()
        targets = [assign.target for assign in self.find(statement, assigning)]
        for call in self.find(statement, m.Expr(value=m.Call(func=m.Attribute()))):
            method = call.value.func
            if method.attr.value in _MUTATING_METHODS or method.attr.value.endswith("_"):
                targets.append(method.value)
        return {name.partition("[")[0] for target in targets for name in self.parts(target)}

    def parts(self, node: Node) -> list[str]:
        """Return the code of each element of a tuple or list, nested ones included, or of the expression itself."""
        if isinstance(node, cst.Tuple | cst.List):
            return [name for element in node.elements for name in self.parts(element.value)]
        return [self.text(node)]

    def called(self, call: Node) -> str:
        """Return the last name of the called function: "step" of `self.optimizer.step()`."""
        func = call.func
        return func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""

    def calls_of(self, function: Node) -> list[Node]:
        """Return the calls of a function by its name, or of a method by its name on any object."""
        kind = cst.Attribute if isinstance(self.parent(self.block(function)), cst.ClassDef) else cst.Name
        return [call for call in self.calls if self.called(call) == function.name.value and isinstance(call.func, kind)]

    def method_calls(self, method: str, *receivers: str) -> list[Node]:
        """Return the calls `receiver.method(...)`, on any object if no receivers are given."""
        calls = [call for call in self.calls if isinstance(call.func, cst.Attribute) and self.called(call) == method]
        return [call for call in calls if not receivers or self.text(call.func.value) in receivers]

    def is_statement(self, call: Node) -> bool:
        """Return whether a call is a statement by itself."""
        return isinstance(self.parent(call), cst.Expr)

    def called_on(self, call: Node) -> str:
        """Return the method called on the result of a call, if that is a statement by itself; else ""."""
        outer = self.parent(self.parent(call))
        is_method = isinstance(outer, cst.Call) and outer.func is self.parent(call) and self.is_statement(outer)
        return self.called(outer) if is_method else ""

    def is_value(self, node: Node) -> bool:
        """Return whether an expression is read as a value, rather than as an attribute's or a keyword's name."""
        parent = self.parent(node)
        return not any(getattr(parent, name, None) is node for name in ("attr", "keyword"))
