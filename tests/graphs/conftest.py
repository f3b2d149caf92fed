"""The CPU as a stand-in for a GPU."""

import pytest

from apex.ops.multi_tensor.torch_lists import TorchLists


@pytest.fixture(autouse=True)
def rules_are_called_as_in_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, in a graph and outside; a CPU, which really has no graphs, calls PyTorch's fused functions."""
    monkeypatch.setattr(TorchLists, "_calls_fused", lambda self: False)
