"""Reports of `run_checks` about failed checks: each rank's own error, and no follow-up errors."""

from __future__ import annotations

from pathlib import Path

from tests.parallel import failing_checks
from tests.parallel.processes import run_checks


def test_each_failure_is_reported_once_and_by_its_own_rank(tmp_path: Path) -> None:
    found = run_checks(failing_checks.__name__, tmp_path)
    assert list(found) == list(failing_checks.CHECKS)
    assert found["passes_before"] == found["passes_after"] == ""
    one = found["one_rank_finds_a_wrong_number"]
    assert "rank 1: " in one
    assert "3 is not 4" in one
    assert "rank 0" not in one  # it waited for rank 1, and lost no connection
    both = found["both_ranks_find_wrong_numbers"]
    assert "wrong on 0" in both
    assert "wrong on 1" in both
    assert "ended by itself: rank 1, exit code 7" in found["one_rank_ends"]
