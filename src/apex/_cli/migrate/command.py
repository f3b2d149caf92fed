"""`apex migrate`: reads files, shows or writes what they become, and says what was left as it is."""

from __future__ import annotations

import difflib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import libcst as cst

from ..._atomic import atomic_file
from ..console import make_console, print_json_document
from . import to_apex, to_booster, to_torch
from .code import Code, Refusal
from .edits import Edits, Rewriter
from .imports import tidied
from .rules import ADVICE


@dataclass
class Migrated:
    """What becomes of a file."""

    path: str
    before: bytes
    after: bytes
    refused: list[Refusal] = field(default_factory=list)

    @property
    def diff(self) -> str:
        old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, self.path, self.path)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def run_migrate(paths: list[Path], *, to: str, device: str, write: bool, check: bool, as_json: bool) -> int:
    """Rewrites files, or shows how; returns 2 if a place was left as it is, 1 with `check` if files change, else 0."""
    results = [migrate(path, to=to, device=device) for path in found_files(paths)]
    results = [each for each in results if each.refused or each.before != each.after]
    changed = [each for each in results if each.before != each.after]
    if write and not check:
        for each in changed:
            with atomic_file(Path(each.path).resolve()) as file:
                file.write(each.after)
    refused = any(each.refused for each in results)
    if as_json:
        files = [
            {"path": each.path, "changed": each in changed, "diff": each.diff, "refused": [*map(asdict, each.refused)]}
            for each in results
        ]
        print_json_document({"to": to, "written": write and not check, "files": files})
    else:
        _print(results, changed, write and not check)
    return 2 if refused else int(check and bool(changed))


def _print(results: list[Migrated], changed: list[Migrated], written: bool) -> None:
    console, messages = make_console(), make_console(stderr=True)
    for each in changed:
        console.out(f"wrote {each.path}\n" if written else each.diff, end="")
    for each in results:
        for refusal in each.refused:
            messages.print(f"{each.path}:{refusal.line}: {refusal.rule}: {refusal.advice}", soft_wrap=True)
    refusals = sum(len(each.refused) for each in results)
    if not results:
        messages.print("nothing to rewrite")
    elif refusals:
        files = "1 file" if len(changed) == 1 else f"{len(changed)} files"
        places = "1 place left as it is" if refusals == 1 else f"{refusals} places left as they are"
        change = "rewritten" if written else "changes" if len(changed) == 1 else "change"
        messages.print(f"{files} {change}, {places}")


def found_files(paths: list[Path]) -> list[Path]:
    """Return the files that are named, and the Python files in folders, without hidden files and links.

    A link in a folder may lead to a file elsewhere, which was not asked to be written.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{str(path)!r} does not exist")
        inner = [path]
        if path.is_dir():
            root = path.resolve()
            inner = [each for each in sorted(path.rglob("*.py")) if each.is_file() and not each.is_symlink()]
            inner = [each for each in inner if each.resolve().is_relative_to(root)]
        hidden = [any(part.startswith(".") for part in each.relative_to(path).parts) for each in inner]
        found.update(dict.fromkeys(each for each, is_hidden in zip(inner, hidden, strict=True) if not is_hidden))
    return list(found)


def migrate(path: Path, *, to: str, device: str = "cuda") -> Migrated:
    """What a file becomes; nothing is written."""
    source = path.read_bytes()
    result = Migrated(str(path), source, source)
    words = {
        "torch": (b"apex",),
        "apex": (b"autocast", b"GradScaler"),
        "booster": (b"apex", b"autocast", b"GradScaler"),
    }
    if not any(word in source for word in words[to]):
        return result
    try:
        code = Code(source)
        if to == "torch":
            result.after = _rewritten(code, to_torch.convert(code, device), ("apex",))
        else:
            result.after = _rewritten(code, to_apex.convert(code), (*to_apex.PACKAGES, "torch.autocast"))
        if to == "booster" and not code.refusals:
            code = Code(result.after)
            result.after = _rewritten(code, to_booster.convert(code), ("apex.amp",))
            result.after = source if code.refusals else result.after
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        line, problem = getattr(error, "raw_line", 1), getattr(error, "message", str(error)).splitlines()[0]
        result.refused = [Refusal(line, "syntax", ADVICE["syntax"].format(problem=problem))]
        return result
    result.refused = sorted(code.refusals, key=lambda refusal: refusal.line)
    return result


def _rewritten(code: Code, edits: Edits, packages: tuple[str, ...]) -> bytes:
    if not edits:
        return code.module.bytes
    module = code.module.visit(Rewriter(code.module, edits))
    return tidied(code.module, module, packages, edits.needed).bytes
