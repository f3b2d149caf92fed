"""`python -m apex.parallel._recorded [--module] SCRIPT [ARGUMENTS]`: run a script and record the error that ends it.

torchrun names a file for each process. If an error is recorded there, the launcher can show the first one: without it,
only the exit status of the process is known.
"""

from __future__ import annotations

import json
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

from .. import _env

# Files whose frames precede the script's frames.
_LAUNCHER = (__file__, runpy.__file__, "<frozen runpy>")


def run(arguments: list[str]) -> None:
    """Run a script, or a module after `--module`, as Python itself would."""
    sys.excepthook = _record
    is_module = arguments[:1] == ["--module"]
    sys.argv = arguments[is_module:]
    script = sys.argv[0]
    if is_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(script).resolve().parent)
    main: Any = sys.modules["__main__"]
    code = compile(Path(script).read_bytes(), script, "exec")
    main.__dict__.update(__file__=script, __spec__=None, __doc__=_docstring(code), __package__=None, __cached__=None)
    exec(code, main.__dict__)


def _docstring(code: CodeType) -> str | None:
    first = code.co_consts[0] if code.co_consts else None
    return first if isinstance(first, str) else None


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an error to torchrun's file, and print it as Python does, without the frames of this module."""
    now = time.time_ns()
    while trace is not None and trace.tb_frame.f_code.co_filename in _LAUNCHER:
        trace = trace.tb_next
    error.__traceback__ = trace
    path = _env.error_file()
    if path is not None:
        details = {
            "py_callstack": "".join(traceback.format_exception(kind, error, trace)),
            "timestamp": str(now // 10**9),
            "nanoseconds": now,
        }
        path.write_text(json.dumps({"message": {"message": f"{kind.__name__}: {error}", "extraInfo": details}}))
    sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    from apex.parallel._recorded import run as run_recorded

    run_recorded(sys.argv[1:])
