"""Multi-process tests, run as a client's suite is run.

They run in a separate process: PyTorch's base class forbids changes of `torch.backends` in the process that imports it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support.warm import run_python

REPOSITORY = Path(__file__).resolve().parents[2]

pytest.importorskip("expecttest", reason="PyTorch's base class needs it")

GOOD = {
    "Base.test_sum",
    "Base.test_the_preparation_comes_first",
    "Gloo.test_backend",
    "Gloo.test_sum",
    "Nccl.test_backend",
    "Nccl.test_sum",
    "UccNames.test_both_modules_say_the_same",
    "UccEnvironment.test_it_is_set_for_the_processes_only",
}


def test_a_suite_in_several_processes() -> None:
    arguments = ("-m", "tests.distributed_testing.suite")
    process = run_python(*arguments, cwd=REPOSITORY, environment=os.environ, timeout=250)
    assert process.returncode == 0, process.stderr
    outcomes = json.loads(process.stdout.splitlines()[-1])
    assert "this is what it says" in outcomes.pop("Gloo.test_one_rank_fails")
    assert outcomes.pop("Gloo.test_skip").startswith("skipped")
    for name in ("Ucc.test_backend", "Ucc.test_sum"):
        outcome = outcomes.pop(name)
        assert outcome == "ok" or "needs a PyTorch with UCC" in outcome
    assert outcomes == dict.fromkeys(GOOD, "ok")


@pytest.mark.gpu
def test_a_suite_in_several_processes_on_gpus() -> None:
    test_a_suite_in_several_processes()
