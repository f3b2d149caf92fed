"""A parsed file: what imported names mean, where statements stand, what they read and assign."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst import matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider, QualifiedNameProvider

from .rules import ADVICE

Node = Any  # of LibCST
_NAME = m.Name() | m.Attribute()
_CHANGES = ("append", "extend", "insert", "update", "setdefault")  # methods that change what they are called on


@dataclass(frozen=True)
class Refusal:
    """A place that is left as it is: why, and what to do about it."""

    line: int
    rule: str
    advice: str


@dataclass(frozen=True)
class Use:
    """An expression that means `name`, which was imported; `call` is the call of it."""

    name: str
    node: Node
    call: Node  # None if it is not

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


class Code:
    """A file. A statement is a compound statement, or one of those that may share a line."""

    def __init__(self, source: bytes) -> None:
        wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
        self.module = wrapper.module
        self.text: Callable[[Node], str] = self.module.code_for_node
        providers = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)
        facts: Any = wrapper.resolve_many(providers)
        self._parents, self._positions, self._qualified = (facts[each] for each in providers)
        self.refusals: list[Refusal] = []
        # By type: asking LibCST for nodes that match walks through the file each time, for half a second.
        self._nodes: dict[str, list[Node]] = {}
        for node in sorted(self._parents, key=self.position):
            self._nodes.setdefault(type(node).__name__, []).append(node)
        self.calls = self.find(self.module, m.Call())
        self.functions: dict[str, list[Node]] = {}
        for function in self.find(self.module, m.FunctionDef()):
            self.functions.setdefault(function.name.value, []).append(function)

    def refuse(self, node: Node, rule: str, **details: str) -> None:
        """Notes that `node` is not rewritten, and why."""
        self.refusals.append(Refusal(self.line(node), rule, ADVICE[rule].format(**details)))

    def find(self, node: Node, pattern: Any) -> list[Node]:
        """The node and those inside of it that match, in the order of the file."""
        kinds = {type(each).__name__ for each in getattr(pattern, "options", (pattern,))}
        end, found = self._positions[node].end, list[Node]()
        for nodes in (self._nodes.get(kind, []) for kind in kinds):
            first = bisect.bisect_left(nodes, self.position(node), key=self.position)
            last = bisect.bisect_right(nodes, (end.line, end.column), key=self.position)
            found += [each for each in nodes[first:last] if m.matches(each, pattern) and self.inside(each, node)]
        return sorted(found, key=self.position)

    def position(self, node: Node) -> tuple[int, int]:
        start = self._positions[node].start
        return start.line, start.column

    def line(self, node: Node) -> int:
        return self.position(node)[0]

    def parent(self, node: Node) -> Node:
        return self._parents.get(node)

    def ancestors(self, node: Node) -> Iterator[Node]:
        """The node and what it is in, from the inside."""
        while node is not None:
            yield node
            node = self.parent(node)

    def inside(self, node: Node, outer: Node) -> bool:
        return any(each is outer for each in self.ancestors(node))

    # What names mean --------------------------------------------------------------------------------------------------

    def uses(self, *packages: str) -> list[Use]:
        """Expressions that mean something imported from one of these packages."""
        found = []
        for node in self.find(self.module, _NAME):
            parent, name = self.parent(node), self._means(node, packages)
            longer = isinstance(parent, cst.Attribute) and self._means(parent, packages)
            is_bound = isinstance(parent, cst.ImportAlias | cst.ImportFrom) or m.matches(
                parent, m.AssignTarget(m.Name())
            )
            if name and not longer and not is_bound:
                call = parent if isinstance(parent, cst.Call) and parent.func is node else None
                found.append(Use(name, node, call))
        return found

    def _means(self, node: Node, packages: tuple[str, ...]) -> str | None:
        if set(self.text(node)) & set("(["):  # an attribute of a result, which is not what was imported
            return None
        names = sorted(each.name for each in self._names(node) if each.source.name == "IMPORT")
        return next((name for name in names if name.startswith(tuple(f"{each}." for each in packages))), None)

    def _names(self, node: Node) -> Any:
        names: Any = self._qualified.get(node) or ()
        return names() if callable(names) else names

    def has_fallback(self, use: Use) -> bool:
        """Whether the file also defines the name itself, other than by None where the import fails."""
        root = self.text(use.node).partition(".")[0]
        node = next((each for each in self.find(use.node, m.Name(root))), use.node)
        kinds = {each.source.name for each in self._names(node)}
        assigned = self.find(self.module, m.Assign(targets=[m.AssignTarget(target=m.Name(root))]))
        only_none = assigned and all(m.matches(each.value, m.Name("None")) for each in assigned)
        return len(self._names(node)) > 1 and not (kinds == {"IMPORT", "LOCAL"} and only_none)

    def imported_as(self, module: str) -> str:
        """The name that a module has in this file."""
        aliases = [alias for each in self.find(self.module, m.Import()) for alias in each.names]
        return next((each.evaluated_alias or module for each in aliases if each.evaluated_name == module), module)

    def end_of_imports(self) -> Node | None:
        """The last of the imports at the top of the file."""
        imports = [isinstance(each, cst.Import | cst.ImportFrom | cst.Try) for each in self.members(self.module)]
        first = imports.index(True) if True in imports else len(imports)
        last = imports.index(False, first) if False in imports[first:] else len(imports)
        return self.members(self.module)[last - 1] if first < last else None

    def is_taken(self, name: str) -> bool:
        return bool(self.find(self.module, m.Name(name)))

    # Where statements stand -------------------------------------------------------------------------------------------

    def statement(self, node: Node) -> Node:
        """The innermost statement that a node is in."""
        kinds = cst.BaseSmallStatement | cst.BaseCompoundStatement
        return next(each for each in self.ancestors(node) if isinstance(each, kinds))

    def block(self, statement: Node) -> Node:
        """What a statement is listed in: the module, an indented block or what follows a colon on its line."""
        parent = self.parent(statement)
        while isinstance(parent, cst.SimpleStatementLine | cst.If):  # an `elif` is listed where its `if` is
            parent = self.parent(parent)
        return parent

    def members(self, block: Node) -> list[Node]:
        """The statements of a block."""
        if isinstance(block, cst.SimpleStatementSuite):
            return list(block.body)
        return [
            each for line in block.body for each in (line.body if m.matches(line, m.SimpleStatementLine()) else [line])
        ]

    def levels(self, node: Node) -> Iterator[tuple[Node, Node]]:
        """The blocks that a node is in, up to its function's, each with the statement of it that has the node."""
        above = list(self.ancestors(node))
        for place, block in enumerate(above):
            if isinstance(block, cst.Module | cst.IndentedBlock | cst.SimpleStatementSuite):
                yield block, next(each for each in above if each in self.members(block))
                if place + 1 == len(above) or isinstance(above[place + 1], cst.FunctionDef | cst.ClassDef):
                    return

    def function(self, node: Node) -> Node | None:
        """The innermost function that a node is in."""
        return next((each for each in self.ancestors(node) if isinstance(each, cst.FunctionDef)), None)

    def in_loop(self, node: Node, block: Node) -> bool:
        """Whether a loop is around a node, inside of a block that has it."""
        above = list(self.ancestors(node))
        return any(isinstance(each, cst.For | cst.While) for each in above[: above.index(block)])

    # What statements do -----------------------------------------------------------------------------------------------

    def reads(self, node: Node) -> set[str]:
        """Variables that are mentioned: names, and attributes of them."""
        return {self.text(each) for each in self.find(node, m.Name() | m.Attribute(value=m.Name()))}

    def assigns(self, statement: Node) -> set[str]:
        """Variables that a statement, or one inside of it, gives a value or changes."""
        assigning = m.AssignTarget() | m.AugAssign() | m.AnnAssign() | m.For() | m.NamedExpr()
        targets = [each.target for each in self.find(statement, assigning)]
        methods = [each.value.func for each in self.find(statement, m.Expr(value=m.Call(func=m.Attribute())))]
        targets += [each.value for each in methods if each.attr.value in _CHANGES or each.attr.value.endswith("_")]
        return {name.partition("[")[0] for each in targets for name in self.parts(each)}

    def parts(self, node: Node) -> list[str]:
        """What a tuple or list is made of, or the expression itself."""
        if isinstance(node, cst.Tuple | cst.List):
            return [name for each in node.elements for name in self.parts(each.value)]
        return [self.text(node)]

    def called(self, call: Node) -> str:
        """The last name of what is called: "step" of `self.optimizer.step()`."""
        func = call.func
        return func.attr.value if isinstance(func, cst.Attribute) else func.value if isinstance(func, cst.Name) else ""

    def calls_of(self, function: Node) -> list[Node]:
        """Calls of a function of this file, by its name, or of a method, by that of anything's attribute."""
        kind = cst.Attribute if isinstance(self.parent(self.block(function)), cst.ClassDef) else cst.Name
        return [each for each in self.calls if self.called(each) == function.name.value and isinstance(each.func, kind)]

    def method_calls(self, method: str, *receivers: str) -> list[Node]:
        """Calls `receiver.method(...)`, of anything if no receivers are given."""
        found = [call for call in self.calls if isinstance(call.func, cst.Attribute) and self.called(call) == method]
        return [call for call in found if not receivers or self.text(call.func.value) in receivers]

    def is_statement(self, call: Node) -> bool:
        """Whether a call is all that its statement is."""
        return isinstance(self.parent(call), cst.Expr)

    def called_on(self, call: Node) -> str:
        """The method that is called, as a statement of its own, on the result of a call."""
        outer = self.parent(self.parent(call))
        is_method = isinstance(outer, cst.Call) and outer.func is self.parent(call) and self.is_statement(outer)
        return self.called(outer) if is_method else ""

    def is_value(self, node: Node) -> bool:
        """Whether an expression is more than the name of an attribute or of an argument."""
        parent = self.parent(node)
        return not any(getattr(parent, name, None) is node for name in ("attr", "keyword"))
