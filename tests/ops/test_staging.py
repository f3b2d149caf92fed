"""Copies of tensors into host memory: their order, with streams and devices that are not there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from apex.ops import _staging


@pytest.mark.parametrize("on_device", [False, True])
def test_large_tensors_do_not_wait_for_the_clones_of_small_ones(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clones are queued on the training's stream after the copies that need none, and before their own copies."""
    small, large = torch.ones(8), torch.full((_staging.SMALL_BYTES,), 2.0)
    events: list[str] = []
    clone = _staging.Copies._clone

    class Stream:
        def record_event(self) -> None:
            events.append("event")

    @contextlib.contextmanager
    def on_stream(stream: Any) -> Iterator[None]:
        events.append("copy")
        yield

    monkeypatch.setattr(_staging, "on_host", lambda tensor: False)
    monkeypatch.setattr(_staging, "on_stream", on_stream)
    monkeypatch.setattr(_staging, "_streams", {small.device: Stream()})
    monkeypatch.setattr(_staging, "_reading", [])
    monkeypatch.setattr(_staging, "_hooks", [None])
    monkeypatch.setattr(
        _staging.Copies, "_clone", lambda self, entries: (events.append("clone"), clone(self, entries))[1]
    )
    buffer = _staging.HostBuffer(2 * large.nbytes, False)
    copies = _staging.Copies(buffer.memory, [(small, 0), (large, _staging.ALIGNMENT)], on_device)
    assert events == (["clone", "copy", "event"] if on_device else ["copy", "clone", "copy", "event"])
    assert len(copies._clones) == 1
    for tensor, offset in ((small, 0), (large, _staging.ALIGNMENT)):
        assert torch.equal(_staging.part_of(buffer.memory, offset, tensor.dtype, tensor.shape), tensor)
    buffer.close()
