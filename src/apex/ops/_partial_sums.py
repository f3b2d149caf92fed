"""Memory for partial sums that is kept from call to call.

A backward pass needs this memory only between its programs or kernels, so one buffer serves every layer of a model: a
step needs no more memory than with PyTorch's operators, which have no partial sums, and the host saves the allocation.
There is one buffer per thread, because launches of threads may interleave: 17 MB for norms of rows of 16384 elements on
132 multiprocessors, half of that or less for shorter rows.

Only the default stream uses kept memory. On other streams graphs are warmed up and captured. A graph keeps the
addresses it was captured with, so it must own that memory. torch.compile(mode="reduce-overhead") allocates memory of
its own and fails if some of it is kept elsewhere.
"""

from __future__ import annotations

from _thread import get_ident

import torch
from torch import Tensor

from . import _graph_numbers
from ._device import current_stream

TICKETS = 4096

_kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def partial_sums(elements: int, device: torch.device, tickets: bool = True) -> tuple[Tensor, Tensor]:
    """Return at least `elements` uninitialised float32 on `device`, and TICKETS int32 counters.

    The sums are free again when the caller's last launch is queued. Tickets are for programs that finish each other's
    work: they are 0, and must be 0 after that launch. If `tickets` is false they may have any value; this saves a graph
    that `apex.graphs` does not capture from filling them at every replay.
    """
    index = device.index
    if index is None or current_stream(index) != 0:
        sums = torch.empty(elements, dtype=torch.float32, device=device)
        return sums, _tickets(device) if tickets else sums
    key = (get_ident(), index)
    kept = _kept.get(key)
    if kept is None or kept[0].numel() < elements:
        kept = _kept[key] = torch.empty(elements, dtype=torch.float32, device=device), _tickets(device)
    return kept


def _tickets(device: torch.device) -> Tensor:
    """Return tickets that are 0. All launches of a captured stream share theirs, since each launch leaves them 0."""
    capture, tickets = _graph_numbers.capturing(), None
    if capture is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in capture.tickets:
            capture.tickets[stream] = capture.memory(TICKETS, torch.int32)
        tickets = capture.tickets[stream]
    return torch.zeros(TICKETS, dtype=torch.int32, device=device) if tickets is None else tickets
