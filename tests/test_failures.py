"""What is said when processes cannot reach each other, and what is left as it is."""

import pytest
import torch
import torch.distributed as dist

from apex._failures import explained


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory left"), NotImplementedError("not on this device")])
def test_errors_of_this_process_alone_keep_their_kind(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained("an exchange"):
        raise error
    assert caught.value is error


def test_others_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    message = r"^rank 1 of 4: an exchange failed.*\(closed by peer\)$"
    with pytest.raises(RuntimeError, match=message), explained("an exchange"):
        raise RuntimeError("closed by peer")
