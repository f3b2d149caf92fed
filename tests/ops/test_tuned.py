"""Tables of tuned launches: what they change, and which are not used."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from apex.ops import _library, _tuned, all_families, layer_norm
from apex.ops._device import INTERPRETER, DeviceFacts, facts
from apex.ops._launch import record_launches
from apex.ops.norm import add_norm, config, op
from apex.ops.norm.op import NORM

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = facts(DEVICE)
SHAPE = {"rows": 8, "row_length": 64, "subtract_mean": True}
ENTRY = {"op": "norm.forward_config", "dtype": "32-bit", "shape": SHAPE}
BEFORE = {"num_warps": 1, "rows_per_program": 1}
ENTRY |= {"config": {"num_warps": 2, "rows_per_program": 4}, "instead_of": BEFORE}


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a table is found; none is there yet."""
    monkeypatch.setenv("APEX_TUNED", str(tmp_path / "tuned.json"))
    monkeypatch.setattr(_tuned, "SHIPPED", tmp_path / "none")
    _tuned.forget_tables()
    yield tmp_path / "tuned.json"
    monkeypatch.undo()
    _tuned.forget_tables()


def write(path: Path, *entries: dict[str, Any], **head: Any) -> None:
    versions = {"gpu": HERE.name, **_tuned.versions(), **head}
    path.write_text(json.dumps({"format": _tuned.FORMAT, "tables": [{**versions, "entries": list(entries)}]}))
    _tuned.forget_tables()


def launched(rows: int = 8) -> tuple[int, int]:
    """Rows of a program and warps of the launch that a layer norm makes."""
    x, weight = (torch.ones(shape, dtype=torch.float32, device=DEVICE) for shape in ((rows, 64), (64,)))
    with _library.implementation("triton"), record_launches() as launches, torch.no_grad():
        layer_norm(x, (64,), weight, weight)
    (launch,) = launches
    constants = dict(zip(reversed(launch.prepared.kernel.function.arg_names), reversed(launch.prepared.constants)))  # noqa: B905
    return constants["ROWS"], launch.prepared.num_warps


def test_a_table_changes_the_launch_of_its_shape_class(table: Path) -> None:
    assert launched() == (1, 1)
    write(table, ENTRY)
    assert launched() == launched(7) == (4, 2)
    assert launched(9) == launched(4) == (1, 1)  # other classes: 16 and 4 rows


def test_numbers_are_the_same_with_another_launch(table: Path) -> None:
    x, weight = (torch.randn(shape, dtype=torch.float32, device=DEVICE) for shape in ((7, 64), (64,)))
    with _library.implementation("triton"):
        before = layer_norm(x, (64,), weight, weight)
        write(table, ENTRY)
        torch.testing.assert_close(layer_norm(x, (64,), weight, weight), before)


def test_off_leaves_every_rule_alone(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table, ENTRY)
    monkeypatch.setenv("APEX_TUNED", "off")
    _tuned.forget_tables()
    assert launched() == (1, 1)
    assert _tuned.tables() == ()


def test_the_users_entries_come_before_those_of_the_package(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = table.parent / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(_tuned, "SHIPPED", shipped)
    write(shipped / "gpu.json", ENTRY)
    assert launched() == (4, 2)
    write(table, {**ENTRY, "config": {"num_warps": 4}, "instead_of": {"num_warps": 1}})
    assert launched() == (1, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"instead_of": {"num_warps": 8, "rows_per_program": 1}},  # the rule has changed since
        {"config": {"warps": 2}, "instead_of": {"warps": 1}},
        {"config": {"num_warps": "2"}, "instead_of": {"num_warps": 1}},
        {"config": {"num_warps": 2}, "instead_of": {}},
        {"config": [], "instead_of": []},
        {"shape": {**SHAPE, "rows": [8]}},
        {"op": "norm.gone"},
        {"dtype": "16-bit"},
    ],
)
def test_entries_that_do_not_fit_change_nothing(table: Path, change: dict[str, Any]) -> None:
    write(table, {**ENTRY, **change})
    assert launched() == (1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no table of tuned launches: JSONDecodeError"),
        ("[]", "is no table of tuned launches: TypeError"),
        ("[" * 200_000, "is no table of tuned launches: RecursionError"),
        ('{"format": 1, "tables": [{"gpus": 1}]}', "is no table of tuned launches: TypeError"),
        ('{"format": 1, "tables": [{"entries": [{"op": "norm"}]}]}', "is no table of tuned launches: KeyError"),
        ('{"format": 2, "tables": []}', "has format 2, not 1: make it again"),
    ],
)
def test_what_is_no_table_is_ignored_with_one_message(
    table: Path, text: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    table.write_text(text)
    _tuned.forget_tables()
    with caplog.at_level(logging.WARNING, "apex.ops"):
        assert launched() == launched() == launched(3) == (1, 1)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"the tuned launches of {table} are not used: {message}")


@pytest.mark.parametrize("head", [{"driver": 1}, {"triton": "1.0"}])
def test_a_stale_table_is_ignored_with_one_message(
    table: Path, head: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write(table, ENTRY, **head)
    with caplog.at_level(logging.WARNING, "apex.ops"):
        assert launched() == launched(3) == (1, 1)
    (record,) = caplog.records
    ((name, value),) = head.items()
    assert f"made with {name} {value}; here is driver" in record.getMessage()


def test_a_table_for_another_gpu_is_none_of_ours(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(table, ENTRY, gpu="NVIDIA H20")
    assert launched() == (1, 1)
    assert not caplog.records


def test_questions_are_noted_and_answers_tried(table: Path) -> None:
    write(table, ENTRY)
    with _tuned.noting() as noted:
        launched(), launched()
    ((question, answer),) = noted.values()
    assert question.key == _tuned.key_of(ENTRY)
    assert (answer.rows_per_program, answer.num_warps) == (1, 1)  # the rule's own, not the table's
    with _tuned.trying({question.key: {"num_warps": 8}}):
        assert launched() == (1, 8)
    with _tuned.trying({}):
        assert launched() == (1, 1)
    assert launched() == (4, 2)


def test_the_tables_of_the_package_can_be_read() -> None:
    all_families()
    assert list(_tuned.SHIPPED.glob("*.json"))
    for path in _tuned.SHIPPED.glob("*.json"):
        for found in _tuned.read_tables(path):
            assert found.problem is None
            for entry in found.entries:
                assert _tuned.fits(entry)
                assert entry["op"] in _tuned.TUNABLE
                assert entry["after_us"] * 1.03 <= entry["before_us"] + 0.01


class OutOfResources(Exception):
    """Named as Triton's."""


def _fails_with_two_warps(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """Has a function fail as a launch that needs too much memory does; returns the warps of its calls so far."""
    function, warps = getattr(owner, name), []

    def fails(*arguments: Any) -> Any:
        warps.append(config.forward_config(8, 64, 4, True, HERE).num_warps)
        if warps[-1] == 2:
            raise OutOfResources("shared memory")
        return function(*arguments)

    monkeypatch.setattr(owner, name, fails)
    return warps


def test_a_launch_that_does_not_fit_is_made_as_the_rule_says(
    table: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(table, ENTRY)
    warps = _fails_with_two_warps(monkeypatch, NORM, "_forward")
    x = torch.randn(8, 64, dtype=torch.float32, device=DEVICE)
    with _library.implementation("triton"), torch.no_grad(), caplog.at_level(logging.WARNING, "apex.ops"):
        torch.testing.assert_close(layer_norm(x, (64,)), torch.nn.functional.layer_norm(x, (64,)))
        layer_norm(x, (64,))
    assert warps == [2, 1, 1]
    (record,) = caplog.records
    assert "the tuned launches of norm are no longer used, since one does not fit" in record.getMessage()


def test_so_is_one_that_adds_a_residual(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs more memory than the launch of the same rule that was tuned."""
    write(table, ENTRY)
    warps = _fails_with_two_warps(monkeypatch, op, "_forward_launch")
    x, weight = torch.randn(8, 64, dtype=torch.float32, device=DEVICE), torch.ones(64, device=DEVICE)
    with _library.implementation("triton"), torch.no_grad():
        output, total = add_norm(x, x, None, 64, weight, weight, subtract_mean=True)
    torch.testing.assert_close(output, torch.nn.functional.layer_norm(total, (64,)) + 1)
    assert warps == [2, 1]


def test_without_a_table_what_does_not_fit_is_an_error(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> Any:
        raise OutOfResources("shared memory")

    monkeypatch.setattr(NORM, "_forward", fails)
    x = torch.ones(8, 64, dtype=torch.float32, device=DEVICE)
    with _library.implementation("triton"), pytest.raises(OutOfResources):
        layer_norm(x, (64,))


def test_rules_ask_the_tables_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_tuned, "_from_tables", lambda question, answer, device: asked.append(question) or answer)
    for _ in range(3):
        config.forward_config(8, 64, 4, True, INTERPRETER)
    assert len(asked) == 1


def test_rules_answer_without_triton(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table, ENTRY)
    monkeypatch.setattr(_library, "_triton_found", ["not installed"])
    monkeypatch.setitem(sys.modules, "triton", None)
    assert config.forward_config(8, 64, 4, True, HERE).num_warps == 1


def test_a_device_without_entries_has_none(table: Path) -> None:
    write(table, ENTRY)
    assert _tuned.entries_for(DeviceFacts("another", "cuda", 132, 32, 1 << 17)) == {}
