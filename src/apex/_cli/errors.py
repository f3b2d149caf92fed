"""Error messages of all commands: each ends with a line that gives a hint.

A request that cannot be met is a `typer.BadParameter`, raised from the error that tells the reason if there is one. It
ends with status 2, like a package that does not import. Any other exception is printed as a traceback and a hint.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

from .console import make_console

# click's UsageError. Typer may bundle its own click, without exporting this class.
_UsageError: Any = typer.BadParameter.__bases__[0]

_OPTION_HINTS = {
    "--device": "`apex doctor` lists the devices here; without --device a GPU is taken if there is one, else the CPU",
    "--gpu": "--gpu sm_90 compiles for an H100 or H200, with no GPU here; `apex doctor` says why there is none",
    "APEX_IMPL": "unset APEX_IMPL, or set it to auto; `apex doctor` says what runs here and why",
}
_PICTURES = (".png", ".svg", ".pdf")


@contextlib.contextmanager
def as_bad_parameter(*kinds: type[Exception], option: str | None = None) -> Iterator[None]:
    """Turn exceptions of these kinds into a `typer.BadParameter`, of an option if it is given."""
    try:
        yield
    except kinds as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def check_picture(path: Path) -> None:
    """Raise a `typer.BadParameter` of `--plot` if a picture cannot be written to `path`; called before long work."""
    folder = path.resolve().parent
    problems = {
        f"{str(path)!r} does not end in one of {', '.join(_PICTURES)}": path.suffix.lower() not in _PICTURES,
        f"{str(path)!r} is a folder": path.is_dir(),
        f"the folder {str(folder)!r} does not exist": not folder.is_dir(),
        f"{str(path)!r} cannot be written": not os.access(path if path.exists() else folder, os.W_OK),
    }
    for problem, is_so in problems.items():
        if is_so:
            raise typer.BadParameter(problem, param_hint="--plot")


class Commands(TyperGroup):
    """The group of `apex` commands; its errors end with a hint."""

    def main(self, *args: Any, **options: Any) -> Any:
        try:
            status = super().main(*args, **{**options, "standalone_mode": False})
        except _UsageError as error:
            status = _refuse(error)
        except typer.Abort:
            status = _say("apex: interrupted", "`apex` shows the commands", 1)
        except ImportError as error:
            status = _say(f"apex: {type(error).__name__}: {error}", _hint(error, "", None), 2)
        except SystemExit as error:  # from torchrun, which has already printed the problem
            status = _say("", "`apex run --help` shows its options", 2) if error.code == 2 else error.code
        except Exception:
            traceback.print_exc()
            status = _say("", "this was not expected; `apex doctor` says what is installed and whether it works", 1)
        sys.exit(status)

    def resolve_command(self, context: Any, arguments: list[str]) -> Any:
        name = arguments[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            names = [known for known in self.list_commands(context) if not self.commands[known].hidden]
            near = difflib.get_close_matches(name, names, 1, 0.5)
            hint = f"did you mean `apex {near[0]}`?" if near else f"the commands are {', '.join(names)}"
            raise typer.Exit(_say(f"apex: there is no command {name!r}", hint, 2))
        return super().resolve_command(context, arguments)


def _refuse(error: Any) -> int:
    """Print the message and hint of a request that cannot be met; return the exit status."""
    names_option = getattr(error, "param", None) is not None or getattr(error, "param_hint", None)
    message = error.format_message() if names_option else error.message
    command = "apex" if error.ctx is None else error.ctx.command_path
    hint = _hint(error.__cause__ or error, str(getattr(error, "param_hint", None)), error.ctx)
    return _say(f"{command}: {message}", hint, 2)


def _hint(error: BaseException, option: str, context: Any) -> str:
    """Return advice about an error of a command."""
    text = str(error)
    if option in _OPTION_HINTS:
        return _OPTION_HINTS[option]
    if isinstance(error, ModuleNotFoundError) and error.name:
        wanted = [re.fullmatch(rf"{error.name}\b.*extra == ['\"](\w+)['\"]", line) for line in _requirements()]
        extras = [f", or install apex with its extra: 'apex[{match[1]}]'" for match in wanted if match]
        return f"pip install {error.name}" + "".join(extras[:1])
    if isinstance(error, ImportError):
        return "`apex doctor` says what is installed and whether it works"
    quoted = re.search(r"'(.+?)'", text)
    if isinstance(error, FileNotFoundError) and quoted:
        path = Path(quoted[1])
        siblings = [sibling.name for sibling in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, 1)
        return f"did you mean {path.parent / near[0]}?" if near else f"paths begin at the current folder, {Path.cwd()}"
    if "no GPU" in text:
        return "`apex doctor` says why there is none"
    possible = getattr(error, "possibilities", None)
    if possible:
        return f"did you mean {' or '.join(possible)}?"
    if context is None:
        return "`apex` shows the commands"
    lists = any("--list" in parameter.opts for parameter in context.command.params)
    return f"`{context.command_path} --{'list' if lists else 'help'}` shows what it takes"


def _requirements() -> list[str]:
    """Return the requirement lines of the installed distribution; none in a source tree."""
    try:
        return importlib.metadata.requires("apex") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _say(message: str, hint: str, status: int) -> int:
    """Print a message and a hint to stderr; return `status`."""
    console = make_console(stderr=True)
    if message:
        console.print(message, style="red")
    console.print(f"hint: {hint}")
    return status
