"""Helpers of Colossal-AI's tests."""

from __future__ import annotations

import atexit
import inspect
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from apex import testing
from apex.testing.random import seed_all


def test_parameterize_calls_with_every_combination() -> None:
    calls = []

    @testing.clear_cache_before_run()
    @testing.parameterize("first", [1, 2])
    @testing.parameterize("second", iter("ab"))
    def record(first: int, second: str, third: int) -> None:
        calls.append((first, second, third))

    record(third=0)
    assert calls == [(1, "a", 0), (1, "b", 0), (2, "a", 0), (2, "b", 0)]


def test_rerun_on_exception() -> None:
    tries = []

    def fail(argument: int) -> int:
        tries.append(argument)
        raise RuntimeError("first line\nAddress already in use")

    again = testing.rerun_on_exception(RuntimeError, ".*in use", max_try=3)(fail)
    with pytest.raises(RuntimeError, match="first line"):
        again(5)
    assert tries == [5, 5, 5]
    assert list(inspect.signature(again).parameters) == ["argument"]
    with pytest.raises(RuntimeError):
        testing.rerun_on_exception(RuntimeError, "other", max_try=3)(fail)(6)
    assert tries == [5, 5, 5, 6]
    assert testing.rerun_if_address_is_in_use()(lambda: 7)() == 7
    with pytest.raises(ValueError, match="max_try=0 must be"):
        testing.rerun_on_exception(max_try=0)


def test_missing_accelerators_skip() -> None:
    @testing.skip_if_not_enough_gpus(min_gpus=99)
    def body() -> None: ...

    with pytest.raises(unittest.SkipTest, match=r"body needs 99 accelerators; there are \d+"):
        body()
    assert testing.skip_if_not_enough_gpus(0)(lambda: 3)() == 3


def test_dummy_dataloader() -> None:
    loader = testing.DummyDataloader(lambda: 4, length=2)
    assert [list(loader), list(loader), len(loader)] == [[4, 4], [4, 4], 2]


def test_seed_all() -> None:
    benchmark = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        seed_all(5, cuda_deterministic=True)
        assert torch.backends.cudnn.deterministic
        drawn = torch.rand(3)
        seed_all(5)
        assert torch.equal(torch.rand(3), drawn)
        assert not torch.backends.cudnn.deterministic
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark


def test_state_dicts_are_compared() -> None:
    one: dict[str, Any] = {"a": torch.ones(2), "b": [{"c": torch.zeros(1)}, 3], "d": "x"}
    testing.check_state_dict_equal(one, {"d": "x", "b": [{"c": torch.zeros(1) + 1e-4}, 3], "a": torch.ones(2)})
    testing.check_state_dict_equal({"a": torch.ones(2).half()}, {"a": torch.ones(2)}, ignore_dtype=True)
    for changed in ({"a": torch.zeros(2)}, {"b": [{"c": torch.zeros(1)}]}, {"d": "y"}, {"e": 1}):
        with pytest.raises(AssertionError):
            testing.check_state_dict_equal(one, {**one, **changed})


def test_outputs_are_compared() -> None:
    one = {"logits": torch.ones(2), "hidden": (torch.zeros(1), [torch.ones(1)])}
    testing.assert_hf_output_close(one, {**one, "logits": torch.ones(2) + 1e-6})
    with pytest.raises(AssertionError, match=r"\.hidden\.1\.0: "):
        testing.assert_hf_output_close(one, {**one, "hidden": (torch.zeros(1), [torch.zeros(1)])})
    testing.assert_hf_output_close(one, {**one, "logits": torch.zeros(2)}, ignore_keys=["logits"])
    testing.assert_equal(torch.ones(1), torch.ones(1))
    testing.assert_not_equal(torch.ones(1), torch.zeros(1))


def _note_groups_at_exit(rank: int, world_size: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world_size)
    dist.barrier()
    atexit.register(lambda: (folder / str(rank)).write_text(str(dist.is_initialized())))


def test_spawned_processes_end_without_process_groups(tmp_path: Path) -> None:
    """Threads of Gloo that still run at the end have aborted a process."""
    testing.spawn(_note_groups_at_exit, 2, folder=tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["False", "False"]
