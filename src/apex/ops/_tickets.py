"""Counters that tell the last program of a launch that it is the last, so that it completes the others' work.

Every launch leaves the counters 0. All launches of a thread on the default stream therefore share one tensor; threads
have their own, because their launches may interleave. Launches on other streams get new counters: graphs are captured
there, and a graph must own the memory whose addresses it keeps.
"""

from __future__ import annotations

from _thread import get_ident

import torch
from torch import Tensor

from . import _graph_numbers
from ._device import current_stream

TICKETS = 4096

_kept: dict[tuple[int, int], Tensor] = {}


def tickets_on(device: torch.device) -> Tensor:
    """Return TICKETS int32 counters on `device` that are 0, for a launch that leaves them 0."""
    index = device.index
    if index is None or current_stream(index) != 0:
        return _new_tickets(device)
    key = (get_ident(), index)
    if key not in _kept:
        _kept[key] = _new_tickets(device)
    return _kept[key]


def _new_tickets(device: torch.device) -> Tensor:
    """Return tickets that are 0. All launches of a captured stream share theirs."""
    capture = _graph_numbers.capturing()
    if capture is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in capture.tickets:
            capture.tickets[stream] = capture.memory(TICKETS, torch.int32)
        tickets = capture.tickets[stream]
        if tickets is not None:
            return tickets
    return torch.zeros(TICKETS, dtype=torch.int32, device=device)
