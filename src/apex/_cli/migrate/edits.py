"""Changes of a file, collected first and made together; comments and layout around them stay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst import matchers as m

from .code import Node


@dataclass
class Edits:
    """What becomes of expressions and statements. New code is given as text, or by a function of the old."""

    expressions: dict[Node, str | Callable[[Any], Any]] = field(default_factory=dict)
    # What takes the place of a statement; nothing removes it.
    replaced: dict[Node, list[str] | Callable[[Any], list[str]]] = field(default_factory=dict)
    before: dict[Node, list[str]] = field(default_factory=dict)
    after: dict[Node, list[str]] = field(default_factory=dict)
    # Items that `with` statements lose; without any left their body takes their place.
    unwrapped: dict[Node, set[Node]] = field(default_factory=dict)
    bodies: set[Node] = field(default_factory=set)  # `if` statements whose first branch takes their place
    # Statements that become the body of a new `with`: the first of them, by the last one and the text of the item.
    wrapped: dict[Node, tuple[Node, str]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)  # imports that the new code asks for

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def update(self, other: Edits) -> None:
        for name, value in vars(other).items():
            getattr(self, name).update(value)

    def touches(self, statement: Node) -> bool:
        ends = {last for last, _ in self.wrapped.values()}
        return any(statement in each for each in (self.replaced, self.before, self.after, self.wrapped, ends))


class Rewriter(cst.CSTTransformer):
    """Makes the changes."""

    def __init__(self, module: cst.Module, edits: Edits) -> None:
        super().__init__()
        self._module, self._edits = module, edits

    def on_leave(self, original: Any, updated: Any) -> Any:
        updated = super().on_leave(original, updated)
        new = self._edits.expressions.get(original)
        if new is not None:
            return cst.parse_expression(new) if isinstance(new, str) else new(updated)
        if isinstance(original, cst.With) and original in self._edits.unwrapped:
            pairs = zip(original.items, updated.items, strict=True)
            left = [item for old, item in pairs if old not in self._edits.unwrapped[original]]
            last = [item.with_changes(comma=cst.MaybeSentinel.DEFAULT) for item in left[-1:]]
            return updated.with_changes(items=[*left[:-1], *last]) if left else updated
        if isinstance(original, cst.SimpleStatementSuite) and any(map(self._edits.touches, original.body)):
            lines = _one_per_line(updated.body, (), updated.trailing_whitespace)
            body, footer = self._rewritten(list(zip(original.body, lines, strict=True)))
            return cst.IndentedBlock(body=body, footer=footer)
        if isinstance(original, cst.Module | cst.IndentedBlock):
            body, footer = self._rewritten(self._split(original, updated))
            return updated.with_changes(body=body, footer=[*footer, *updated.footer])
        return updated

    def _split(self, original: Any, updated: Any) -> list[tuple[Node, Any]]:
        """Statements, each with what it is now; those that share a line are split if one of them changes."""
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
        """The statements of a block, and comments that are left over at its end."""
        edits, result = self._edits, list[Any]()
        group, last, header = result, None, ""
        carried: list[cst.EmptyLine] = []  # blank lines and comments for the next statement
        for old, new in pairs:
            if old in edits.wrapped:
                (last, header), group = edits.wrapped[old], []
            leading = _joined(carried, new.leading_lines)
            lines, carried = self._becomes(old, new.with_changes(leading_lines=()), leading)
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

    def _becomes(self, old: Node, new: Any, leading: list[cst.EmptyLine]) -> tuple[list[Any], list[cst.EmptyLine]]:
        """What takes the place of a statement, and lines after it; comments that it loses are added to `leading`."""
        made = self._edits.replaced.get(old)
        if made is not None:
            lines = self._parsed(made if isinstance(made, list) else made(new))
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
    """Two runs of blank lines and comments; blank lines where they meet are not doubled."""
    end = len(first)
    while end and second and not second[0].comment and not first[end - 1].comment:
        end -= 1
    return [*first[:end], *second]


def _one_per_line(statements: Sequence[Any], leading: Sequence[Any], trailing: Any) -> list[Any]:
    lines = [cst.SimpleStatementLine([each.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)]) for each in statements]
    lines[0] = lines[0].with_changes(leading_lines=leading)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=trailing)
    return lines
