"""Capture and replay of functions as CUDA graphs, and recovery of the process after a capture that failed."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ._staging import wait_for_copies


class CudaGraphs:
    """A recorder of functions on one device: on one stream, with one memory pool for all graphs that are alive."""

    # Shared by all captures, because libraries allocate workspaces for each stream and never free them.
    _streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}
    # Kept alive, because allocators still ask an aborted capture which streams belong to it.
    _broken: ClassVar[list[torch.cuda.CUDAGraph]] = []

    def __init__(self) -> None:
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @staticmethod
    def device_of(tensors: Iterable[Tensor]) -> torch.device | None:
        """Return the GPU that all tensors are on, or the current GPU if there are no tensors.

        Return None if no graph can be captured: without a GPU, during another capture, or while the compiler traces.
        """
        if torch.compiler.is_compiling() or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            return None
        devices = {tensor.device for tensor in tensors}
        if not devices:
            return torch.device("cuda", torch.cuda.current_device())
        device = devices.pop()
        return device if device.type == "cuda" and not devices else None

    @contextlib.contextmanager
    def aside(self, device: torch.device) -> Iterator[None]:
        """Run the block on the capture stream, ordered after the work queued before it and before the work after it.

        PyTorch ties autograd nodes to the stream on which they were first used: this must be the captured stream.
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
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            _make_workspaces(self._streams[device])
        return self._streams[device]

    def capture(self, function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
        """Capture a function; return a callable that replays it on the current stream, and the function's result.

        Nothing is computed: the result has values only after a replay. An exception leaves the process as it was.
        """
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            gc.collect()  # garbage would hold memory outside of the pool
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            # A pool ends with its last graph, and cannot be used again.
            pool = next((other.pool() for other in self._graphs), None) or torch.cuda.graph_pool_handle()
            with torch.cuda.stream(self._stream(device)):
                try:
                    # Other threads may continue: data loaders, and NCCL's watchdog, which polls its work.
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    result = function()
                    _end(graph)
                except BaseException:
                    self._abandon(graph, pool, device)
                    raise
        self._graphs.add(graph)

        def replay() -> None:
            wait_for_copies()  # an asynchronous save may still read tensors that the graph changes
            graph.replay()

        return replay, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> None:
        """End a capture that failed. If that made the capture invalid, do the clean-up that PyTorch then omits."""
        with contextlib.suppress(RuntimeError):
            _end(graph)
            return
        self._broken.append(graph)
        self._graphs.clear()  # the next capture needs another pool: PyTorch has not released this one
        names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")  # the latter before PyTorch 2.8
        end_allocating = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
        with contextlib.suppress(RuntimeError):  # if the capture never began, the pool does not count it
            end_allocating(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        # Only a capture that ends well tells the random number generators that no capture is under way.
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        _end(other)


def _make_workspaces(stream: torch.cuda.Stream) -> None:
    """Run a product and its backward pass on a new stream, for which cuBLAS allocates its workspaces.

    PyTorch keeps one workspace for each stream and thread, and autograd has a thread of its own. A workspace that is
    allocated in the middle of a training step becomes a part of any cached block that is free, and `empty_cache` cannot
    release that block again. In a simulation of the first backward pass of a BERT-base, it is the block of the float32
    logits: 32 MiB hold 1908 MiB, which captured graphs, with memory of their own, cannot use.
    """
    with torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        ones = torch.ones(16, 16, dtype=torch.float32, device=stream.device, requires_grad=True)
        # Deterministic algorithms refuse products without CUBLAS_WORKSPACE_CONFIG; a step may have none.
        with contextlib.suppress(RuntimeError):
            torch.autograd.grad(functional.linear(ones, ones, ones[0]).sum(), ones)


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # A function may launch nothing on the device, or fail before its first launch.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()
