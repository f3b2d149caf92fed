"""`apex doctor` in a process of its own: pipes and environments."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from .helpers import DOCTOR, SOURCE, run_python, run_quickly, write_package


def test_piped_output_is_plain_and_whole(tmp_path: Path) -> None:
    result = run_quickly(*DOCTOR, cwd=tmp_path, COLUMNS="40", FORCE_COLOR="1")
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout
    assert "float32, bfloat16, float16" in result.stdout
    assert "…" not in result.stdout
    assert str(SOURCE / "apex") in result.stdout


def test_an_implementation_that_cannot_be_met_is_broken(tmp_path: Path) -> None:
    result = run_quickly(*DOCTOR, "--json", cwd=tmp_path, APEX_IMPL="triton", CUDA_VISIBLE_DEVICES="")
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert report["requested_implementation"] == "triton"
    assert all(choice["implementation"] is None for choice in report["choices"])
    assert any(f["severity"] == "broken" and "APEX_IMPL=triton" in f["message"] for f in report["findings"])


def test_an_unknown_implementation_is_broken_and_lists_the_known_ones(tmp_path: Path) -> None:
    result = run_quickly(*DOCTOR, cwd=tmp_path, APEX_IMPL="cuda")
    assert result.returncode == 1
    assert "use one of auto, triton, torch" in result.stdout
    assert "Traceback" not in result.stderr


def test_torch_that_does_not_import_is_broken(tmp_path: Path) -> None:
    path = os.pathsep.join([str(SOURCE), str(write_package(tmp_path / "bad", "torch"))])
    result = run_python(*DOCTOR, "--json", cwd=tmp_path, PYTHONPATH=path)
    assert result.returncode == 1, result.stderr
    assert "importing torch failed" in json.loads(result.stdout)["versions"]["torch_problem"]


# Numbers are checked by the command above: they take two seconds.
QUICK_CHECKS = """
import dataclasses, sys, apex._cli
from apex.ops import _library, all_families
for name, family in all_families().items():
    _library.FAMILIES[name] = dataclasses.replace(family, self_check=lambda device: 0.0)
sys.argv = ["apex", "doctor"]
"""


def test_json_is_the_only_thing_on_stdout(tmp_path: Path) -> None:
    result = run_quickly("-c", f"{QUICK_CHECKS}sys.argv.append('--json'); apex._cli.main()", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["status"] == "ok"


@pytest.mark.parametrize("position", ["0", "len(sys.path)"])
def test_a_shadowing_package(tmp_path: Path, position: str) -> None:
    folder = write_package(tmp_path / "other")
    code = f"{QUICK_CHECKS}sys.path.insert({position}, {str(folder)!r}); apex._cli.main()"
    result = run_quickly("-c", code, cwd=tmp_path)
    assert str(folder / "apex") in result.stdout
    assert result.returncode == (1 if position == "0" else 0)
