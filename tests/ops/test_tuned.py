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

from apex.ops import _device, _launch, _library, _tuned, layer_norm
from apex.ops._device import INTERPRETER, DeviceFacts, facts
from apex.ops._launch import record_launches
from apex.ops.norm import config

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
    _device.forget_launches()
    yield tmp_path / "tuned.json"
    monkeypatch.undo()
    _device.forget_launches()


def write(path: Path, *entries: dict[str, Any], **head: Any) -> None:
    versions = {"gpu": HERE.name, **_tuned.versions(), **head}
    path.write_text(json.dumps({"format": _tuned.FORMAT, "tables": [{**versions, "entries": list(entries)}]}))
    _device.forget_launches()


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
    _device.forget_launches()
    assert launched() == (1, 1)
    assert _tuned.tables() == ()


def test_a_table_is_used_only_if_it_is_named(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(table, ENTRY)
    monkeypatch.delenv("APEX_TUNED")
    _device.forget_launches()
    assert launched() == (1, 1)


def test_a_named_file_that_is_missing_is_reported(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "apex.ops"):
        assert launched() == launched(3) == (1, 1)
    (record,) = caplog.records
    assert record.getMessage() == f"the tuned launches of {table} are not used: there is no such file"


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
    _device.forget_launches()
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


def test_a_launch_that_does_not_fit_names_the_table(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def fail(*_: Any, **__: Any) -> None:
        raise OutOfResources(300000, 232448, "shared memory")

    monkeypatch.setattr(_launch.PreparedLaunch, "_launch_plainly", fail)
    x = torch.ones(8, 64, dtype=torch.float32, device=DEVICE)
    message = "norm_forward_rows needs more than this GPU has: out of resource: shared memory, Required: 300000"
    with _library.implementation("triton"), pytest.raises(RuntimeError, match=f"{message}.*APEX_TUNED names, .*json"):
        layer_norm(x, (64,))
    monkeypatch.delenv("APEX_TUNED")
    with _library.implementation("triton"), pytest.raises(RuntimeError, match=message) as raised:
        layer_norm(x, (64,))
    assert "APEX_TUNED" not in str(raised.value)


def test_rules_ask_the_tables_once(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(_tuned, "entries_for", lambda device: asked.append(device) or {})
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
