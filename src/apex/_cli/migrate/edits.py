"""Edits of a file: collected first, then made together. Comments and layout around them stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from .code import Node


@dataclass
class Edits:
    """Edits of expressions and statements. New code is text, or a function that makes it from the old node."""

    expressions: dict[Node, str | Callable[[Any], Any]] = field(default_factory=dict)
    # New lines for a statement; an empty list removes it.
    replaced: dict[Node, list[str] | Callable[[Any], list[str]]] = field(default_factory=dict)
    before: dict[Node, list[str]] = field(default_factory=dict)  # lines to insert before a statement
    after: dict[Node, list[str]] = field(default_factory=dict)  # lines to insert after a statement
    # Items to remove from a `with` statement. A `with` that loses all items is replaced by its body.
    unwrapped: dict[Node, set[Node]] = field(default_factory=dict)
    bodies: set[Node] = field(default_factory=set)  # `if` statements to replace by their first branch
    # Runs of statements to put under a new `with`: the first statement maps to the last one and the item's code.
    wrapped: dict[Node, tuple[Node, str]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)  # import statements that the new code requires

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def update(self, other: Edits) -> None:
        """Add the edits of `other`."""
        for name, value in vars(other).items():
            getattr(self, name).update(value)

    def touches(self, statement: Node) -> bool:
        """Return whether an edit needs the statement on a line of its own."""
        ends = {last for last, _ in self.wrapped.values()}
        return any(statement in nodes for nodes in (self.replaced, self.before, self.after, self.wrapped, ends))


class Rewriter(cst.CSTTransformer):
    """A LibCST transformer that makes the edits."""

    def __init__(self, module: cst.Module, edits: Edits) -> None:
        super().__init__()
        self._module, self._edits = module, edits

    def on_leave(self, original: Any, updated: Any) -> Any:
        """Return the new node for `original`, whose children have been rewritten in `updated`."""
        updated = super().on_leave(original, updated)
        new = self._edits.expressions.get(original)
        if new is not None:
            return cst.parse_expression(new) if isinstance(new, str) else new(updated)
        if isinstance(original, cst.With) and original in self._edits.unwrapped:
            pairs = zip(original.items, updated.items, strict=True)
            items = [item for old, item in pairs if old not in self._edits.unwrapped[original]]
            last = [item.with_changes(comma=cst.MaybeSentinel.DEFAULT) for item in items[-1:]]
            return updated.with_changes(items=[*items[:-1], *last]) if items else updated
        if isinstance(original, cst.SimpleStatementSuite) and any(map(self._edits.touches, original.body)):
            lines = _one_per_line(updated.body, (), updated.trailing_whitespace)
            body, footer = self._rewritten(list(zip(original.body, lines, strict=True)))
            return cst.IndentedBlock(body=body, footer=footer)
        if isinstance(original, cst.Module | cst.IndentedBlock):
            body, footer = self._rewritten(self._split(original, updated))
            return updated.with_changes(body=body, footer=[*footer, *updated.footer])
        return updated

    def _split(self, original: Any, updated: Any) -> list[tuple[Node, Any]]:
        """Return pairs of an old statement and its updated line.

        Statements that share a line are split into lines of their own if an edit touches one of them.
        """
        pairs: list[tuple[Node, Any]] = []
        for old, new in zip(original.body, updated.body, strict=True):
            if not isinstance(old, cst.SimpleStatementLine):
                pairs.append((old, new))
            elif len(old.body) == 1 or not any(map(self._edits.touches, old.body)):
                pairs.append((old.body[0], new))
            else:
                pairs += zip(old.body, _one_per_line(new.body, new.leading_lines, new.trailing_whitespace), strict=True)
        return pairs

    def _rewritten(self, pairs: list[tuple[Node, Any]]) -> tuple[list[Any], list[cst.EmptyLine]]:
        """Return the new statements of a block, and the comments of removed statements at its end."""
        edits, result = self._edits, list[Any]()
        group, last, header = result, None, ""
        carried: list[cst.EmptyLine] = []  # blank lines and comments for the next statement
        for old, new in pairs:
            if old in edits.wrapped:
                (last, header), group = edits.wrapped[old], []
            leading = _joined(carried, new.leading_lines)
            lines, carried = self._new_lines(old, new.with_changes(leading_lines=()), leading)
            lines = [*self._parsed(edits.before.get(old, ())), *lines, *self._parsed(edits.after.get(old, ()))]
            if lines:
                lines[0] = lines[0].with_changes(leading_lines=_joined(leading, lines[0].leading_lines))
            else:
                carried = leading
            group += lines
            if old is last:
                first = group[0]
                (statement,) = self._parsed([f"with {header}:\n    pass"])
                body = cst.IndentedBlock([first.with_changes(leading_lines=()), *group[1:]])
                result.append(statement.with_changes(body=body, leading_lines=first.leading_lines))
                group, last = result, None
        return result or self._parsed(["pass"]), [line for line in carried if line.comment]

    def _new_lines(self, old: Node, new: Any, leading: list[cst.EmptyLine]) -> tuple[list[Any], list[cst.EmptyLine]]:
        """Return the lines that replace a statement, and the blank lines and comments that follow them.

        Comments of a removed line are appended to `leading`, the lines in front of the statement.
        """
        replacement = self._edits.replaced.get(old)
        if replacement is not None:
            lines = self._parsed(replacement if isinstance(replacement, list) else replacement(new))
            comments: list[Any] = m.findall(new, m.Comment())  # type: ignore[assignment]
            if len(comments) == 1 and lines and isinstance(lines[0], cst.SimpleStatementLine):
                space = cst.TrailingWhitespace(cst.SimpleWhitespace("  "), comments.pop())
                lines[0] = lines[0].with_changes(trailing_whitespace=space)
            leading += [cst.EmptyLine(comment=comment) for comment in comments]
            return lines, []
        if old not in self._edits.bodies and self._edits.unwrapped.get(old) != set(getattr(old, "items", [None])):
            return [new], []
        if isinstance(new.body, cst.SimpleStatementSuite):
            return _one_per_line(new.body.body, (), new.body.trailing_whitespace), []
        leading += [cst.EmptyLine(comment=new.body.header.comment)] if new.body.header.comment else []
        return list(new.body.body), list(new.body.footer)

    def _parsed(self, lines: Sequence[str]) -> list[Any]:
        return [cst.parse_statement(line, self._module.config_for_parsing) for line in lines]


def _joined(first: Sequence[cst.EmptyLine], second: Sequence[cst.EmptyLine]) -> list[cst.EmptyLine]:
    """Join two runs of blank lines and comments without doubling the blank lines where they meet."""
    end = len(first)
    while end and second and not second[0].comment and not first[end - 1].comment:
        end -= 1
    return [*first[:end], *second]


def _one_per_line(statements: Sequence[Any], leading: Sequence[Any], trailing: Any) -> list[Any]:
    """Return a line for each of several statements that shared one, with the blanks and comments around that line."""
    lines = [cst.SimpleStatementLine([part.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for part in statements]
    lines[0] = lines[0].with_changes(leading_lines=leading)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=trailing)
    return lines
