"""The report of `apex run` about processes that failed, and scripts that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from apex.parallel._hosts import machine_counts
from apex.parallel._torchrun import first_failure, report
from tests.parallel.processes import environment


def failure(tmp_path: Path, rank: int, exitcode: int, text: str = "", nanoseconds: int = 0) -> ProcessFailure:
    path = tmp_path / f"{rank}.json"
    if text:
        details = {"py_callstack": f"Traceback\n{text}\n", "timestamp": "5", "nanoseconds": nanoseconds}
        path.write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    return ProcessFailure(rank, 100 + rank, exitcode, str(path))


def test_the_first_error_comes_first_and_the_others_in_a_line(tmp_path: Path) -> None:
    failures = {
        # torchrun has ended it while it was reporting its error.
        0: failure(tmp_path, 0, -15, "RuntimeError: Connection closed\nsee the logs", 7),
        1: failure(tmp_path, 1, 1, "ValueError: mine", 6),
        2: failure(tmp_path, 2, -15),
    }
    rank, found = first_failure(failures)
    assert (rank, found) == (1, failures[1])
    assert report(rank, failures).splitlines() == [
        "rank 1 failed first: ValueError: mine",
        "Traceback",
        "ValueError: mine",
        "Ranks that failed after it: 0 (RuntimeError: Connection closed), 2 (Signal 15 (SIGTERM))",
    ]


def test_a_process_that_was_killed_comes_before_errors_about_it(tmp_path: Path) -> None:
    failures = {0: failure(tmp_path, 0, 1, "RuntimeError: Connection closed", 7), 1: failure(tmp_path, 1, -9)}
    rank, _ = first_failure(failures)
    assert rank == 1
    assert report(rank, failures).splitlines() == [
        "rank 1 failed first: Signal 9 (SIGKILL)",
        "Ranks that failed after it: 0 (RuntimeError: Connection closed)",
    ]


def test_a_status_without_an_error(tmp_path: Path) -> None:
    text = report(0, {0: failure(tmp_path, 0, 3)})
    assert text.startswith("rank 0 failed first: exit status 3\nIt recorded no error")


@pytest.mark.parametrize(("text", "counts"), [("1", (1, 1)), ("4", (4, 4)), ("1:4", (1, 4)), ("2:2", (2, 2))])
def test_numbers_of_machines(text: str, counts: tuple[int, int]) -> None:
    assert machine_counts(text) == counts


@pytest.mark.parametrize("text", ["", "0", "4:1", "0:4", "one", "1:", ":2", "1:2:3", "-1"])
def test_wrong_numbers_of_machines(text: str) -> None:
    with pytest.raises(ValueError, match="is no number of machines: give one, or the fewest and the most"):
        machine_counts(text)


SCRIPT = '''"""The script's own words."""
import sys
import helper  # beside the script
if __name__ == "__main__":
    print(__doc__, __file__, sys.argv[1:], sys.modules["__main__"].__dict__ is globals())
    helper.fail()
'''


def run(tmp_path: Path, *arguments: str) -> tuple[Any, dict[str, Any]]:
    record = tmp_path / "error.json"
    where = {**environment(), "TORCHELASTIC_ERROR_FILE": str(record)}
    # As a process of its own: the record is made when the interpreter ends.
    command = [sys.executable, "-m", "apex.parallel._recorded", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, timeout=100, check=False)
    return done, json.loads(record.read_text())["message"]


def test_scripts_run_as_by_python_and_leave_a_record(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "helper.py").write_text("def fail():\n    raise ValueError('of the script')\n")
    (tmp_path / "folder" / "script.py").write_text(SCRIPT)
    done, record = run(tmp_path, "folder/script.py", "--module", "x")
    assert done.returncode == 1
    assert done.stdout == "The script's own words. folder/script.py ['--module', 'x'] True\n"
    assert record["message"] == "ValueError: of the script"
    assert record["extraInfo"]["py_callstack"] == done.stderr
    assert "_recorded" not in done.stderr  # a traceback begins in the script
    assert "runpy" not in done.stderr
    assert record["extraInfo"]["nanoseconds"] // 10**9 == int(record["extraInfo"]["timestamp"])
