"""The rules of the house, as tests: lean import, one-way imports, Triton in one place, files that stay readable."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "apex"
FILES = sorted(SOURCE.rglob("*.py"))

# What `import apex` may cost beyond `import torch`, in seconds of CPU time; the design allows 0.3.
IMPORT_BUDGET = 0.3
LINES_LIMIT = 500


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, at any depth of its code."""
    package = path.relative_to(SOURCE).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
    return names


def below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


def run_python(code: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_is_lean() -> None:
    """CPU time, not wall time: a busy machine must not fail it. The limit is the design's, not a benchmark."""
    report = run_python(
        "import json, sys, time, torch\n"
        "start = time.process_time()\n"
        "import apex\n"
        "spent = time.process_time() - start\n"
        "print(json.dumps({'spent': spent, 'triton': 'triton' in sys.modules, 'cuda': torch.cuda.is_initialized()}))"
    )
    assert report["spent"] < IMPORT_BUDGET
    assert not report["triton"]
    assert not report["cuda"]


@pytest.mark.parametrize("package", ["amp", "contrib.optimizers", "normalization", "optimizers", "parallel"])
def test_no_package_imports_the_compiler_or_triton(package: str) -> None:
    """PyTorch's compiler takes 2 seconds to import, and a script that compiles nothing never needs it."""
    report = run_python(
        f"import json, sys, torch, apex.{package}\n"
        "print(json.dumps([name for name in ('torch._dynamo', 'triton') if name in sys.modules]))"
    )
    assert report == []


def test_subpackages_are_reachable_after_a_bare_import() -> None:
    report = run_python(
        "import json, sys, apex\n"
        "names = [apex.normalization.FusedLayerNorm.__name__, apex.contrib.layer_norm.FastLayerNorm.__name__,\n"
        "         apex.ops.layer_norm.__name__]\n"
        "cli = [m for m in ('typer', 'rich', 'matplotlib', 'triton') if m in sys.modules]\n"
        "print(json.dumps({'names': names, 'cli': cli}))"
    )
    assert report == {"names": ["FusedLayerNorm", "FastLayerNorm", "layer_norm"], "cli": []}


def test_a_missing_subpackage_is_a_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        import apex.no_such_package
    import apex

    with pytest.raises(AttributeError, match="no_such_package"):
        _ = apex.no_such_package


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_triton_is_imported_below_ops_only(path: Path) -> None:
    if not path.is_relative_to(PACKAGE / "ops"):
        assert not [name for name in imported_modules(path) if below(name, "triton")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_down(path: Path) -> None:
    """compiled names -> public API -> apex.ops.<family> -> apex.ops._library, _launch, _device."""
    modules = {name for name in imported_modules(path) if below(name, "apex")}
    if path.is_relative_to(PACKAGE / "ops"):
        allowed = ("apex.ops", "apex._env", "apex._version")
        above = {name for name in modules if name != "apex" and not below(name, *allowed)}
        assert not above, f"apex.ops must not import {above}"
        family = path.relative_to(PACKAGE / "ops").parts[0]
        if family.startswith("_") and family != "__init__.py":
            others = {
                n for n in modules if below(n, "apex.ops") and n.count(".") > 1 and not n.split(".")[2].startswith("_")
            }
            assert not others, f"the kernel layer must not import the families {others}"
    elif not path.is_relative_to(PACKAGE / "_cli") and path.name != "__main__.py":
        assert not [name for name in modules if below(name, "apex._cli")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_do_not_sprawl(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_LIMIT


def is_public(path: Path) -> bool:
    parts = path.relative_to(SOURCE).parts
    return parts[:2] != ("apex", "ops") and not any(part.startswith("_") for part in parts[:-1])


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if is_public(path)],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_public_modules_name_no_device(path: Path) -> None:
    """A public module holds no device test: the dispatch below decides."""
    strings = {
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not strings & {"cuda", "cpu", "npu", "mps", "xpu", "hip"}
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not attributes & {"is_cuda", "is_npu", "is_mps", "is_xpu"}


def test_the_environment_is_read_in_one_place() -> None:
    readers = [
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert readers == ["apex/_env.py"]
