"""LazyInitContext builds models at once."""

from __future__ import annotations

import torch
from torch import nn

from apex.lazy import LazyInitContext


def test_models_are_as_those_built_outside() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 2)
    torch.manual_seed(0)
    with LazyInitContext(default_device="cpu") as context:
        model = nn.Linear(3, 2)
    assert context.default_device == torch.device("cpu")
    assert LazyInitContext.materialize(model) is model
    assert torch.equal(model.weight, expected.weight)
    with LazyInitContext(default_device=torch.device("meta")):
        assert nn.Linear(3, 2).weight.is_meta
    with LazyInitContext():
        assert not nn.Linear(3, 2).weight.is_meta
