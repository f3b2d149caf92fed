"""From Colossal-AI to apex: the package's name is replaced, and names without a counterpart are listed."""

from __future__ import annotations

import importlib

import libcst as cst
from libcst import matchers as m

from ..._refused import reason_for
from .code import Code, Node
from .edits import Edits

_OLD, _NEW = "colossalai", "apex"


def convert(code: Code) -> Edits:
    """Return the edits that replace the package's name in imports and uses; refuse imports of missing names."""
    edits = Edits()
    for node in code.find(code.module, m.Name(_OLD)):
        parent = code.parent(node)
        is_attribute = isinstance(parent, cst.Attribute) and parent.attr is node
        is_keyword = isinstance(parent, cst.Arg) and parent.keyword is node
        if not is_attribute and not is_keyword:
            edits.expressions[node] = _NEW
    for statement in code.find(code.module, m.ImportFrom() | m.Import()):
        for name in _imported(code, statement):
            reason = _problem(name)
            if reason is not None:
                code.refuse(statement, "no-counterpart", reason=reason)
    return edits


def _imported(code: Code, statement: Node) -> list[str]:
    """Return the paths below the package that an import statement names."""
    if isinstance(statement, cst.Import):
        paths = [code.text(alias.name) for alias in statement.names]
    elif statement.module is None or statement.relative or isinstance(statement.names, cst.ImportStar):
        return []
    else:
        paths = [f"{code.text(statement.module)}.{code.text(alias.name)}" for alias in statement.names]
    return [path.removeprefix(f"{_OLD}.") for path in paths if path.startswith(f"{_OLD}.")]


def _problem(name: str) -> str | None:
    """Return why `apex.NAME` cannot be imported, or None if it can."""
    reason = reason_for(name)
    if reason is None and not _exists(name):
        return f"colossalai.{name} has no counterpart in apex"
    # A refused path may have parts that exist, such as fx.is_compatible_with_meta.
    return None if reason is not None and _exists(name) else reason


def _exists(name: str) -> bool:
    """Return whether `apex.NAME` is a module or a member of one."""
    path, _, member = f"{_NEW}.{name}".rpartition(".")
    try:
        return hasattr(importlib.import_module(path), member) or bool(importlib.import_module(f"{path}.{member}"))
    except ImportError:
        return False
