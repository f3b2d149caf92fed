"""Imports after a rewrite: those that nothing uses any more go, those that the new code needs come."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

_IMPORTS = cst.Import | cst.ImportFrom


def tidied(before: cst.Module, module: cst.Module, packages: tuple[str, ...], needed: set[str]) -> cst.Module:
    """A rewritten module with `needed` imports, and without those from `packages` that it has no use for any more."""
    gone = (_names(before) - _names(module)) | {line.split()[-1] for line in needed}
    body = list(module.body)
    lines = [each for line in body if isinstance(line, cst.SimpleStatementLine) for each in line.body]
    have = {module.code_for_node(each) for each in lines}
    have |= {f"import {each.evaluated_name}" for line in lines if isinstance(line, cst.Import) for each in line.names}
    place = next((place for place, line in enumerate(body) if _imports(line)), -1)
    if place < 0:
        place = sum(m.matches(line, m.SimpleStatementLine([m.Expr(m.SimpleString())])) for line in body[:1])
    while place < len(body) and _imports(body[place]):  # the end of the first imports
        place += 1
    body[place:place] = [cst.parse_statement(line, module.config_for_parsing) for line in sorted(needed - have)]
    return module.with_changes(body=body).visit(_Remover(packages, gone))


def _names(module: cst.Module) -> set[str]:
    visitor = _Names()
    module.visit(visitor)
    return visitor.used


def _imports(line: Any) -> bool:
    """Whether a line at the top of a file imports something, at once or in a `try`."""
    body = line.body.body if isinstance(line, cst.Try) else [line]
    return any(m.matches(each, m.SimpleStatementLine([m.Import() | m.ImportFrom()])) for each in body)


class _Names(cst.CSTVisitor):
    """Names that are used other than to import them, or to stand for them as None where that fails."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name):
            self.used.add(node.value)
        if isinstance(node, cst.Attribute | cst.Arg):
            node.value.visit(self)  # the name of an attribute or argument is no use
        is_none = m.Assign(targets=[m.AssignTarget(m.Name())], value=m.Name("None"))
        return not isinstance(node, cst.Attribute | cst.Arg | _IMPORTS) and not m.matches(node, is_none)


class _Remover(cst.CSTTransformer):
    def __init__(self, packages: tuple[str, ...], names: set[str]) -> None:
        super().__init__()
        self._packages, self._names = packages, names

    def on_leave(self, original: Any, updated: Any) -> Any:
        updated = super().on_leave(original, updated)
        if isinstance(updated, _IMPORTS) and not isinstance(updated.names, cst.ImportStar):
            kept = [alias for alias in updated.names if not self._is_gone(alias, updated)]
            if kept and len(kept) < len(updated.names):
                kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated.with_changes(names=kept) if kept else cst.RemoveFromParent()
        emptied = (
            hasattr(original, "body")
            and m.matches(original, m.If() | m.Try())
            and len(updated.body.body) < len(original.body.body)
        )
        if emptied and isinstance(updated, cst.If) and not (updated.body.body or updated.orelse):
            return updated if m.findall(original.test, m.Call()) else cst.RemoveFromParent()
        if emptied and isinstance(updated, cst.Try) and not updated.finalbody:
            return self._without_try(updated)
        return updated

    def _is_gone(self, alias: cst.ImportAlias, statement: Any) -> bool:
        module = getattr(statement, "module", None)
        path = cst.Module([]).code_for_node(module) + "." if module is not None else ""
        name = alias.evaluated_alias or (alias.evaluated_name if path else alias.evaluated_name.partition(".")[0])
        full = f"{path}{alias.evaluated_name}."
        relative = bool(getattr(statement, "relative", ()))
        return name in self._names and not relative and full.startswith(tuple(f"{each}." for each in self._packages))

    def _without_try(self, updated: cst.Try) -> Any:
        """Where the import was all that could fail, what was to be done after it is left."""
        left = [*updated.body.body, *(updated.orelse.body.body if updated.orelse else ())]
        constant = m.SimpleStatementLine([m.Assign(value=m.Name() | m.SimpleString() | m.Integer())])
        if not all(m.matches(each, constant) for each in left):
            return updated
        left[:1] = [each.with_changes(leading_lines=updated.leading_lines) for each in left[:1]]
        return cst.FlattenSentinel(left) if left else cst.RemoveFromParent()
