"""Builders: apex's own load at once, a user's compiles for real, and errors are readable."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension
from typer.testing import CliRunner

import apex
from apex import git_version_info, op_builder
from apex._atomic import locked_file
from apex._cli.app import app
from apex._cli.jit_module import write_module
from apex.op_builder import CPUOpBuilder, CUDAOpBuilder, OpBuilder
from apex.op_builder._compile import compile_extension, first_error
from apex.op_builder.all_ops import ALL_OPS, BUILDERS, BuilderUtils
from tests._cli.helpers import run_python, run_quickly

can_compile = pytest.mark.skipif(
    not (shutil.which("g++") and shutil.which("ninja")), reason="needs g++ and ninja to compile with"
)

# Python's own header alone: PyTorch's takes a compiler most of a minute.
SOURCE = """
#include <Python.h>
static PyObject* twice(PyObject*, PyObject* number) { return PyNumber_Add(number, number); }
static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "toy", "", -1, methods};
PyMODINIT_FUNC PyInit_toy() { return PyModule_Create(&definition); }
"""


@pytest.mark.parametrize("name", list(BUILDERS))
def test_builders_of_apex_return_its_modules(name: str) -> None:
    builder = BuilderUtils().create_op_builder(name)
    assert isinstance(builder, OpBuilder)
    assert builder.load() is importlib.import_module(builder.NAME)
    assert builder.is_compatible()
    assert ALL_OPS[builder.NAME].name == builder.name == builder.NAME
    file = type(builder).__module__.removeprefix("apex.op_builder.")
    assert f"APEX_BUILD_{file.upper()}" == builder.BUILD_VAR
    assert getattr(importlib.import_module(f"apex.op_builder.{file}"), name) is getattr(op_builder, name)
    with pytest.raises(TypeError, match="nothing to compile"):
        builder.builder()


def test_the_table_is_that_of_the_originals() -> None:
    assert len(ALL_OPS) == len(BUILDERS) == 28
    assert [op.NAME for op in ALL_OPS.values() if op.INCLUDE_FLAG == "APEX_BUILD_CPP_OPS"] == ["apex_C"]
    assert BuilderUtils().create_op_builder("NoBuilder") is None
    assert git_version_info.version == apex.__version__
    assert set(git_version_info.installed_ops) == set(git_version_info.compatible_ops) == set(ALL_OPS)


@can_compile
def test_a_users_extension_is_compiled_once_and_its_first_error_shown(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "toy.cpp").write_text(SOURCE)
    write_module("toy", ["csrc/toy.cpp"], gpu=False, folder=tmp_path)
    extensions = tmp_path / "extensions"
    load = "from toy_builder import ToyBuilder as B; m = B().load(); assert m is B().load(); print(m.twice(21))"

    def run(code: str):  # type: ignore[no-untyped-def]
        return run_quickly("-c", code, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(extensions))

    first = run(load)
    assert first.stdout.split()[-1] == "42", first.stderr
    (folder,) = extensions.iterdir()
    library = folder / "toy.so"
    written = library.stat().st_mtime_ns
    (folder / "lock").touch()  # as a process leaves it that was killed; PyTorch would wait for ever
    used = run("import toy; print(hasattr(toy, '_twice'), 'twice' in dir(toy), toy.twice(21))")
    assert used.stdout.split() == ["False", "True", "42"], used.stderr
    assert library.stat().st_mtime_ns == written
    assert list(extensions.iterdir()) == [folder]

    (tmp_path / "csrc" / "toy.cpp").write_text(SOURCE.replace("(number, number)", "(number, numbre)\n + another"))
    failed = run(load)
    assert "toy could not be compiled. The first error:" in failed.stderr
    assert "toy.cpp:3" in failed.stderr
    assert "numbre" in failed.stderr
    assert "another" not in failed.stderr.partition("Everything that the compiler printed")[0].split("error:")[-1]
    imported = run("from toy import twice").stderr
    assert "ImportError: toy cannot be loaded: toy could not be compiled. The first error:" in imported
    (log,) = extensions.rglob("build.log")
    assert "another" in log.read_text()


def test_first_errors_of_compilers() -> None:
    gcc = "FAILED: toy.o\nc++ -c toy.cpp\ntoy.cpp: In function 'f':\ntoy.cpp:3:5: error: 'x' is unknown\n    3 | x;\n"
    assert first_error(gcc + "toy.cpp:9:1: error: second\n") == "toy.cpp:3:5: error: 'x' is unknown\n    3 | x;"
    nvcc = 'toy.cu(7): warning #177-D: unused\ntoy.cu(9): error: identifier "y" is undefined\n1 error detected\n'
    assert first_error(nvcc).startswith('toy.cu(9): error: identifier "y" is undefined')
    linker = (
        "[2/2] c++ toy.o\n/usr/bin/ld: toy.o: undefined reference to `f'\ncollect2: error: ld returned 1 exit status"
    )
    assert first_error(linker) == "/usr/bin/ld: toy.o: undefined reference to `f'"
    assert first_error("killed") == "killed"


class Example(CUDAOpBuilder):
    NAME = "example"

    def absolute_name(self) -> str:
        return "package.example"

    def sources(self) -> list[str]:
        return ["example.cpp", "example.cu", ""]

    def libraries_args(self) -> list[str]:
        return ["m"]


class Newer(Example):
    def filter_ccs(self, ccs: list[str]) -> list[list[str]]:
        return [cc for cc in super().filter_ccs(ccs) if int(cc[0]) >= 9]


def test_gpus_to_compile_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sm_80, sm_90 = (f"-gencode=arch=compute_{n},code=sm_{n}" for n in (80, 90))
    assert Example().compute_capability_args("8.0;9.0") == [sm_80, sm_90]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX")
    assert Newer().compute_capability_args("8.0") == [sm_90, sm_90.replace("code=sm", "code=compute")]
    monkeypatch.setenv("APEX_NVCC_THREADS", "3")
    assert "--threads=3" in Example().nvcc_args()


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.warns(UserWarning, match="build without CUDA"):
        assert not Example().is_compatible(verbose=True)
    with pytest.raises(RuntimeError, match=r"example cannot be compiled here: PyTorch .* is a build without CUDA"):
        Example().load()
    with pytest.raises(FileNotFoundError, match="relative paths begin at the builder's file"):
        compile_extension("toy", ["/nowhere/toy.cpp"], {}, verbose=False)


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_functions_of_libraries_are_looked_for() -> None:
    assert Example().has_function("cos", ["m"])
    assert not Example().has_function("no_such_function", ["m"])


def test_an_extension_for_setuptools() -> None:
    class Plain(CPUOpBuilder):
        absolute_name = Example.absolute_name

        def sources(self) -> list[str]:
            return ["plain.cpp"]

    pytest.importorskip("setuptools")
    extension = Plain("plain").builder()
    assert (extension.name, extension.sources) == ("package.example", ["plain.cpp"])
    assert extension.extra_compile_args["cxx"][0] == "-O3"


def test_the_command_asks_for_missing_arguments(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").touch()
    command = ["jit-module", "my_op", "--folder", str(tmp_path)]
    assert CliRunner().invoke(app, command, input="\ncsrc/a.cpp, csrc/a.cu\n").exit_code == 0
    written = (tmp_path / "my_op_builder.py").read_text()
    assert "class MyOpBuilder(CUDAOpBuilder):" in written
    assert 'return ["csrc/a.cpp", "csrc/a.cu"]' in written
    assert "from .my_op_builder import MyOpBuilder" in (tmp_path / "my_op.py").read_text()
    for arguments, words in (
        (["my_op", "--source", "a.cpp"], "my_op_builder.py exists already"),
        (["my-op", "--source", "a.cpp"], "'my-op' cannot be the name of a module"),
        (["other", "--source", " "], "name at least one source"),
    ):
        failed = CliRunner().invoke(app, ["jit-module", *arguments, "--cuda", "--folder", str(tmp_path)])
        assert failed.exit_code == 2
        assert words in failed.stderr


CUDA_SOURCE = """
__global__ void double_it(int* n) { *n *= 2; }
static int on_gpu(int value) {
    int* n;
    cudaMallocManaged(&n, sizeof(int));
    *n = value;
    double_it<<<1, 1>>>(n);
    cudaDeviceSynchronize();
    return *n;
}
""" + SOURCE.replace("PyNumber_Add(number, number)", "PyLong_FromLong(on_gpu(PyLong_AsLong(number)))")


@pytest.mark.gpu
def test_a_users_cuda_extension_is_compiled(tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "toy.cu").write_text(CUDA_SOURCE)
    write_module("toy", ["csrc/toy.cu"], gpu=True, folder=tmp_path)
    code = "from toy_builder import ToyBuilder; print(ToyBuilder().load().twice(21))"
    found = run_python("-c", code, cwd=tmp_path, TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert found.stdout.split()[-1:] == ["42"], found.stderr


def test_names_of_sources_are_written_as_names(tmp_path: Path) -> None:
    sources = ['a.cpp", __import__("os").abort(), "', "it's\n{name}.cpp"]
    builder, _ = write_module("toy", sources, gpu=False, folder=tmp_path)
    names: dict = {"__name__": "toy_builder"}
    exec(compile(builder.read_text(), builder, "exec"), names)
    assert names["ToyBuilder"]().sources() == sources


def test_links_in_the_folder_of_an_extension_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "apex.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"), locked_file(tmp_path / "apex.lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_log_does_not_replace_the_target_of_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "toy.cpp"
    source.write_text("")

    def fail(name: str, sources: list[str], build_directory: str, **_: object) -> None:
        (Path(build_directory) / "build.log").symlink_to(source)
        raise RuntimeError("toy.cpp:1:1: error: no")

    monkeypatch.setattr(cpp_extension, "load", fail)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: True)
    monkeypatch.setattr("apex.op_builder._compile.key_of", lambda *_: "0")
    monkeypatch.setattr("apex.op_builder._compile.extensions_folder", lambda: tmp_path / "cache")
    with pytest.raises(RuntimeError, match="error: no"):
        compile_extension("toy", [str(source)], {}, verbose=False)
    assert source.read_text() == ""
    assert "error: no" in (tmp_path / "cache" / "toy-0" / "build.log").read_text()
