"""Makes Triton's interpreter quicker, for tests with many programs.

Whenever one interpreted function calls another, the interpreter looks through all of `triton.language` and replaces its
functions by interpreted ones, which they are already: a third of the time of a kernel that calls functions in a loop.
Here it does so once per launch for every set of modules that functions see.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Takes effect for the whole process; does nothing where the interpreter is built in another way."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor")):
        return
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[frozenset[str]] = set()

    @functools.cache
    def languages(function: Callable[..., Any]) -> frozenset[str]:
        modules = (interpreter.tl, interpreter.tl.core)
        return frozenset(m.__name__ for m in modules if any(value is m for value in function.__globals__.values()))

    def replace_once(function: Callable[..., Any]) -> Any:
        seen = languages(function)
        if seen in replaced:
            return interpreter._LangPatchScope()
        replaced.add(seen)
        return replace(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_anew  # type: ignore[method-assign]
