"""Exchanges of activations and gradients with the neighbours in the pipeline, for schedules that users write.

The built-in schedules do not use these functions; they run lists of messages (`_execute.py`). Every tensor is preceded
by its shape and dtype, which the receiver compares with the expected ones. With `async_comm` the functions return
FutureTensors, with `overlap_p2p_comm` they also return a list of handles to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..._arguments import checked
from .. import parallel_state
from .._groups.device import parameter_device
from ._messages import Link, TensorSpec, Transfer, read_announcement, spec_of

Shape: TypeAlias = "Sequence[int] | None"
Dtype: TypeAlias = "torch.dtype | None"


class ExchangeOptions(TypedDict, total=False):
    """Keyword options of all exchanges; `overlap_p2p_comm` only applies to exchanges around a ring.

    If `dtype` is None, the sender's dtype is used. The last four options are accepted for compatibility and have no
    effect: exchanges never synchronize the device, and tensors are never split for sending.
    """

    dtype: Dtype
    async_comm: bool
    overlap_p2p_comm: bool
    sequence_parallel_enabled: bool
    sync_batch_comm: bool
    batch_p2p_comm: bool
    timers: Any


class FutureTensor:
    """A tensor that is being received; `get` waits for it."""

    @checked
    def __init__(self, tensor: Tensor, waitfunc: Callable[[], Any] | None) -> None:
        self.tensor = tensor
        self.waitfunc = waitfunc

    def get(self) -> Tensor:
        """Wait for the tensor and return it."""
        if self.waitfunc is not None:
            self.waitfunc()
            self.waitfunc = None
        return self.tensor


class _Neighbour(NamedTuple):
    """The peer, the tag and the description of one side of an exchange.

    Forward messages go to the next stage, backward messages to the previous stage.
    """

    rank: int
    tag: int
    words: str


def _neighbour(forward: bool, sending: bool) -> _Neighbour:
    if forward == sending:
        rank, side = parallel_state.get_pipeline_model_parallel_next_rank(), "next stage"
    else:
        rank, side = parallel_state.get_pipeline_model_parallel_prev_rank(), "stage before"
    verb, direction = ("sending", "to") if sending else ("receiving", "from")
    message = ("an output" if sending else "an input") if forward else "a gradient"
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return _Neighbour(rank, 2 * int(forward), f"pipeline stage {stage}: {verb} {message} {direction} the {side}")


class _PostedReceive:
    """A posted receive and the announcement of the tensor's shape and dtype, which precedes it."""

    def __init__(self, link: Link, forward: bool, shape: Shape, dtype: Dtype) -> None:
        if shape is None:
            raise RuntimeError("`tensor_shape` must be specified. It is the shape of the tensor that will be received.")
        self._link, self._neighbour = link, _neighbour(forward, False)
        self._shape, self._dtype = tuple(shape), dtype
        device = parameter_device()
        rank, tag, words = self._neighbour
        self._announcement: Transfer | None = link.receive_announcement(device, rank, tag, words)
        self._transfer: Transfer | None = None
        if dtype is not None:
            self._transfer = link.receive(TensorSpec(self._shape, dtype), device, rank, tag + 1, words)

    def wait(self) -> Tensor:
        """Return the received tensor; raise if its shape or dtype is not the expected one."""
        rank, tag, words = self._neighbour
        if self._announcement is not None:
            (coming,) = read_announcement(self._announcement)
            self._announcement = None
            expected = TensorSpec(self._shape, coming.dtype if self._dtype is None else self._dtype)
            if coming != expected:
                raise RuntimeError(f"{words}: expected {expected}, but {coming} comes")
            if self._transfer is None:
                self._transfer = self._link.receive(coming, parameter_device(), rank, tag + 1, words)
        assert self._transfer is not None
        return self._transfer.wait()

    def future(self) -> FutureTensor:
        """Return a FutureTensor for the tensor."""
        if self._transfer is None:  # the dtype is known only after the announcement
            tensor = self.wait().requires_grad_(True)
            return FutureTensor(tensor, None)
        return FutureTensor(self._transfer.tensor.requires_grad_(True), self.wait)


def _communicate(
    tensor_shape: Shape,
    options: ExchangeOptions,
    sent: tuple[Tensor | None, Tensor | None],
    received: tuple[bool, bool],
) -> tuple[Any, Any, list[Any]]:
    """Exchange tensors with both neighbours; return the tensors from the previous and the next stage, and the handles.

    `sent` holds the tensors for the next and the previous stage. `received` says whether tensors are expected from the
    previous and the next stage; the result is None where none is expected. All messages start at once. With
    `async_comm` the results are FutureTensors, with `overlap_p2p_comm` they are tensors to wait for through the
    handles.
    """
    async_comm = options.get("async_comm", False)
    link = Link(parallel_state.get_pipeline_model_parallel_group())
    handles: list[Any] = []
    for tensor, forward in zip(sent, (True, False), strict=True):
        if tensor is not None:
            rank, tag, words = _neighbour(forward, True)
            handles.append(link.announce([spec_of(tensor)], tensor.device, rank, tag, words))
            handles.append(link.send(tensor, rank, tag + 1, words))
    receives = [
        _PostedReceive(link, forward, tensor_shape, options.get("dtype")) if expected else None
        for expected, forward in zip(received, (True, False), strict=True)
    ]
    link.flush()
    if async_comm or options.get("overlap_p2p_comm", False):
        futures = [None if receive is None else receive.future() for receive in receives]
        handles += [receive for receive in receives if receive is not None]
        _keep_until_sent(handles)
        if async_comm:
            return futures[0], futures[1], handles
        tensors = [None if future is None else future.tensor for future in futures]
        return tensors[0], tensors[1], handles
    tensors = [None if receive is None else receive.wait().requires_grad_(True) for receive in receives]
    link.finish()
    return tensors[0], tensors[1], []


_being_sent: list[Transfer] = []


def _keep_until_sent(handles: list[Any]) -> None:
    """Keep tensors alive while they are being sent; if more than 16 are pending, wait for the oldest."""
    _being_sent.extend(handle for handle in handles if isinstance(handle, Transfer))
    while len(_being_sent) > 16 or (_being_sent and _being_sent[0].done()):
        _being_sent.pop(0).wait()


def _overlaps(options: ExchangeOptions) -> bool:
    """Check the options of an exchange in a ring, and return True if the caller waits for the handles itself."""
    _check_names(options, ExchangeOptions.__optional_keys__)
    return options.get("overlap_p2p_comm", False)


def _check_names(options: ExchangeOptions, known: Set[str]) -> None:
    unknown = sorted(options.keys() - known)
    if unknown:
        raise TypeError(f"got unexpected keyword arguments {', '.join(unknown)}")


def _first(options: ExchangeOptions) -> bool:
    """Check the options of an exchange, and return True in the first stage."""
    _check_names(options, ExchangeOptions.__optional_keys__ - {"overlap_p2p_comm"})
    return parallel_state.is_pipeline_first_stage()


def _last(options: ExchangeOptions) -> bool:
    """Check the options of an exchange, and return True in the last stage."""
    _check_names(options, ExchangeOptions.__optional_keys__ - {"overlap_p2p_comm"})
    return parallel_state.is_pipeline_last_stage()


def _given(**tensor: Tensor | None) -> Tensor:
    """Return the tensor, or raise TypeError with its name: a neighbour would wait for None forever."""
    ((name, value),) = tensor.items()
    if value is None:
        raise TypeError(f"{name} must be a tensor, got None, and a neighbouring stage waits for it")
    return value


@checked
def recv_forward(
    tensor_shape: Shape, override_scatter_gather_tensors_in_pipeline: bool = False, **options: Unpack[ExchangeOptions]
) -> Any:
    """Return the input from the previous stage, or None in the first stage."""
    return None if _first(options) else _communicate(tensor_shape, options, (None, None), (True, False))[0]


@checked
def recv_backward(tensor_shape: Shape = None, **options: Unpack[ExchangeOptions]) -> Any:
    """Return the gradient from the next stage, or None in the last stage."""
    return None if _last(options) else _communicate(tensor_shape, options, (None, None), (False, True))[1]


@checked
def send_forward(
    output_tensor: Tensor | None,
    override_scatter_gather_tensors_in_pipeline: bool = False,
    tensor_shape: Shape = None,
    **options: Unpack[ExchangeOptions],
) -> None:
    """Send the output to the next stage; does nothing in the last stage."""
    if not _last(options):
        _communicate(tensor_shape, options, (_given(output_tensor=output_tensor), None), (False, False))


@checked
def send_backward(
    input_tensor_grad: Tensor | None, tensor_shape: Shape = None, **options: Unpack[ExchangeOptions]
) -> None:
    """Send the gradient of the input to the previous stage; does nothing in the first stage."""
    if not _first(options):
        _communicate(tensor_shape, options, (None, _given(input_tensor_grad=input_tensor_grad)), (False, False))


@checked
def send_forward_recv_backward(
    output_tensor: Tensor | None, tensor_shape: Shape, **options: Unpack[ExchangeOptions]
) -> Any:
    """Send the output to the next stage and return the gradient from there, or None in the last stage."""
    if _last(options):
        return None
    return _communicate(tensor_shape, options, (_given(output_tensor=output_tensor), None), (False, True))[1]


@checked
def send_backward_recv_forward(
    input_tensor_grad: Tensor | None, tensor_shape: Shape, **options: Unpack[ExchangeOptions]
) -> Any:
    """Send the input's gradient to the previous stage and return an input from there, or None in the first stage."""
    if _first(options):
        return None
    sent = (None, _given(input_tensor_grad=input_tensor_grad))
    return _communicate(tensor_shape, options, sent, (True, False))[0]


@checked
def send_forward_recv_forward(
    output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, **options: Unpack[ExchangeOptions]
) -> Any:
    """Send an output to the next stage and return an input from the previous stage; the pipeline is a ring."""
    overlaps = _overlaps(options)
    input_tensor, _, handles = _communicate(tensor_shape, options, (output_tensor, None), (recv_prev, False))
    return (input_tensor, handles) if overlaps else input_tensor


@checked
def send_backward_recv_backward(
    input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, **options: Unpack[ExchangeOptions]
) -> Any:
    """Send a gradient to the previous stage and return a gradient from the next stage; the pipeline is a ring."""
    overlaps = _overlaps(options)
    _, output_grad, handles = _communicate(tensor_shape, options, (None, input_tensor_grad), (False, recv_next))
    return (output_grad, handles) if overlaps else output_grad


@checked
def send_forward_backward_recv_forward_backward(
    output_tensor: Tensor | None,
    input_tensor_grad: Tensor | None,
    recv_prev: bool,
    recv_next: bool,
    tensor_shape: Shape,
    **options: Unpack[ExchangeOptions],
) -> Any:
    """Send an output and a gradient, and return an input and a gradient, all at once."""
    overlaps = _overlaps(options)
    sent, received = (output_tensor, input_tensor_grad), (recv_prev, recv_next)
    from_previous, from_next, handles = _communicate(tensor_shape, options, sent, received)
    return (from_previous, from_next, handles) if overlaps else (from_previous, from_next)
