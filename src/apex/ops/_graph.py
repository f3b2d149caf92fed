"""CUDA graphs: how a function is captured and replayed, and how a process goes on after a capture that failed."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor


class CudaGraphs:
    """Captures functions of one device: on one stream, with one memory pool for all graphs that are alive."""

    # Of all captures: a stream has workspaces of libraries, which are never freed.
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    # Kept, because allocators go on to ask a capture that was broken off which streams are its own.
    _broken: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @staticmethod
    def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
        """The GPU that the tensors are on, or the current one if there are none; None where no graph can be captured.

        That is without a GPU, while another graph is captured, and while the compiler traces.
        """
        if torch.compiler.is_compiling() or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return None
        found = {tensor.device for tensor in tensors}
        if not found:
            return torch.device("cuda", torch.cuda.current_device())
        device = found.pop()
        return device if device.type == "cuda" and not found else None

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Runs what is inside on the stream of the captures, after what was queued before and before what follows.

        PyTorch ties nodes of autograd to the stream on which they were first used: that must be one that is captured.
        """
        with torch.cuda.device(device):
            stream, here = self._stream(device), torch.cuda.current_stream(device)
            stream.wait_stream(here)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                here.wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        return self._streams.get(device) or self._streams.setdefault(device, torch.cuda.Stream(device))

    def capture(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Captures a function; returns what replays it on the current stream, and the function's result.

        Nothing is computed: the result has its values after a replay. An exception leaves the process as it was.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            gc.collect()  # memory that garbage holds would be beside the pool's
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # A pool ends with its last graph, and cannot be used again.
            pool = next((other.pool() for other in self._graphs), None) or torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self._stream(device)):
                try:
                    # Other threads go on: those that load data, and NCCL's, which asks after its work.
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    result = function()
                    _end(graph)
                except BaseException:
                    self._abandon(graph, pool, device)
                    raise
        self._graphs.add(graph)
        return graph.replay, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
        """Ends a capture that failed; where what failed has made it invalid, does what PyTorch then leaves undone."""
        with contextlib.suppress(RuntimeError):
            _end(graph)
            return
        self._broken.append(graph)
        self._graphs.clear()  # the next capture is to have another pool: PyTorch has not done with this one
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the latter before PyTorch 2.8
        end_allocating = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
        with contextlib.suppress(RuntimeError):  # the capture did not begin, and the pool does not count it
            end_allocating(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        # A capture that ends well tells the random number generators that none is under way.
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        _end(other)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # A function may have nothing to do on the device, or fail before it does.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
