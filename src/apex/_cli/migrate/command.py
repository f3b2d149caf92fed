"""`apex migrate`: read files, show or write their new code, and list the places that were not rewritten."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import libcst as cst

from ..._atomic import atomic_file
from ..console import make_console, print_json_document
from . import from_colossalai, to_apex, to_booster, to_torch
from .code import Code, Refusal
from .edits import Edits, Rewriter
from .imports import tidied
from .rules import ADVICE


@dataclass(frozen=True)
class Rewrite:
    """One pass over a file: a function that returns its edits, and the packages whose unused imports it removes."""

    edits: Callable[[Code, str], Edits]  # of a parsed file and the device type for torch.autocast
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A value of `--to`, or of `--from`: the files that it concerns, and the passes that rewrite them."""

    words: tuple[bytes, ...]  # files without any of these words are not parsed
    rewrites: tuple[Rewrite, ...]  # each works on the result of the one before


_TO_APEX = Rewrite(lambda code, _: to_apex.convert(code), (*to_apex.PACKAGES, "torch.autocast"))
_TO_BOOSTER = Rewrite(lambda code, _: to_booster.convert(code), ("apex.amp",))
TARGETS = {
    "torch": Target((b"apex",), (Rewrite(to_torch.convert, ("apex",)),)),
    "apex": Target((b"autocast", b"GradScaler"), (_TO_APEX,)),
    "booster": Target((b"apex", b"autocast", b"GradScaler"), (_TO_APEX, _TO_BOOSTER)),
    "from colossalai": Target((b"colossalai",), (Rewrite(lambda code, _: from_colossalai.convert(code), ()),)),
}


@dataclass
class Migrated:
    """A file's code before and after the rewrite, and the places that were not rewritten."""

    path: str
    before: bytes
    after: bytes
    refused: list[Refusal] = field(default_factory=list)

    @property
    def diff(self) -> str:
        """The change in the unified format of `diff -u`."""
        old, new = (text.decode(errors="replace").splitlines(keepends=True) for text in (self.before, self.after))
        lines = difflib.unified_diff(old, new, self.path, self.path)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def run_migrate(paths: list[Path], *, to: str, device: str, write: bool, check: bool, as_json: bool) -> int:
    """Rewrite files, or show the changes; return the exit status.

    The status is 2 if a place was not rewritten, 1 if `check` is set and a file would change, else 0.
    """
    written = write and not check
    results = [migrate(path, to=to, device=device) for path in python_files(paths)]
    results = [result for result in results if result.refused or result.before != result.after]
    changed = [result for result in results if result.before != result.after]
    for result in changed if written else []:
        with atomic_file(Path(result.path).resolve()) as file:
            file.write(result.after)
    if as_json:
        files = [
            {"path": result.path, "changed": result in changed, "diff": result.diff}
            | {"refused": [asdict(refusal) for refusal in result.refused]}
            for result in results
        ]
        print_json_document({"to": to, "written": written, "files": files})
    else:
        _print(results, changed, written)
    return 2 if any(result.refused for result in results) else int(check and bool(changed))


def _print(results: list[Migrated], changed: list[Migrated], written: bool) -> None:
    console, messages = make_console(), make_console(stderr=True)
    for result in changed:
        console.out(f"wrote {result.path}\n" if written else result.diff, end="")
    for result in results:
        for refusal in result.refused:
            messages.print(f"{result.path}:{refusal.line}: {refusal.rule}: {refusal.advice}", soft_wrap=True)
    refusals = sum(len(result.refused) for result in results)
    if not results:
        messages.print("nothing to rewrite")
    elif refusals:
        files = "1 file" if len(changed) == 1 else f"{len(changed)} files"
        places = "1 place left as it is" if refusals == 1 else f"{refusals} places left as they are"
        change = "rewritten" if written else "changes" if len(changed) == 1 else "change"
        messages.print(f"{files} {change}, {places}")


def python_files(paths: list[Path]) -> list[Path]:
    """Return the named files, and the Python files of named folders without hidden files and links.

    A link in a folder may lead to a file outside of it, which the user has not asked to change.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{str(path)!r} does not exist")
        if not path.is_dir():
            files.append(path)
            continue
        root = path.resolve()
        for file in sorted(path.rglob("*.py")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            is_inside = file.is_file() and not file.is_symlink() and file.resolve().is_relative_to(root)
            files += [file] if is_inside and not is_hidden else []
    return list(dict.fromkeys(files))


def migrate(path: Path, *, to: str, device: str = "cuda") -> Migrated:
    """Return the new code of a file; write nothing.

    If `to` has several passes and one of them refuses a place, the file stays as it is.
    """
    source = path.read_bytes()
    result, target = Migrated(str(path), source, source), TARGETS[to]
    if b"\0" in source:  # the words below may be in it in another encoding, such as UTF-16
        problem = "it has zero bytes, as binary files and text in UTF-16 have"
        result.refused = [Refusal(1, "syntax", ADVICE["syntax"].format(problem=problem))]
        return result
    if not any(word in source for word in target.words):
        return result
    try:
        for rewrite in target.rewrites:
            code = Code(result.after)
            result.after = _rewritten(code, rewrite.edits(code, device), rewrite.packages)
            result.refused = sorted(code.refusals, key=lambda refusal: refusal.line)
            if result.refused:
                result.after = result.after if len(target.rewrites) == 1 else source
                break
    except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError) as error:
        line, problem = getattr(error, "raw_line", 1), getattr(error, "message", str(error)).splitlines()[0]
        result.refused = [Refusal(line, "syntax", ADVICE["syntax"].format(problem=problem))]
    return result


def _rewritten(code: Code, edits: Edits, packages: tuple[str, ...]) -> bytes:
    """Return the source after the edits, with its imports adjusted."""
    if not edits:
        return code.module.bytes
    module = code.module.visit(Rewriter(code.module, edits))
    return tidied(code.module, module, packages, edits.needed).bytes
