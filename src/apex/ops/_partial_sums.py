"""Memory for partial sums that is kept from call to call.

A backward pass needs it between its programs or kernels only, so one piece serves every layer of a model: a step then
needs no more memory than PyTorch's operators do, which have no partial sums, and the host need not allocate it. One
piece per thread, because launches of threads may interleave: 17 MB for norms of rows of 16384 elements on 132
multiprocessors, half of that or less for shorter ones.

On the default stream only. On others graphs are captured, which keep the addresses they were captured with and so must
own what these point to, and warmed up: torch.compile(mode="reduce-overhead") does so with memory of its own, and
refuses to go on where some of it is kept.
"""

from __future__ import annotations

from _thread import get_ident

import torch
from torch import Tensor

from . import _recording
from ._device import current_stream

TICKETS = 4096

_kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}


def partial_sums(elements: int, device: torch.device, tickets: bool = True) -> tuple[Tensor, Tensor]:
    """At least `elements` uninitialised float32 on `device`, free again when the caller's last launch was queued.

    Beside them TICKETS for programs that finish each other's work: int32 that are 0, and must be 0 after that launch.
    Without `tickets` they may be anything: a graph that `apex.graphs` does not capture fills them in every replay.
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
    """Tickets that are 0; of a graph the same for all launches of a stream, since each leaves them 0 for the next."""
    recording, found = _recording.capturing(), None
    if recording is not None and device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in recording.tickets:
            recording.tickets[stream] = recording.memory(TICKETS, torch.int32)
        found = recording.tickets[stream]
    return torch.zeros(TICKETS, dtype=torch.int32, device=device) if found is None else found
