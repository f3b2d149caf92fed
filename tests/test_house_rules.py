"""The rules of the house, as tests: lean import, one-way imports, Triton in one place, files that stay readable."""

import ast
import functools
import graphlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
import torch

from tests.support.warm import run_python

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "apex"
FILES = sorted(SOURCE.rglob("*.py"))

# What `import apex` may cost beyond `import torch`, in seconds of CPU time; the design allows 0.3.
IMPORT_BUDGET = 0.3
LINES_LIMIT = 500


class Code(NamedTuple):
    """What the rules ask about a file."""

    imports: frozenset[str]
    strings: frozenset[str]
    attributes: frozenset[str]


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(code: ast.Module) -> tuple[ast.AST, ...]:
    """Return all nodes of a file, at any depth: a dozen rules look through them."""
    return tuple(ast.walk(code))


@functools.cache
def read(path: Path) -> Code:
    """Absolute names of everything a file imports, its strings and its attributes, at any depth of its code."""
    package = path.relative_to(SOURCE).with_suffix("").parts[:-1]
    imports, strings, attributes = set(), set(), set()
    for node in nodes(parsed(path)):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            imports.update({module, *(f"{module}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.add(node.value)
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
    return Code(frozenset(imports), frozenset(strings), frozenset(attributes))


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def below(name: str, *roots: str) -> bool:
    return any(name == root or name.startswith(root + ".") for root in roots)


IMPORTS = """
import importlib, json, sys, time, torch

def loaded(*names):
    return [name for name in names if name in sys.modules]

report = {}
start = time.process_time()
import apex
report["spent"] = time.process_time() - start
report["loaded"] = loaded("triton")
report["names"] = [
    apex.normalization.FusedLayerNorm.__name__, apex.contrib.layer_norm.FastLayerNorm.__name__,
    apex.ops.layer_norm.__name__
]
report["loaded by names"] = loaded("triton", "typer", "rich", "matplotlib")
report["loaded by packages"] = {}
for package in ("normalization", "optimizers", "contrib.optimizers", "amp", "parallel", "booster.plugin"):
    importlib.import_module("apex." + package)
    report["loaded by packages"][package] = loaded("torch._dynamo", "torch.distributed.fsdp", "triton")
report["cuda"] = torch.cuda.is_initialized()
print(json.dumps(report))
"""


@pytest.fixture(scope="module")
def imports() -> dict:
    """What a process finds out that imports this package, step by step; importing PyTorch takes it two seconds."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_is_lean(imports: dict) -> None:
    """CPU time, not wall time: a busy machine must not fail it. The limit is the design's, not a benchmark."""
    assert imports["spent"] < IMPORT_BUDGET
    assert imports["loaded"] == []
    assert imports["cuda"] is False


def test_no_package_imports_the_compiler_or_triton(imports: dict) -> None:
    """PyTorch's compiler takes 2 seconds to import, and a script that compiles nothing never needs it."""
    assert len(imports["loaded by packages"]) == 6
    assert not any(imports["loaded by packages"].values()), imports


def test_subpackages_are_reachable_after_a_bare_import(imports: dict) -> None:
    assert imports["names"] == ["FusedLayerNorm", "FastLayerNorm", "layer_norm"]
    assert imports["loaded by names"] == []


def test_a_missing_subpackage_is_a_module_not_found_error() -> None:
    with pytest.raises(ModuleNotFoundError):
        import apex.no_such_package
    import apex

    with pytest.raises(AttributeError, match="no_such_package"):
        _ = apex.no_such_package


def test_triton_is_imported_below_ops_only() -> None:
    above = [path for path in FILES if not path.is_relative_to(PACKAGE / "ops")]
    assert above
    assert not [name_of(path) for path in above if any(below(name, "triton") for name in read(path).imports)]


def imports_that_go_up(path: Path) -> set[str]:
    """compiled names -> public API -> apex.ops.<family> -> apex.ops._library, _launch, _device."""
    modules = {name for name in read(path).imports if below(name, "apex")}
    if path.is_relative_to(PACKAGE / "ops"):
        allowed = ("apex.ops", "apex._env", "apex._version")
        above = {name for name in modules if name != "apex" and not below(name, *allowed)}
        family = path.relative_to(PACKAGE / "ops").parts[0]
        if family.startswith("_") and family != "__init__.py":
            above |= {
                n for n in modules if below(n, "apex.ops") and n.count(".") > 1 and not n.split(".")[2].startswith("_")
            }
        return above
    if not path.is_relative_to(PACKAGE / "_cli") and path.name != "__main__.py":
        return {name for name in modules if below(name, "apex._cli")}
    return set()


def test_imports_go_down() -> None:
    found = {name_of(path): imports_that_go_up(path) for path in FILES}
    assert not {path: modules for path, modules in found.items() if modules}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(code: ast.Module, path: Path, modules: set[str]) -> set[str]:
    """The modules of this package that a file imports, at any depth of its code and for types alone as well.

    `from . import name` imports the module `name` where there is one, else the package.
    """
    package = path.relative_to(SOURCE).parent.parts
    found = set()
    for node in nodes(code):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names = {f"{module}.{alias.name}" for alias in node.names}
            found.update({name if name in modules else module for name in names})
    return (found & modules) - {module_of(path)}


def test_imports_form_no_circles() -> None:
    modules = {module_of(path) for path in FILES}
    graph = {module_of(path): imported_modules(parsed(path), path, modules) for path in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_packages_form_no_circles() -> None:
    """Of `apex.amp`, `apex.parallel` and the like each is below or above another."""
    modules = {module_of(path) for path in FILES}
    graph: dict[str, set[str]] = {}
    for path in FILES:
        package = ".".join(module_of(path).split(".")[:2])
        found = {".".join(name.split(".")[:2]) for name in imported_modules(parsed(path), path, modules)}
        graph.setdefault(package, set()).update(found - {package, "apex"})
    graphlib.TopologicalSorter(graph).prepare()


def test_the_rule_about_circles_sees_imports_inside_of_functions() -> None:
    path = PACKAGE / "amp" / "_amp_state.py"
    code = ast.parse("def f():\n    from . import scaler\n    from .frontend import Properties\n")
    assert imported_modules(code, path, {"apex.amp", "apex.amp.scaler", "apex.amp.frontend"}) == {
        "apex.amp.scaler",
        "apex.amp.frontend",
    }


def test_files_do_not_sprawl() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {path: count for path, count in lines.items() if count > LINES_LIMIT}


def is_public(path: Path) -> bool:
    parts = path.relative_to(SOURCE).parts
    return parts[:2] != ("apex", "ops") and not any(part.startswith("_") for part in parts[:-1])


def devices_named(path: Path) -> frozenset[str]:
    tests = read(path).attributes & {"is_cuda", "is_npu", "is_mps", "is_xpu"}
    return tests | (read(path).strings & {"cuda", "cpu", "npu", "mps", "xpu", "hip"})


def test_no_section_banners() -> None:
    """A file that needs headings inside answers several questions, and becomes several files."""
    banner = re.compile(r"^\s*#.*(-{8,}|={8,})\s*$", re.MULTILINE)
    tests = Path(__file__).resolve().parent
    assert [path for path in (*FILES, *tests.rglob("*.py")) if banner.search(path.read_text())] == []


def test_public_modules_name_no_device() -> None:
    """A public module holds no device test: the dispatch below decides."""
    public = [path for path in FILES if is_public(path)]
    assert public
    assert not {name_of(path): devices_named(path) for path in public if devices_named(path)}


def test_the_environment_is_read_in_one_place() -> None:
    readers = [name_of(path) for path in FILES if read(path).attributes & {"environ", "getenv"}]
    assert readers == ["apex/_env.py"]


# Functions of PyTorch's that make process groups with a timeout of 30 minutes, and meshes with such groups.
GROUP_MAKERS = re.compile("new_group|new_subgroups.*|split_group|init_device_mesh|DeviceMesh|_new_process_group_helper")


def groups_made(code: ast.Module) -> list[int]:
    """Return the lines that call a function of PyTorch's that makes process groups; methods of meshes make none."""
    names = [
        (node.lineno, getattr(node.func, "attr", getattr(node.func, "id", "")))
        for node in nodes(code)
        if isinstance(node, ast.Call)
    ]
    return [line for line, name in names if GROUP_MAKERS.fullmatch(name)]


def test_process_groups_are_made_in_one_place() -> None:
    """There they get the timeout of the default group, so that a rank that stops is noticed in time."""
    found = {name_of(path): groups_made(parsed(path)) for path in FILES}
    assert list({path: lines for path, lines in found.items() if lines}) == ["apex/_distributed/groups.py"]


@pytest.mark.parametrize("code", ["dist.new_group()", "init_device_mesh(x, (2,))", "DeviceMesh(x, y)"])
def test_the_rule_about_process_groups_can_fail(code: str) -> None:
    assert groups_made(ast.parse(f"x = [\n  {code}]")) == [2]
    assert groups_made(ast.parse("make_group()\nDeviceMesh.from_group(group, 'cpu')")) == []


# What makes tensors on the default device, or of the default dtype, where none is named.
FACTORIES = re.compile(
    "arange|as_tensor|asarray|empty|empty_permuted|empty_strided|eye|full|(lin|log)space|normal|ones|rand|randint|randn|"
    "randperm|range|scalar_tensor|sparse_.*|tensor|(tril|triu)_indices|zeros|.*_window|[A-Z].*Tensor|Tensor"
)


def follows_defaults(path: Path) -> bool:
    """Commands (`apex bench`, `doctor`, `demo`) run in processes of their own, in which nobody sets defaults."""
    return path.is_relative_to(PACKAGE / "_bench") or path.is_relative_to(PACKAGE / "_cli") or path.stem == "self_check"


def made_without_device_or_dtype(code: ast.Module) -> list[int]:
    """Lines that call a factory of PyTorch's without both; a module's parameters follow defaults as `torch.nn`'s do."""
    calls = [node for node in nodes(code) if isinstance(node, ast.Call)]
    of_parameters = {
        id(value)
        for call in calls
        if "Parameter" in (getattr(call.func, "id", ""), getattr(call.func, "attr", ""))
        for value in call.args
    }
    found = []
    for call in calls:
        named = {keyword.arg for keyword in call.keywords}
        if (
            isinstance(call.func, ast.Attribute)
            and getattr(call.func.value, "id", "") == "torch"
            and FACTORIES.fullmatch(call.func.attr)
            and id(call) not in of_parameters
            and not named >= {"device", "dtype"}
            and None not in named  # **options
        ):
            found.append(call.lineno)
    return found


def test_tensors_name_their_device_and_dtype() -> None:
    """Users may set defaults (`torch.set_default_device`, `torch.set_default_dtype`) that must change no result."""
    found = {name_of(path): made_without_device_or_dtype(parsed(path)) for path in FILES if not follows_defaults(path)}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("code", ["torch.zeros(1)", "torch.tensor(1, device=x)", "torch.empty(2, dtype=torch.int32)"])
def test_the_rule_about_defaults_can_fail(code: str) -> None:
    assert made_without_device_or_dtype(ast.parse(f"x = [\n  {code}]")) == [2]
    assert made_without_device_or_dtype(ast.parse(f"x = nn.Parameter({code})")) == []


def test_the_default_device_is_found_in_one_way() -> None:
    """`torch.get_default_device` of PyTorch 2.6 raises after `set_default_device(None)`."""
    assert [name_of(path) for path in FILES if "get_default_device(" in path.read_text(encoding="utf-8")] == []


def private_attributes(code: ast.Module, name: str) -> list[str]:
    """Return the private attributes of a variable `name` that a file uses."""
    attributes = [node for node in nodes(code) if isinstance(node, ast.Attribute)]
    return [node.attr for node in attributes if getattr(node.value, "id", "") == name and node.attr.startswith("_")]


def test_amp_uses_the_methods_of_a_loss_scaler() -> None:
    """The scaler alone owns scale and overflow flag, and knows nothing of the optimizers that amp handles."""
    others = [PACKAGE / "amp" / name for name in ("handle.py", "_combine_grad.py", "_process_optimizer.py", "opt.py")]
    assert not {name_of(path): found for path in others if (found := private_attributes(parsed(path), "scaler"))}
    assert "_amp_stash" not in read(PACKAGE / "amp" / "scaler.py").attributes
    assert private_attributes(ast.parse("scaler._scale.to(x)"), "scaler") == ["_scale"]


def is_ours(frame: FrameType) -> bool:
    return SOURCE in Path(frame.f_code.co_filename).parents


def callers(frame: FrameType) -> Iterator[FrameType]:
    """Yield the frames that led to a call, innermost first."""
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def files_passed(function: Callable[[], object]) -> set[str]:
    """Return the files that a reader opens to follow a call down to the launch of its kernels.

    A file counts if a function in it calls a function in another file of ours, or launches a kernel. Files that only
    answer a question, such as a launch rule, do not count, nor do imports. Kernels are not run, and tensors that they
    would write are left as they are.
    """
    from apex.ops._launch import record_launches

    passed = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not is_ours(frame):
            return
        above = list(callers(frame))
        if any(caller.f_code.co_filename.startswith("<frozen importlib") for caller in above):
            return
        path = name_of(Path(frame.f_code.co_filename))
        if path == "apex/ops/_launch.py":
            passed.add(path)
        caller = next(filter(is_ours, above), frame)
        if caller.f_code.co_filename != frame.f_code.co_filename:
            passed.add(name_of(Path(caller.f_code.co_filename)))

    with record_launches():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return passed


def cold_calls(device: str) -> dict[str, list[str]]:
    """Return the files that the first calls of a process pass; called in a process of its own."""
    from apex import amp, normalization, optimizers
    from apex.ops import _library

    found = {}
    x = torch.ones(4, 16, device=device)
    norm = normalization.FusedLayerNorm(16).requires_grad_(False).to(device)
    param = torch.nn.Parameter(torch.ones(16, device=device))
    param.grad = torch.ones(16, device=device)
    adam = optimizers.FusedAdam([param])
    with _library.implementation("triton"):
        found["layer norm"] = files_passed(lambda: norm(x))
        found["FusedAdam.step"] = files_passed(adam.step)
        for level in ("O2", "O5"):
            model = torch.nn.Linear(16, 1).to(device)
            model, optimizer = amp.initialize(
                model, optimizers.FusedAdam(model.parameters()), opt_level=level, verbosity=0
            )
            loss = model(x).sum()

            def train() -> None:
                with amp.scale_loss(loss, optimizer) as scaled:  # noqa: B023
                    scaled.backward()
                optimizer.step()  # noqa: B023
                optimizer.zero_grad()  # noqa: B023

            found[f"scale_loss and step, {level}"] = files_passed(train)
            amp.shutdown()
    return {name: sorted(files) for name, files in found.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_reader_of_a_cold_call_opens_few_files(device: str) -> None:
    script = f"import json; from tests.test_house_rules import cold_calls; print(json.dumps(cold_calls({device!r})))"
    root = Path(__file__).resolve().parents[1]
    result = run_python("-c", script, cwd=root, environment=os.environ)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    most = {"layer norm": 7, "FusedAdam.step": 8, "scale_loss and step, O2": 12, "scale_loss and step, O5": 12}
    assert found.keys() == most.keys()
    assert not {name: files for name, files in found.items() if len(files) > most[name]}, found
    assert all("apex/ops/_launch.py" in files for files in found.values())
