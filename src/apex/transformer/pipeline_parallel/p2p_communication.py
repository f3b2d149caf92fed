"""Sending activations and their gradients to the neighbours in the pipeline, one exchange at a time.

The schedules run on lists of messages (`_execute.py`); these nine functions are for schedules of one's own. Every
tensor is preceded by its shape and dtype, which the receiver compares with what it expects. With `async_comm` they
return FutureTensors, with `overlap_p2p_comm` also a list of what to wait for. The options in `_UNUSED` are accepted and
change nothing: nothing here waits for a whole device, and tensors are never cut into parts on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import parallel_state
from .._groups.device import parameter_device
from ._messages import Kind, Link, Transfer, announced, kind_of

__all__ = [
    "FutureTensor",
    "recv_backward",
    "recv_forward",
    "send_backward",
    "send_backward_recv_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_backward_recv_forward_backward",
    "send_forward_recv_backward",
    "send_forward_recv_forward",
]

Shape: TypeAlias = "Sequence[int] | None"
Dtype: TypeAlias = "torch.dtype | None"


class FutureTensor:
    """A tensor that is on its way; `get` waits for it."""

    def __init__(self, tensor: Tensor, waitfunc: Callable[[], Any] | None) -> None:
        self.tensor = tensor
        self.waitfunc = waitfunc

    def get(self) -> Tensor:
        """The tensor, once it is there."""
        if self.waitfunc is not None:
            self.waitfunc()
            self.waitfunc = None
        return self.tensor


class _Neighbour(NamedTuple):
    """One side of an exchange: forward messages go to the next stage, backward ones to the stage before."""

    rank: int
    tag: int
    words: str


def _neighbour(forward: bool, sending: bool) -> _Neighbour:
    if forward == sending:
        rank, side = parallel_state.get_pipeline_model_parallel_next_rank(), "next stage"
    else:
        rank, side = parallel_state.get_pipeline_model_parallel_prev_rank(), "stage before"
    verb, direction = ("sending", "to") if sending else ("receiving", "from")
    words = ("an output" if sending else "an input") if forward else "a gradient"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return _Neighbour(rank, 2 * int(forward), f"pipeline stage {stage}: {verb} {words} {direction} the {side}")


class _Arrival:
    """A tensor on its way here, and what was said about it."""

    def __init__(self, link: Link, forward: bool, shape: Shape, dtype: Dtype) -> None:
        if shape is None:
            raise RuntimeError("`tensor_shape` must be specified. It is the shape of the tensor that will be received.")
        self._link, self._neighbour = link, _neighbour(forward, False)
        self._shape, self._dtype = tuple(shape), dtype
        device = parameter_device()
        rank, tag, words = self._neighbour
        self._announcement: Transfer | None = link.await_announced(device, rank, tag, words)
        self._transfer: Transfer | None = None
        if dtype is not None:
            self._transfer = link.receive(Kind(self._shape, dtype), device, rank, tag + 1, words)

    def wait(self) -> Tensor:
        """The tensor; an error where another shape or dtype comes than was asked for."""
        rank, tag, words = self._neighbour
        if self._announcement is not None:
            (coming,) = announced(self._announcement)
            self._announcement = None
            expected = Kind(self._shape, coming.dtype if self._dtype is None else self._dtype)
            if coming != expected:
                raise RuntimeError(f"{words}: expected {expected}, but {coming} comes")
            if self._transfer is None:
                self._transfer = self._link.receive(coming, parameter_device(), rank, tag + 1, words)
        assert self._transfer is not None
        return self._transfer.wait()

    def future(self) -> FutureTensor:
        """What to return before the tensor is there."""
        if self._transfer is None:  # The dtype comes with the announcement.
            tensor = self.wait().requires_grad_(True)
            return FutureTensor(tensor, None)
        return FutureTensor(self._transfer.tensor.requires_grad_(True), self.wait)


def _communicate(
    send_next: Tensor | None,
    send_prev: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: Dtype,
    async_comm: bool = False,
    overlap: bool = False,
) -> tuple[Any, Any, list[Any]]:
    """What comes from the stage before and from the next one, None where nothing was asked for, and what to wait for.

    Everything is started at once. With `async_comm` both are FutureTensors, with `overlap` tensors to be waited for.
    """
    link = Link(parallel_state.get_pipeline_model_parallel_group())
    handles: list[Any] = []
    for tensor, forward in ((send_next, True), (send_prev, False)):
        if tensor is not None:
            rank, tag, words = _neighbour(forward, True)
            handles.append(link.announce([kind_of(tensor)], tensor.device, rank, tag, words))
            handles.append(link.send(tensor, rank, tag + 1, words))
    arrivals = [
        _Arrival(link, forward, tensor_shape, dtype) if wanted else None
        for wanted, forward in ((recv_prev, True), (recv_next, False))
    ]
    link.flush()
    if async_comm or overlap:
        futures = [None if arrival is None else arrival.future() for arrival in arrivals]
        handles += [arrival for arrival in arrivals if arrival is not None]
        _kept_until_sent(handles)
        if async_comm:
            return futures[0], futures[1], handles
        tensors = [None if future is None else future.tensor for future in futures]
        return tensors[0], tensors[1], handles
    found = [None if arrival is None else arrival.wait().requires_grad_(True) for arrival in arrivals]
    link.finish()
    return found[0], found[1], []


_being_sent: list[Transfer] = []


def _kept_until_sent(handles: list[Any]) -> None:
    """Keeps tensors that nobody waits for from being freed while they are sent; the oldest are waited for."""
    _being_sent.extend(handle for handle in handles if isinstance(handle, Transfer))
    while len(_being_sent) > 16 or (_being_sent and _being_sent[0].done()):
        _being_sent.pop(0).wait()


_UNUSED = {"sequence_parallel_enabled", "sync_batch_comm", "batch_p2p_comm", "timers"}


def _check_unused(unused: dict[str, Any]) -> None:
    unknown = sorted(unused.keys() - _UNUSED)
    if unknown:
        raise TypeError(f"got unexpected keyword arguments {', '.join(unknown)}")


def _first(unused: dict[str, Any]) -> bool:
    _check_unused(unused)
    return parallel_state.is_pipeline_first_stage()


def _last(unused: dict[str, Any]) -> bool:
    _check_unused(unused)
    return parallel_state.is_pipeline_last_stage()


def recv_forward(
    tensor_shape: Shape,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    dtype: Dtype = None,
    async_comm: bool = False,
    **unused: Any,
) -> Any:
    """The input from the stage before; None in the first stage."""
    return None if _first(unused) else _communicate(None, None, True, False, tensor_shape, dtype, async_comm)[0]


def recv_backward(tensor_shape: Shape, dtype: Dtype = None, async_comm: bool = False, **unused: Any) -> Any:
    """The gradient from the next stage; None in the last stage."""
    return None if _last(unused) else _communicate(None, None, False, True, tensor_shape, dtype, async_comm)[1]


def send_forward(
    output_tensor: Tensor,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    tensor_shape: Shape = None,
    dtype: Dtype = None,
    async_comm: bool = False,
    **unused: Any,
) -> None:
    """Sends the output to the next stage; nothing in the last stage."""
    if not _last(unused):
        _communicate(output_tensor, None, False, False, tensor_shape, dtype, async_comm)


def send_backward(
    input_tensor_grad: Tensor, tensor_shape: Shape = None, dtype: Dtype = None, async_comm: bool = False, **unused: Any
) -> None:
    """Sends the gradient of the input to the stage before; nothing in the first stage."""
    if not _first(unused):
        _communicate(None, input_tensor_grad, False, False, tensor_shape, dtype, async_comm)


def send_forward_recv_backward(
    output_tensor: Tensor, tensor_shape: Shape, dtype: Dtype = None, async_comm: bool = False, **unused: Any
) -> Any:
    """Sends the output to the next stage and returns the gradient from there; None in the last stage."""
    return None if _last(unused) else _communicate(output_tensor, None, False, True, tensor_shape, dtype, async_comm)[1]


def send_backward_recv_forward(
    input_tensor_grad: Tensor, tensor_shape: Shape, dtype: Dtype = None, async_comm: bool = False, **unused: Any
) -> Any:
    """Sends the gradient of the input to the stage before and returns an input from there; None in the first stage."""
    if _first(unused):
        return None
    return _communicate(None, input_tensor_grad, True, False, tensor_shape, dtype, async_comm)[0]


def send_forward_recv_forward(
    output_tensor: Tensor | None,
    recv_prev: bool,
    tensor_shape: Shape,
    dtype: Dtype = None,
    async_comm: bool = False,
    overlap_p2p_comm: bool = False,
    **unused: Any,
) -> Any:
    """Sends an output to the next stage and returns an input from the stage before; the pipeline is a ring."""
    _check_unused(unused)
    exchange = (output_tensor, None, recv_prev, False, tensor_shape, dtype, async_comm, overlap_p2p_comm)
    found, _, handles = _communicate(*exchange)
    return (found, handles) if overlap_p2p_comm else found


def send_backward_recv_backward(
    input_tensor_grad: Tensor | None,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: Dtype = None,
    async_comm: bool = False,
    overlap_p2p_comm: bool = False,
    **unused: Any,
) -> Any:
    """Sends a gradient to the stage before and returns one from the next stage; the pipeline is a ring."""
    _check_unused(unused)
    exchange = (None, input_tensor_grad, False, recv_next, tensor_shape, dtype, async_comm, overlap_p2p_comm)
    _, found, handles = _communicate(*exchange)
    return (found, handles) if overlap_p2p_comm else found


def send_forward_backward_recv_forward_backward(
    output_tensor: Tensor | None,
    input_tensor_grad: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    dtype: Dtype = None,
    async_comm: bool = False,
    overlap_p2p_comm: bool = False,
    **unused: Any,
) -> Any:
    """All four at once: an output and a gradient are sent, an input and a gradient are returned."""
    _check_unused(unused)
    exchange = (output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape, dtype)
    before, after, handles = _communicate(*exchange, async_comm, overlap_p2p_comm)
    return (before, after, handles) if overlap_p2p_comm else (before, after)
