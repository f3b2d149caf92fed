"""`run_bench` from end to end on the CPU: files, tables, messages and exit status."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
import typer
from tests.support.warm import run_python

from apex._bench import environment, results
from apex._cli.bench import command
from apex._cli.bench.command import run_bench

ONE_CASE = "layer_norm float32 1024x1024 fwd"


def bench(**options) -> int:
    chosen = {"output": None, "plot": False, "quick": True, "device": "cpu", "filter": ONE_CASE, "list_only": False}
    return run_bench(options.pop("families", []), **{**chosen, **options})


def test_quick_run_end_to_end(tmp_path, capsys):
    path = tmp_path / "new" / "result.json"
    assert bench(families=["norm"], output=path, plot=True, filter="float32") == 0
    written = json.loads(path.read_text())
    assert written["device"]["type"] == "cpu"
    assert {"apex", "torch", "python"} <= set(written["versions"])
    assert written["copy_gbs"] > 0
    assert written["date"][:2] == "20"
    assert [case["case"] for case in written["cases"]] == [
        f"{norm} float32 {case}"
        for norm in ("layer_norm", "rms_norm")
        for case in ("1024x1024 fwd", "1024x1024 bwd", "128x1024 step")
    ]
    for case in written["cases"]:
        assert case["floor_microseconds"] > 0
        assert case["best_peer"] == "torch"
        assert [row["implementation"] for row in case["implementations"]] == ["ours", "torch"]
        for row in case["implementations"]:
            assert row["status"] == "ok"
            assert min(row["microseconds"], row["gbs"], row["percent_of_copy"]) > 0
    assert path.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in path.parent.iterdir()) == ["result.json", "result.png"]
    assert "ours/best" in capsys.readouterr().out


def test_piped_output_is_plain_and_whole(tmp_path):
    code = (
        "from pathlib import Path; from apex._cli.bench.command import run_bench; "
        f"raise SystemExit(run_bench(['norm'], output=Path('r.json'), plot=False, quick=True, device='cpu', "
        f"filter={ONE_CASE!r}, list_only=False))"
    )
    environment = {**os.environ, "COLUMNS": "40", "PYTHONIOENCODING": "utf-8"}
    done = run_python("-c", code, cwd=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr == ""
    heading = next(line for line in done.stdout.splitlines() if line.strip().startswith("case"))
    assert heading.split("  ")[-1].strip() == "ours/best"
    assert any(ONE_CASE in line for line in done.stdout.splitlines())
    assert "…" not in done.stdout


def test_nothing_is_written_without_an_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(plot=True) == 0
    assert ONE_CASE in capsys.readouterr().out
    assert bench(families=[], sweep="norm", cases=1, filter=None) == 0
    assert list(tmp_path.iterdir()) == []


def test_an_output_may_be_a_folder(tmp_path):
    assert bench(output=tmp_path / "results") == 0
    (path,) = (tmp_path / "results").iterdir()
    stem = environment.device_stem(environment.device_name(torch.device("cpu")))
    assert path.name.startswith(f"{stem}-all-")
    assert path.suffix == ".json"


def test_list_measures_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert bench(list_only=True, filter="rms_norm step") == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == ["rms_norm float32 128x1024 step"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": ["nrom"]}, "unknown benchmark family nrom; known:"),
        ({"filter": "no such case"}, "no case matches 'no such case'"),
        ({"device": "quantum"}, "'quantum' is not the name of a device"),
        ({"device": "meta"}, "there is no device 'meta'"),
    ],
)
def test_bad_requests(options, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match=message):
        bench(**options)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_output_must_be_json_or_a_folder(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"must be a folder or a file that ends in \.json"):
        bench(output=tmp_path / "chart.png")


def test_a_missing_matplotlib_loses_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert bench(output=tmp_path / "r.json", plot=True) == 0
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err
    assert ONE_CASE in captured.out
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_wrong_result_gives_status_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("apex._bench.runner.worst_excess", lambda actual, expected: 7.0)
    assert bench(output=tmp_path / "r.json") == 1
    row = json.loads((tmp_path / "r.json").read_text())["cases"][0]["implementations"][0]
    assert row["status"] == "wrong"
    assert "microseconds" not in row
    assert "ours wrong: error is 7 times the tolerance" in capsys.readouterr().out


def test_an_interrupted_run_keeps_what_it_has(tmp_path, monkeypatch):
    measured = command.run_case

    def interrupt_second(case, *rest):
        if "rms_norm" in case.name:
            raise KeyboardInterrupt
        return measured(case, *rest)

    monkeypatch.setattr(command, "run_case", interrupt_second)
    assert bench(families=["norm"], output=tmp_path / "r.json", filter="float32 fwd") == 130
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["interrupted"] is True
    assert [case["case"] for case in written["cases"]] == [ONE_CASE]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    path.write_text("old")
    report = results.Report({"device": {}}, 1.0)

    def refuse(source, target):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        results.write_json(report, path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
