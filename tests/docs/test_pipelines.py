"""The script of docs/pipelines.md, in one process and in two."""

from __future__ import annotations

from pathlib import Path

from tests.docs.scripts import printed_losses


def test_two_processes_print_what_one_does(tmp_path: Path) -> None:
    alone, together = (printed_losses("pipelines.md", processes, tmp_path)[-1] for processes in (1, 2))
    assert alone == together
    assert alone[-1] < alone[0]
