"""The process stays on one core while a GPU is timed, and gets the others back."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from apex._bench import cores

pytestmark = pytest.mark.skipif(not cores.may_be_chosen(), reason="threads cannot be moved on this system")


def _cores() -> set[int]:
    return os.sched_getaffinity(threading.get_native_id())


def test_every_thread_stays_on_one_core_and_returns() -> None:
    before = _cores()
    with ThreadPoolExecutor(1) as older, ThreadPoolExecutor(1) as newer:
        assert older.submit(_cores).result() == before
        with cores.one_core():
            (core,) = _cores()
            assert core in before
            assert older.submit(_cores).result() == {core}
            assert newer.submit(_cores).result() == {core}
        assert older.submit(_cores).result() == newer.submit(_cores).result() == _cores() == before


def test_a_failure_gives_the_cores_back() -> None:
    before = _cores()
    with pytest.raises(RuntimeError, match="measured"), cores.one_core():
        raise RuntimeError("it could not be measured")
    assert _cores() == before


@pytest.mark.skipif(len(_cores()) < 2, reason="there is but one core")
def test_a_thread_that_has_a_core_of_its_own_keeps_it() -> None:
    *_, last = _cores()
    with ThreadPoolExecutor(1) as bound:
        bound.submit(lambda: os.sched_setaffinity(0, {last})).result()
        with cores.one_core():
            pass
        assert bound.submit(_cores).result() == {last}
