"""Modules that stand for an extension and compile it when something of it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .builder import OpBuilder


def lazy_attributes(builder: type[OpBuilder]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a module that stands for the extension of `builder`.

    Names that begin with an underscore are not there, so that tools that look at modules compile nothing. An extension
    that cannot be loaded is an ImportError.
    """

    def get_attribute(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{builder.NAME} has no attribute {name!r}")
        try:
            module = builder().load(verbose=False)
        except Exception as error:
            raise ImportError(f"{builder.NAME} cannot be loaded: {error}", name=builder.NAME) from error
        return getattr(module, name)

    def list_attributes() -> list[str]:
        return dir(builder().load(verbose=False))

    return get_attribute, list_attributes
