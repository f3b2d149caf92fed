"""CUDA graphs: how a function is captured and replayed, and how a process goes on after a capture that failed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor


class CudaGraphs:
    """Captures functions of one device: on one stream, with one memory pool for all graphs."""

    # Of all captures: a stream has workspaces of libraries, which are never freed.
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}

    def __init__(self) -> None:
        self._pool: Any = None

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
            with torch.cuda.stream(stream):
                yield
            here.wait_stream(stream)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def capture(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Captures a function; returns what replays it on the current stream, and the function's result.

        Nothing is computed: the result has its values after a replay. An exception leaves the process as it was.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            gc.collect()  # memory that garbage holds would be beside the pool's
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self._stream(device)):
                # Other threads go on: those that load data, and NCCL's, which asks after its work.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    self._abandon(graph, device)
                    raise
                try:
                    graph.capture_end()
                except BaseException:
                    self._repair(graph, device)
                    raise
        return graph.replay, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # what failed has made the capture invalid
            self._repair(graph, device)

    def _repair(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        """Does what PyTorch leaves undone at the end of an invalid capture, which versions differ in."""
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(RuntimeError):  # it was done
                getattr(torch._C, name)(device.index, self._pool)
        self._pool = None
        self._streams.pop(device, None)
        # A capture that ends well tells the random number generators that no capture is under way.
        other = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(device)):
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, dtype=torch.float32, device=device)
            other.capture_end()

    def forget(self) -> None:
        """Lets go of the memory pool, which is freed when its last graph is."""
        self._pool = None
