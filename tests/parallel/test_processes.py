"""Reports of `run_checks` about failed checks: each rank's own error, and no follow-up errors."""

from __future__ import annotations

import os
from pathlib import Path

from tests.parallel import failing_checks, real_checks
from tests.parallel.processes import environment, run_checks


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


def test_processes_that_see_a_gpu_are_no_forks(tmp_path: Path) -> None:
    """PyTorch refuses to use CUDA in forks of a process that has asked whether there is a GPU."""
    found = run_checks(real_checks.__name__, tmp_path, on_gpu=True)
    passed, ended = (found[name] for name in real_checks.CHECKS)
    assert not passed, passed
    assert "ended by itself: rank 1, exit code 7" in ended


def test_processes_that_fork_see_no_gpu() -> None:
    assert environment()["CUDA_VISIBLE_DEVICES"] == "-1"
    assert environment(on_gpu=True).get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES")
