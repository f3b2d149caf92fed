"""How captures begin, end and fail, on a stand-in for what PyTorch keeps account of: pools and generators."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import pytest
import torch

from apex.ops import _graph
from apex.ops._graph import CudaGraphs

DEVICE = torch.device("cuda", 0)


class Account:
    """Graphs that use a pool, pools that are allocated from, and whether the generator takes part in a capture."""

    def __init__(self) -> None:
        self.uses: dict[tuple[int, int], int] = {}
        self.allocating: list[tuple[int, int]] = []
        self.generator_captures = False
        self.handles = 0
        self.begin_fails = self.is_invalid = False

    def handle(self) -> tuple[int, int]:
        self.handles += 1
        return 0, self.handles

    def end_allocating(self, _device: int, pool: tuple[int, int]) -> None:
        if pool not in self.allocating:
            raise RuntimeError("not currently recording")
        self.allocating.remove(pool)

    def release(self, _device: int, pool: tuple[int, int]) -> None:
        assert self.uses[pool] > 0
        self.uses[pool] -= 1


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """Leave what earlier files have made out of each capture's collection of garbage, which takes a second with it."""
    gc.freeze()


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Account:
    account = Account()

    class Graph:
        ended = False

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            account.generator_captures = True
            if account.begin_fails:
                account.begin_fails = False
                raise RuntimeError("a capture that does not begin")
            self._pool = pool or account.handle()
            # A pool that had a graph and has none is on its way out.
            assert account.uses.get(self._pool) != 0, "use_count > 0"
            account.uses[self._pool] = account.uses.get(self._pool, 0) + 1
            account.allocating.append(self._pool)

        def capture_end(self) -> None:
            if account.is_invalid or not hasattr(self, "_pool"):
                account.is_invalid = False
                raise RuntimeError("operation failed due to a previous error during capture")
            account.end_allocating(0, self._pool)
            account.generator_captures = False
            warnings.warn("The CUDA Graph is empty. This usually means something", stacklevel=2)
            self.ended = True

        def pool(self) -> tuple[int, int]:
            return self._pool

        def replay(self) -> None:
            pass

        def __del__(self) -> None:
            if self.ended:
                account.release(0, self._pool)

    nothing = contextlib.nullcontext
    replaced = {"CUDAGraph": Graph, "graph_pool_handle": account.handle, "Stream": nothing, "stream": nothing}
    replaced |= {"device": nothing, "synchronize": lambda: None, "empty_cache": lambda: None}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_graph, "_make_workspaces", lambda stream: None)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", account.end_allocating, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", account.release, raising=False)
    monkeypatch.setattr(CudaGraphs, "_streams", {})
    monkeypatch.setattr(CudaGraphs, "_broken", [])
    return account


@pytest.mark.filterwarnings("error")
def test_graphs_share_a_pool_while_one_is_alive(account: Account) -> None:
    graphs = CudaGraphs()
    first, result = graphs.capture(lambda: 3, DEVICE)
    second, _ = graphs.capture(lambda: None, DEVICE)
    assert result == 3
    assert account.uses == {(0, 1): 2}
    del first, second
    gc.collect()
    assert account.uses == {(0, 1): 0}
    _third, _ = graphs.capture(lambda: None, DEVICE)
    assert account.uses == {(0, 1): 0, (0, 2): 1}


@pytest.mark.parametrize("breaks", ["function", "capture", "end", "begin"])
@pytest.mark.filterwarnings("error")
def test_a_process_goes_on_after_a_capture_that_failed(account: Account, breaks: str) -> None:
    graphs = CudaGraphs()
    kept, _ = graphs.capture(lambda: None, DEVICE)
    account.begin_fails = breaks == "begin"

    def function() -> None:
        account.is_invalid = breaks in ("capture", "end")
        if breaks in ("function", "capture"):
            raise ValueError("wrong")

    with pytest.raises(ValueError if breaks in ("function", "capture") else RuntimeError):
        graphs.capture(function, DEVICE)
    gc.collect()
    assert not account.generator_captures
    assert not account.allocating
    assert sum(account.uses.values()) == 1  # of the graph that is kept
    _other, _ = graphs.capture(lambda: None, DEVICE)
    assert sum(account.uses.values()) == 2
    assert not account.generator_captures
    del kept
