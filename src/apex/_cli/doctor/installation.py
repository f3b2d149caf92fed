"""Check that `import apex` and the compiled names give this package, and look for other packages called `apex`.

Upstream's distribution is called `apex` too, and PyPI's `apex` is an unrelated web toolkit.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from ..._version import __version__
from .findings import Finding, Severity, import_problem

PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class DistributionFacts:
    """An installed distribution with the name `apex`."""

    version: str
    location: str
    summary: str
    ours: bool


@dataclass(frozen=True)
class CompiledName:
    """A top-level module that replaces a compiled module of upstream, and the file that an import of it finds."""

    name: str
    location: str | None
    ours: bool


@dataclass(frozen=True)
class Installation:
    """The folder of this package, the file that `import apex` finds, and other packages and modules of its names."""

    package: str
    resolves_to: str | None
    others: list[str]
    distributions: list[DistributionFacts]
    compiled_names: list[CompiledName]


def inspect_installation(import_names: bool = True) -> tuple[Installation, list[Finding]]:
    """Return the facts about the installation, and findings. Import our compiled names if `import_names`."""
    distributions = [_describe(distribution) for distribution in _distributions()]
    resolved = _origin(_fresh_spec("apex"))
    others = _search(sys.path)
    names = [_compiled_name(path) for path in _compiled_files()]
    installed = any(distribution.ours for distribution in distributions)
    findings = [
        *_judge_import(resolved, others),
        *_judge_distributions(distributions),
        *_judge_names(names, installed, import_names),
    ]
    return Installation(str(PACKAGE), _text(resolved), [str(path) for path in others], distributions, names), findings


def _distributions() -> list[importlib.metadata.Distribution]:
    """Return every distribution called `apex`; the first one is used by `importlib.metadata.version`."""
    unique: dict[Path, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions(name="apex"):
        unique.setdefault(_location(distribution), distribution)
    return list(unique.values())


def _location(distribution: importlib.metadata.Distribution) -> Path:
    return Path(str(distribution.locate_file(""))).resolve()


def _describe(distribution: importlib.metadata.Distribution) -> DistributionFacts:
    ours = any(entry.value == "apex._cli:main" for entry in distribution.entry_points)
    summary = distribution.metadata.json.get("summary", "")
    return DistributionFacts(distribution.version, str(_location(distribution)), str(summary), ours)


def _fresh_spec(name: str) -> ModuleSpec | None:
    """Return the module spec that importing `name` would find in a new process, or None."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, None) if hasattr(finder, "find_spec") else None
        if spec is not None:
            return spec
    return None


def _origin(spec: ModuleSpec | None) -> Path | None:
    """Return the file of a module or package; None for a namespace package, which any other package overrides."""
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _is_this_package(origin: Path) -> bool:
    return origin.parent == PACKAGE


def _search(folders: Iterable[str]) -> list[Path]:
    """Return other packages called `apex` in these folders."""
    origins = (_origin(PathFinder.find_spec("apex", [folder])) for folder in folders)
    return list(dict.fromkeys(path for path in origins if path is not None and not _is_this_package(path)))


def _judge_import(resolved: Path | None, others: list[Path]) -> list[Finding]:
    if resolved is None:
        return [Finding("broken", "import apex", f"finds nothing; {PACKAGE.parent} is not on the path")]
    if not _is_this_package(resolved):
        message = f"`import apex` gives {resolved} and not {PACKAGE}; uninstall that package or take it off the path"
        return [Finding("broken", "import apex", message)]
    findings = [Finding("ok", "import apex", f"gives this package, {PACKAGE}")]
    findings += [Finding("warning", "import apex", f"another apex lies beside this one, unused: {o}") for o in others]
    # A script has its own folder, often the current one, first on its path; the `apex` command does not.
    if not getattr(sys.flags, "safe_path", False):
        findings += [
            Finding("broken", "import apex", f"programs in this folder get another apex: {path}")
            for path in _search([_current_folder()])
            if path not in others
        ]
    return findings


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return os.devnull


def _judge_distributions(distributions: list[DistributionFacts]) -> list[Finding]:
    if not distributions:
        return [Finding("ok", "distribution", f"not installed, running from a source tree: {PACKAGE.parent}")]
    first, *rest = distributions
    findings = []
    if not first.ours:
        findings.append(Finding("broken", "distribution", f"{_foreign(first)}; remove it with `pip uninstall apex`"))
    elif first.version != __version__:
        message = f"apex {first.version} is installed in {first.location}, but {__version__} is running; install again"
        findings.append(Finding("broken", "distribution", message))
    else:
        findings.append(Finding("ok", "distribution", f"apex {first.version} is installed in {first.location}"))
    for other in rest:
        message = f"also apex {other.version} in {other.location}" if other.ours else _foreign(other)
        findings.append(Finding("warning", "distribution", message))
    return findings


def _foreign(distribution: DistributionFacts) -> str:
    summary = f" ({distribution.summary})" if distribution.summary else ""
    return f"another project's apex {distribution.version}{summary} is installed in {distribution.location}"


def _compiled_files() -> list[Path]:
    """Return the files of the compiled names: a folder in a source tree, top-level modules of an installation."""
    folder = PACKAGE.parent / "compiled_names"
    if folder.is_dir():
        return sorted(folder.glob("*.py"))
    recorded = (
        PACKAGE.parent / file.name
        for distribution in _distributions()
        if _describe(distribution).ours and _location(distribution) == PACKAGE.parent
        for file in distribution.files or ()
        if len(file.parts) == 1 and file.suffix == ".py"
    )
    return sorted(recorded)


def _compiled_name(path: Path) -> CompiledName:
    origin = _origin(_fresh_spec(path.stem))
    return CompiledName(path.stem, _text(origin), origin == path)


def _judge_names(names: list[CompiledName], installed: bool, import_names: bool) -> list[Finding]:
    """Return a finding for each compiled name with a problem, and one for all the others together."""
    findings = []
    for name in names:
        if name.location is None:
            remedy = "install again" if installed else "in a source tree, put its folder compiled_names on the path"
            severity: Severity = "broken" if installed else "warning"
            findings.append(Finding(severity, name.name, f"cannot be imported; {remedy}"))
        elif not name.ours:
            message = f"comes from {Path(name.location).parent}, not from this package; uninstall the compiled apex"
            findings.append(Finding("broken", name.name, message))
        elif import_names and (problem := import_problem(name.name)) is not None:
            findings.append(Finding("broken", name.name, problem))
    right = len(names) - len(findings)
    if right:
        findings.append(Finding("ok", "compiled names", f"{right} of {len(names)} come from this package"))
    return findings
