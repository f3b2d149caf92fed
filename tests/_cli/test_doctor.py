"""`apex doctor` in this process."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import apex
from apex._cli.app import app
from apex._cli.doctor import dispatch, installation
from apex.ops import _device, _library, _tuned, all_families

from .helpers import write_distribution, write_package


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("empty"))


def doctor() -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    return result.exit_code, json.loads(result.stdout)


def findings(report: dict[str, Any], severity: str) -> list[str]:
    return [f"{f['subject']}: {f['message']}" for f in report["findings"] if f["severity"] == severity]


def replace_self_check(monkeypatch: pytest.MonkeyPatch, name: str, check: Any) -> None:
    """Replace the self-check of the family `name`; the others find nothing."""
    monkeypatch.setattr(dispatch, "self_check", lambda family, device: check(device) if family.name == name else 0.0)


@pytest.fixture
def quick_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the self-checks, which take two seconds, by ones that find nothing."""
    monkeypatch.setattr(dispatch, "self_check", lambda family, device: 0.0)


def test_everything_works_here() -> None:
    status, report = doctor()
    assert status == 0
    assert report["status"] == "ok"
    assert findings(report, "broken") == []
    assert report["versions"]["apex"] == apex.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert report["devices"][0]["device"] == "cpu"
    assert report["devices"][0]["threads"] == torch.get_num_threads()
    combinations = {(c["family"], c["device"], c["dtype"]) for c in report["choices"]}
    for family in all_families():
        for device in report["devices"]:
            assert (family, device["device"], "bfloat16") in combinations
            assert any(c["family"] == family and c["error"] <= 1 for c in report["self_checks"])
    names = {name["name"] for name in report["installation"]["compiled_names"]}
    assert {"fused_layer_norm_cuda", "fast_layer_norm"} <= names


@pytest.mark.usefixtures("quick_checks")
def test_text_shows_every_part() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for part in ("Versions", "Devices", "Implementations", "Self-check", "Findings", "APEX_IMPL", "Everything works."):
        assert part in result.stdout


@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize("implementation", ["auto", "torch", "triton"])
def test_the_report_repeats_no_message(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with _library.implementation(implementation):
        broken, report = doctor()
        result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == broken == (implementation == "triton" and not torch.cuda.is_available())
    parts = {part.split("\n")[0].strip(): part.splitlines()[2:] for part in result.stdout.split("\n\n")}
    reasons = {
        (c["device"], c["implementation"], c["reason"].replace(f" {c['family']} ", " it ")) for c in report["choices"]
    }
    assert len(parts["Implementations"]) == len(reasons) < len(all_families())
    for word in (f"all {len(all_families())} families", "float32", "float64"):
        assert any(word in row for row in parts["Implementations"])
    assert len(parts.get("Self-check", [])) == len({check["device"] for check in report["self_checks"]})
    assert len(parts["Findings"]) == len(set(parts["Findings"])) < len(all_families())
    if broken:
        assert f"norm on cpu and {len(all_families()) - 1} more" in result.stdout
        assert "1 thing is broken" in result.stdout


@pytest.mark.usefixtures("quick_checks")
@pytest.mark.parametrize("error", [1.5, float("nan"), float("inf")])
def test_wrong_numbers_are_broken(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    replace_self_check(monkeypatch, "norm", lambda device: error)
    status, report = doctor()
    assert status == 1
    assert "norm on cpu: wrong numbers" in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_a_self_check_that_raises_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> float:
        raise RuntimeError("out of [order]")

    replace_self_check(monkeypatch, "norm", fail)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "RuntimeError: out of [order]" in result.stdout
    assert "broken; see the findings above" in result.stdout


@pytest.mark.usefixtures("quick_checks")
def test_a_package_before_this_one_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_package(tmp_path))
    status, report = doctor()
    assert status == 1
    assert str(tmp_path / "apex") in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_a_package_behind_this_one_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(write_package(tmp_path))])
    status, report = doctor()
    assert status == 0
    assert "another apex lies beside" in findings(report, "warning")[0]


@pytest.mark.usefixtures("quick_checks")
def test_a_package_in_the_current_folder_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(write_package(tmp_path))
    status, report = doctor()
    assert status == 1
    assert "programs in this folder" in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_another_projects_distribution_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(write_distribution(tmp_path, "0.9.10", "Pyramid toolkit"))
    status, report = doctor()
    assert status == 1
    assert "another project's apex 0.9.10 (Pyramid toolkit)" in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_an_installed_version_that_is_not_the_running_one_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry_points = "[console_scripts]\napex = apex._cli:main\n"
    monkeypatch.syspath_prepend(write_distribution(tmp_path, "0.0.1", "this project", entry_points))
    status, report = doctor()
    assert status == 1
    assert "0.0.1" in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_no_distribution_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_distributions", list)
    status, report = doctor()
    assert status == 0
    assert "running from a source tree" in " ".join(findings(report, "ok"))


@pytest.mark.usefixtures("quick_checks")
def test_a_compiled_upstream_module_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_spec = installation._fresh_spec

    def find(name: str) -> ModuleSpec | None:
        if name == "fast_layer_norm":
            return ModuleSpec(name, None, origin=str(tmp_path / "fast_layer_norm.cpython-311.so"))
        return fresh_spec(name)

    monkeypatch.setattr(installation, "_fresh_spec", find)
    status, report = doctor()
    assert status == 1
    assert "fast_layer_norm: comes from" in findings(report, "broken")[0]


@pytest.mark.usefixtures("quick_checks")
def test_tuned_launches_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    name = doctor()[1]["devices"][0]["name"]
    entry = {"op": "norm.forward_config", "dtype": "16-bit", "shape": {"rows": 8}}
    entry |= {"config": {"num_warps": 2}, "instead_of": {"num_warps": 1}}
    head = {"gpu": name, **_tuned.versions()}
    tables = [
        {**head, "entries": [entry, {**entry, "op": "norm.gone"}]},
        {**head, "triton": "1.0", "entries": [entry]},
        {**head, "gpu": "another", "entries": [entry]},
    ]
    (tmp_path / "tuned.json").write_text(json.dumps({"format": 1, "tables": tables}))
    monkeypatch.setenv("APEX_TUNED", str(tmp_path / "tuned.json"))
    _device.forget_launches()
    try:
        status, report = doctor()
        text = CliRunner().invoke(app, ["doctor"]).stdout
    finally:
        monkeypatch.undo()
        _device.forget_launches()
    assert status == 0
    assert [(row["gpu"], row["entries"], row["in_use"]) for row in report["tuned"]] == [
        (name, 2, 1),
        (name, 1, 0),
        ("another", 1, 0),
    ]
    assert [row["problem"].split(";")[0] for row in report["tuned"]] == [
        "1 entries are for rules that are no longer there",
        "made with triton 1.0",
        "for another GPU",
    ]
    assert len([found for found in findings(report, "warning") if found.startswith("tuned launches:")]) == 2
    assert "Tuned launches" in text
