"""The CPU as a stand-in for a GPU."""

import pytest

from apex.ops.multi_tensor.torch_lists import TorchLists


@pytest.fixture(autouse=True)
def rules_are_called_as_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute updates by apex's rules, as on a GPU, instead of PyTorch's fused functions for CPUs."""
    monkeypatch.setattr(TorchLists, "_calls_fused", lambda self: False)
