"""The script of docs/transformer.md, in two processes and in one."""

from __future__ import annotations

from pathlib import Path

from tests.docs.scripts import printed_losses


def test_two_processes_find_what_one_does(tmp_path: Path) -> None:
    (alone,), (together,) = (printed_losses("transformer.md", processes, tmp_path)[0] for processes in (1, 2))
    assert abs(alone - together) < 1e-4
    assert alone < 1.0  # it has learnt the two batches: a model that knows nothing has 4.6
