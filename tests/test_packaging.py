"""What an installation consists of: a pure-Python wheel with the package, the compiled names and the recorded peers."""

import contextlib
import functools
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import apex
from tests.support.other_versions import pythons

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_is_pure_python(wheel: Path) -> None:
    assert wheel.name == f"apex-{apex.__version__}-py3-none-any.whl"


def test_the_wheel_holds_everything(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = REPOSITORY / "src"
    expected = {path.relative_to(sources).as_posix() for path in (sources / "apex").rglob("*.py")}
    expected.add("apex/py.typed")  # else type checkers take no types from the package
    expected |= {path.name for path in (sources / "compiled_names").glob("*.py")}
    expected |= {f"apex/_bench/peers/{path.name}" for path in (REPOSITORY / "benchmarks/peers").iterdir()}
    assert expected <= names
    other = {name for name in names - expected if ".dist-info/" not in name}
    assert not other


def test_the_wheel_names_its_command_and_its_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    folder = f"apex-{apex.__version__}.dist-info"
    assert "apex = apex._cli:main" in archive.read(f"{folder}/entry_points.txt").decode()
    metadata = archive.read(f"{folder}/METADATA").decode()
    required = {line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line}
    # Of triton, PyTorch's GPU builds bring the version that fits; the newest breaks torch.compile of older ones.
    assert required == {f"Requires-Dist: {package}" for package in ("rich>=13", "torch>=2.6", "typer>=0.12")}
    assert "Requires-Python: >=3.10" in metadata
    assert "License-Expression: BSD-3-Clause" in metadata
    for name in ("Summary", "Author", "Keywords", "Classifier", "Description-Content-Type"):
        assert f"\n{name}: " in metadata, name


# What a person does first, in one process, since each imports PyTorch: argv[1] is the installed command.
FIRST_MINUTES = """
import runpy, sys
command, readme = sys.argv[1:]
for arguments in ([], ["doctor", "--json"]):
    sys.argv = [command, *arguments]
    try:
        runpy.run_path(command, run_name="__main__")
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    print("=====")
runpy.run_path(readme, run_name="__main__")
import apex
print(apex.__file__)
"""


def test_an_installed_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Beside the packages of this environment, which are linked, but no other apex: nothing is downloaded."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python, command = environment / "bin" / "python", environment / "bin" / "apex"
    (packages,) = environment.glob("lib/python*/site-packages")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(torch.__file__).parents[1])}:
        for path in Path(place).iterdir():
            ours = path.name in {"apex", *(each.name for each in (REPOSITORY / "src" / "compiled_names").iterdir())}
            if not ours and path.suffix != ".pth" and not path.name.startswith(("apex-", "_", "pip")):
                with contextlib.suppress(FileExistsError):
                    (packages / path.name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    run = functools.partial(subprocess.run, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
    run([*pip, "install", "--no-index", "--no-deps", "--no-compile", str(wheel)])
    assert run([str(command), "--version"]).stdout == f"apex {apex.__version__}\n"
    script = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "readme.py").write_text(script)
    welcome, report, rest = run([str(python), "-c", FIRST_MINUTES, str(command), "readme.py"]).stdout.split("=====\n")
    assert welcome.startswith(f"apex {apex.__version__}:")
    assert json.loads(report)["status"] == "ok"
    loss, file = rest.splitlines()[-2:]
    assert loss.startswith("loss ")
    assert Path(file) == packages / "apex" / "__init__.py"


@pytest.mark.parametrize(
    "python", list(pythons().values()) or [sys.executable], ids=lambda python: Path(python).parts[-3]
)
def test_every_python_here_imports_the_wheel_without_anything_else(python: str, wheel: Path, tmp_path: Path) -> None:
    """A wheel can be imported as it is; the command says what it lacks."""
    code = f"import sys; sys.path = [{str(wheel)!r}, *(p for p in sys.path if 'site-packages' not in p)]; import apex"
    run = functools.partial(subprocess.run, cwd=tmp_path, capture_output=True, text=True)
    assert run([python, "-I", "-c", f"{code}; print(apex.__version__)"]).stdout == f"{apex.__version__}\n"
    missing = run([python, "-I", "-c", f"{code}._cli; apex._cli.main()"])
    assert missing.returncode == 1
    assert missing.stderr == "the apex command needs typer, which is not installed: pip install typer rich\n"


@pytest.mark.parametrize(
    "options",
    [
        ["-v", "--config-settings", "--build-option=--cpp_ext", "--config-settings", "--build-option=--cuda_ext"],
        ["-v", "--global-option=--cpp_ext", "--global-option=--cuda_ext", "--global-option=--fast_layer_norm"],
    ],
    ids=["config-settings", "global-option"],
)
def test_the_originals_install_lines_install_this(options: list[str], tmp_path: Path) -> None:
    """`pip install ./` with the options, and variables, that chose what the originals compile."""
    pytest.importorskip("hatchling")
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    help_text = subprocess.run([*pip, "--help"], capture_output=True, text=True).stdout
    if options[1].partition("=")[0] not in help_text:
        pytest.skip(f"this pip has no {options[1].partition('=')[0]}")
    here = [
        "--no-index",
        "--no-cache-dir",
        "--no-build-isolation",
        "--no-deps",
        "--no-compile",
        "--target",
        str(tmp_path),
    ]
    chosen = {"APEX_CPP_EXT": "1", "APEX_CUDA_EXT": "1", "APEX_ALL_CONTRIB_EXT": "1", "APEX_BUILD_CUDA_OPS": "1"}
    environment = {**os.environ, **chosen}
    result = subprocess.run(
        [*pip, *here, *options, "./"], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert {"amp_C.py", "apex", f"apex-{apex.__version__}.dist-info"} <= {path.name for path in tmp_path.iterdir()}
    assert not list(tmp_path.rglob("*.so"))


def test_clients_can_ask_for_the_version() -> None:
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("running from a source tree")
    assert version == apex.__version__
