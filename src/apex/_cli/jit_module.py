"""`apex jit-module`: write the two files that compile a user's extension at its first use."""

from __future__ import annotations

import json
import keyword
from collections.abc import Sequence
from pathlib import Path

BUILDER = '''"""Builder of the extension `{name}`; apex.op_builder documents further methods."""

from apex.op_builder import {base}


class {builder}({base}):
    BUILD_VAR = "APEX_BUILD_{upper}"
    NAME = "{name}"

    def absolute_name(self):
        return self.NAME

    def sources(self):
        """Return the source files, relative to this file."""
        return {sources}
'''

LOADER = '''"""The extension `{name}`, compiled and loaded when an attribute of it is first read."""

from {dot}{name}_builder import {builder}

from apex.op_builder import lazy_attributes

__getattr__, __dir__ = lazy_attributes({builder})
'''


def write_module(name: str, sources: Sequence[str], *, gpu: bool, folder: Path) -> list[Path]:
    """Write NAME_builder.py and NAME.py to `folder` and return their paths; existing files raise an error."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} cannot be the name of a module; use letters, digits and underscores")
    if not all(sources):
        raise ValueError("name at least one source, such as --source csrc/op.cpp")
    paths = [folder / f"{name}_builder.py", folder / f"{name}.py"]
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise FileExistsError(f"{existing[0]} exists already; remove it or choose another name")
    words = {
        "name": name,
        "upper": name.upper(),
        "builder": "".join(part.capitalize() for part in name.split("_")) + "Builder",
        "base": "CUDAOpBuilder" if gpu else "CPUOpBuilder",
        "dot": "." if (folder / "__init__.py").exists() else "",
        "sources": "[" + ", ".join(json.dumps(source, ensure_ascii=False) for source in sources) + "]",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for path, template in zip(paths, (BUILDER, LOADER), strict=True):
        path.write_text(template.format(**words), encoding="utf-8")
    return paths
