"""`apex tune`: which launches it looks at, which configurations it keeps, and when it stops."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from apex._cli.app import app
from apex._cli.build.calls import parse_call
from apex._cli.tune import command, search
from apex.ops import _device, _examples, _library, _tuned
from apex.ops._device import INTERPRETER, facts
from apex.ops._examples import by_name

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Trial = dict[str, int]


@pytest.fixture(autouse=True)
def no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("APEX_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(_examples, "USUAL_ELEMENTS", 1 << 10)
    _device.forget_launches()
    yield
    monkeypatch.undo()
    _device.forget_launches()


def questions(*names: str) -> list[tuple[_tuned.Question, Any]]:
    with _library.implementation("triton"), _tuned.noting() as noted:
        for name in names:
            parse_call(name, "bfloat16").run(DEVICE)
    return list(noted.values())


def pretend_times(monkeypatch: pytest.MonkeyPatch, microseconds: Callable[[Trial], float]) -> None:
    """Lets a launch take as long as is said of what it changes."""

    def samples(call: Callable[[], Any], device: torch.device) -> list[float]:
        assert _tuned._trial is not None
        (changes,) = _tuned._trial.values()
        return [microseconds(dict(changes))]

    monkeypatch.setattr(search, "samples", samples)


def found(*names: str, op: str = "", seconds: float = 600.0) -> list[search.Search]:
    chosen = [each for each in questions(*names) if op in each[0].op]
    return list(search.search(chosen, DEVICE, seconds))


def test_the_quickest_neighbour_of_neighbours_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_times(monkeypatch, lambda changes: 10 - changes.get("num_warps", 1) + changes.get("rows_per_program", 1))
    (outcome,) = found("layer_norm:8x64", op="forward")
    assert outcome.config == {"num_warps": 8}  # 2, 4 and 8 are three steps
    assert outcome.instead_of == {"num_warps": 1}
    assert (outcome.before, outcome.after) == (10, 3)
    entry = outcome.entry()
    assert (entry["op"], entry["dtype"]) == ("norm.forward_config", "16-bit")
    assert entry["shape"] == {"rows": 8, "row_length": 64, "subtract_mean": True}


@pytest.mark.parametrize("after", [10.0, 9.75, 12.0])
def test_what_is_hardly_quicker_is_not_kept(monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    pretend_times(monkeypatch, lambda changes: after if changes else 10.0)
    (outcome,) = found("layer_norm:8x64", op="forward")
    assert outcome.config == {}
    assert outcome.tried > 0


def test_noise_is_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate that is quicker in the median, but not in every turn."""
    turns = iter([5.0, 5.0, 5.0, 9.5, 11.0] * 100)
    pretend_times(monkeypatch, lambda changes: next(turns) if changes else 10.0)
    (outcome,) = found("xentropy:8x64", op="short")
    assert outcome.config == {}
    assert "noise" in outcome.reason


def test_wrong_numbers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_times(monkeypatch, lambda changes: 5.0 if changes else 10.0)
    results = _examples.Call.results

    def wrong(self: _examples.Call) -> list[torch.Tensor]:
        output, *gradients = results(self)
        is_trial = _tuned._trial is not None and any(_tuned._trial.values())
        return [output + 0.2 if is_trial else output, *gradients]

    monkeypatch.setattr(_examples.Call, "results", wrong)
    (outcome,) = found("xentropy:8x64", op="short")
    assert outcome.config == {}
    assert "is wrong: its error is" in outcome.reason


def test_other_bits_each_time_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_times(monkeypatch, lambda changes: 5.0 if changes else 10.0)
    results, times = _examples.Call.results, iter(range(100))

    def unsteady(self: _examples.Call) -> list[torch.Tensor]:
        output, *gradients = results(self)
        return [output + 1e-6 * next(times), *gradients]

    monkeypatch.setattr(_examples.Call, "results", unsteady)
    (outcome,) = found("xentropy:8x64", op="short")
    assert outcome.config == {}
    assert "other bits" in outcome.reason


def test_what_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def microseconds(changes: Trial) -> float:
        if changes:
            raise RuntimeError("out of shared memory")
        return 10.0

    pretend_times(monkeypatch, microseconds)
    (outcome,) = found("xentropy:8x64", op="short")
    assert outcome.config == {}
    assert "out of shared memory" in outcome.reason


CALLS = [
    ("rms_norm:8x64:float32", {"norm.forward_config", "norm.backward_config"}),
    ("softmax:1x1x8x64", {"softmax.rows_config"}),
    ("causal_softmax:1x2x8x64", {"softmax.rows_config"}),
    ("xentropy:8x2000", {"xentropy.forward_config", "xentropy.backward_config"}),
    ("swiglu:8x64", {"glu.forward_tile", "glu.backward_tile"}),
    ("rope:8x1x2x16", {"rope.tile"}),
    ("group_norm:2x64x2x4", {"group_norm.small_config"}),
    ("batch_norm:2x4x24x24", {"batch_norm.pace", "batch_norm.apply_config"}),
    ("attention:1x2x16x16", {f"attention.{kind}_tile" for kind in ("forward", "keys", "stored")}),
]


@pytest.mark.parametrize(("name", "ops"), CALLS, ids=[name for name, _ in CALLS])
def test_what_a_call_asks_is_asked_again_by_its_replay(name: str, ops: set[str]) -> None:
    asked = questions(name)
    assert {question.op for question, _ in asked} == ops
    with _library.implementation("triton"):
        for question, answer in asked:
            each = search.Search(question, answer, DEVICE)
            each.begin()
            assert each.reason == ""
            assert each.pending
        assert each.replay is not None
        assert each.replay.call.worst_excess(each.replay.call.results()) <= 1


def test_every_tunable_rule_has_a_call() -> None:
    asked = {rule for _, example in by_name() for rule in example.asks}
    assert asked == set(_tuned.TUNABLE)


def test_the_report_has_a_row_for_every_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_times(monkeypatch, lambda changes: 5.0 if changes == {"num_warps": 2} else 10.0)
    outcomes = found("xentropy:8x64", op="short")
    asked = (_tuned.Question("norm.gone", {"element_size": 2}), None)
    command.report([*outcomes, search.Search(*asked, DEVICE)], 3, Path("tuned.json"))
    said = capsys.readouterr().out
    assert "num_warps 1 -> 2" in said
    assert "100.0%" in said
    assert "no call of `apex build` asks this" in said
    assert "1 of 2 launches have something quicker" in said
    assert "1 were not looked at" in said


def test_neighbours_stay_within_what_a_device_has() -> None:
    from apex.ops.glu.config import Tile

    answer = Tile(rows=1, block=1024, num_warps=32, num_stages=1)
    near = search.neighbours(answer, answer._fields, INTERPRETER)
    assert {"rows": 2} in near
    assert {"num_warps": 16} in near
    assert {"block": 512, "num_warps": 16} in near
    assert {"num_stages": 2} in near
    assert all(min(change.values()) > 0 and change.get("num_warps", 1) <= 32 for change in near)


def test_the_budget_ends_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The clock is read before every candidate; what was promising by then is decided."""
    now = iter(range(1000))
    monkeypatch.setattr(search.time, "perf_counter", lambda: float(next(now)))
    pretend_times(monkeypatch, lambda changes: 5.0 if changes else 10.0)
    asked = questions("layer_norm:8x64", "xentropy:8x64")
    monkeypatch.setattr(search, "TOGETHER", 1)
    outcomes, interrupted = command.tune(asked, DEVICE, 6.0, tmp_path / "out.json")
    assert not interrupted
    assert len(outcomes) < len(asked)
    assert outcomes[0].config
    assert 0 < outcomes[0].tried < 5


def test_an_interrupted_run_keeps_what_it_had_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = questions("layer_norm:8x64")
    key = asked[-1][0].key

    def samples(call: Callable[[], Any], device: torch.device) -> list[float]:
        assert _tuned._trial is not None
        if key in _tuned._trial:
            raise KeyboardInterrupt
        return [5.0 if any(_tuned._trial.values()) else 10.0]

    monkeypatch.setattr(search, "samples", samples)
    monkeypatch.setattr(search, "TOGETHER", 1)
    outcomes, interrupted = command.tune(asked, DEVICE, 600.0, tmp_path / "out.json")
    assert interrupted
    (table,) = _tuned.read_tables(tmp_path / "out.json")
    assert table.gpu == facts(DEVICE).name
    assert [entry["op"] for entry in table.entries] == ["norm.forward_config"] == [o.question.op for o in outcomes]


ENTRY = {"op": "norm.forward_config", "dtype": "32-bit", "shape": {"rows": 8}}
ENTRY |= {"config": {"num_warps": 2}, "instead_of": {"num_warps": 1}}


def test_entries_are_added_to_what_a_file_has(tmp_path: Path) -> None:
    table = tmp_path / "tuned.json"
    command.write_entries(table, "A", [{**ENTRY, "dtype": "16-bit"}])
    command.write_entries(table, "B", [ENTRY])
    later = {**ENTRY, "config": {"num_warps": 8}, "instead_of": {"num_warps": 1}}
    command.write_entries(table, "B", [later, {**ENTRY, "dtype": "16-bit"}])
    first, second = _tuned.read_tables(table)
    assert (first.gpu, [entry["dtype"] for entry in first.entries]) == ("A", ["16-bit"])
    assert (second.gpu, second.entries) == ("B", [later, {**ENTRY, "dtype": "16-bit"}])
    assert {"driver": second.driver, "triton": second.triton} == _tuned.versions()


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tuned.json"
    command.write_entries(table, "A", [ENTRY])
    before = table.read_text()

    def fail(*_: Any) -> str:
        raise OSError("no space")

    monkeypatch.setattr(command.json, "dumps", fail)
    with pytest.raises(OSError, match="no space"):
        command.write_entries(table, "B", [ENTRY])
    assert table.read_text() == before
    assert [path.name for path in table.parent.iterdir()] == [table.name]


SCRIPT = """
import sys
import torch
from apex.ops import _examples, _library
from apex.ops.norm import layer_norm

with _library.implementation("triton"):
    for rows in map(int, sys.argv[1:]):
        x = torch.ones(rows, 64, requires_grad=True, device={device!r})
        layer_norm(x, (64,)).sum().backward()
"""


def test_a_script_is_recorded(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{device!r}", repr(DEVICE.type)))
    noted = command.record_script(script, ["8", "7", "16"])
    asked = [(question.op, question.shape["rows"]) for question, _ in noted]
    assert asked == [(f"norm.{way}_config", rows) for rows in (8, 16) for way in ("forward", "backward")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("x = 1", "launches nothing that can be tuned"),
        (None, "there is no script"),
    ],
)
def test_a_script_that_cannot_be_recorded(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "train.py").write_text(text)
    with pytest.raises(ValueError, match=message):
        command.record_script(tmp_path / "train.py", [])


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("7", 7)])
def test_budgets(text: str, seconds: float) -> None:
    assert command.parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "5 minutes", "-1s", "0", "nan", "infs"])
def test_what_is_no_budget(text: str) -> None:
    with pytest.raises(ValueError, match="is no time; write 90s, 5m or 1h"):
        command.parse_budget(text)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 2
    assert "launches are timed on the GPU that they are for: there is no GPU here" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shapes": Path("none.txt")}, "there is no file of shapes 'none.txt'"),
        ({"shapes": Path("a"), "record": Path("b")}, "give --shapes or --record, not both"),
        ({"arguments": ["3"]}, "'3' is an argument of no script"),
    ],
)
def test_requests_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(command, "_gpu", lambda: DEVICE)
    with pytest.raises(ValueError, match=message):
        command.run_tune(**options)


def test_requests_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_gpu", lambda: DEVICE)
    shapes, output = tmp_path / "shapes", tmp_path / "table"
    for content, message in ((b"# none\n", "names no shapes"), (b"\x7fELF\xd0\x00", "is no text")):
        shapes.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            command.run_tune(shapes=shapes, output=output)
    monkeypatch.setattr(command, "record_shapes", lambda names, device: [(SimpleNamespace(op="norm.forward"), None)])
    with pytest.raises(ValueError, match="--ops 'nrom' is in none of the ops that are asked for, "):
        command.run_tune(ops="nrom", output=output)
    result = CliRunner().invoke(app, ["tune", "--output", str(shapes / "table")])
    assert result.exit_code == 2
    assert str(shapes) in result.stderr.replace("\n", "")


def test_a_file_that_is_no_table_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_gpu", lambda: DEVICE)
    output = tmp_path / "model.json"
    output.write_text('{"hidden_size": 4096}')
    with pytest.raises(ValueError, match=r"model.json is no table of tuned launches: KeyError.*name another file"):
        command.run_tune(output=output)
    assert output.read_text() == '{"hidden_size": 4096}'


@pytest.mark.gpu
def test_a_tiny_tune_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes, table = tmp_path / "shapes.txt", tmp_path / "table.json"
    shapes.write_text("# sizes\nlayer_norm:4096x1024  # hidden size\n\nswiglu:4096x2048:float32\n")
    assert command.run_tune(shapes=shapes, ops="norm.forward,glu", budget="40s", output=table) == 0
    said = capsys.readouterr().out
    assert "norm.forward_config" in said
    assert "glu.backward_tile" in said
    assert "norm.backward_config" not in said
    assert "of 3 launches have something quicker" in said
    if table.exists():  # a table is written where something was found
        (entries,) = [each["entries"] for each in json.loads(table.read_text())["tables"]]
        assert all(_tuned.fits(entry) for entry in entries)


def test_options_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "run_tune", lambda **options: seen.append(options) or 0)
    ours = ["--ops", "norm,glu", "--budget", "90s", "--output", "t.json", "--record", "train.py"]
    for arguments in ([*ours, "--", "--steps", "3"], []):
        assert CliRunner().invoke(app, ["tune", *arguments]).exit_code == 0
    nothing = {"ops": "", "shapes": None, "record": None, "arguments": None, "budget": "5m", "output": None}
    given = {"ops": "norm,glu", "record": Path("train.py"), "budget": "90s", "output": Path("t.json")}
    assert seen == [{**nothing, **given, "arguments": ["--steps", "3"]}, nothing]
