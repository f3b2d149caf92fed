"""Imports after a rewrite: remove the unused ones, add the ones that the new code needs."""

from __future__ import annotations

from typing import Any

import libcst as cst
from libcst import matchers as m

_IMPORTS = cst.Import | cst.ImportFrom


def tidied(before: cst.Module, module: cst.Module, packages: tuple[str, ...], needed: set[str]) -> cst.Module:
    """Return a rewritten module with the `needed` imports and without unused imports from `packages`.

    An import is removed if the code `before` the rewrite used its name and the new code does not, or if a needed import
    defines that name.
    """
    unused = (_used_names(before) - _used_names(module)) | {line.split()[-1] for line in needed}
    body = list(module.body)
    lines = [statement for line in body if isinstance(line, cst.SimpleStatementLine) for statement in line.body]
    present = {module.code_for_node(line) for line in lines}
    present |= {
        f"import {name.evaluated_name}" for line in lines if isinstance(line, cst.Import) for name in line.names
    }
    end = next((index for index, line in enumerate(body) if _imports(line)), -1)
    if end < 0:
        end = sum(m.matches(line, m.SimpleStatementLine([m.Expr(m.SimpleString())])) for line in body[:1])
    while end < len(body) and _imports(body[end]):  # the end of the first run of imports
        end += 1
    body[end:end] = [cst.parse_statement(line, module.config_for_parsing) for line in sorted(needed - present)]
    return module.with_changes(body=body).visit(_Remover(packages, unused))


def _used_names(module: cst.Module) -> set[str]:
    visitor = _UsedNames()
    module.visit(visitor)
    return visitor.used


def _imports(line: Any) -> bool:
    """Return whether a top-level statement is an import, or a `try` whose body has one."""
    body = line.body.body if isinstance(line, cst.Try) else [line]
    return any(m.matches(statement, m.SimpleStatementLine([m.Import() | m.ImportFrom()])) for statement in body)


class _UsedNames(cst.CSTVisitor):
    """A visitor that collects the names a module uses. Imports and `name = None` do not count as uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Name):
            self.used.add(node.value)
        if isinstance(node, cst.Attribute | cst.Arg):
            node.value.visit(self)  # `attr` of `x.attr` and `key` of `f(key=x)` are no uses of variables
        is_none = m.Assign(targets=[m.AssignTarget(m.Name())], value=m.Name("None"))
        return not isinstance(node, cst.Attribute | cst.Arg | _IMPORTS) and not m.matches(node, is_none)


class _Remover(cst.CSTTransformer):
    """A transformer that removes imports of the given names from the given packages, and emptied `if` and `try`."""

    def __init__(self, packages: tuple[str, ...], names: set[str]) -> None:
        super().__init__()
        self._packages, self._names = packages, names

    def on_leave(self, original: Any, updated: Any) -> Any:
        updated = super().on_leave(original, updated)
        if isinstance(updated, _IMPORTS) and not isinstance(updated.names, cst.ImportStar):
            aliases = [alias for alias in updated.names if not self._is_unused(alias, updated)]
            if aliases and len(aliases) < len(updated.names):
                aliases[-1] = aliases[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            return updated.with_changes(names=aliases) if aliases else cst.RemoveFromParent()
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

    def _is_unused(self, alias: cst.ImportAlias, statement: Any) -> bool:
        module = getattr(statement, "module", None)
        path = cst.Module([]).code_for_node(module) + "." if module is not None else ""
        name = alias.evaluated_alias or (alias.evaluated_name if path else alias.evaluated_name.partition(".")[0])
        full = f"{path}{alias.evaluated_name}."
        relative = bool(getattr(statement, "relative", ()))
        return (
            name in self._names and not relative and full.startswith(tuple(f"{package}." for package in self._packages))
        )

    def _without_try(self, updated: cst.Try) -> Any:
        """Replace a `try` that has lost its import by its other statements, if these only assign constants."""
        rest = [*updated.body.body, *(updated.orelse.body.body if updated.orelse else ())]
        constant = m.SimpleStatementLine([m.Assign(value=m.Name() | m.SimpleString() | m.Integer())])
        if not all(m.matches(statement, constant) for statement in rest):
            return updated
        rest[:1] = [statement.with_changes(leading_lines=updated.leading_lines) for statement in rest[:1]]
        return cst.FlattenSentinel(rest) if rest else cst.RemoveFromParent()
