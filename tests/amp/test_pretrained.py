"""`save_pretrained` of models of transformers, here of a stand-in that writes what transformers writes."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apex import amp
from tests.amp.common import quiet


class PreTrainedModel(nn.Module):
    """A model that writes the dtype of its first parameter, then its state dict."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Identity()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.inner(x)))

    @property
    def dtype(self) -> torch.dtype:
        return next(parameter.dtype for parameter in self.parameters())

    def save_pretrained(self, folder: Path, state_dict: dict[str, Any] | None = None, **kwargs: Any) -> None:
        assert [parameter.shape for parameter in self.parameters()] == [p.shape for _, p in self.named_parameters()]
        (folder / "config.json").write_text(json.dumps({"dtype": str(self.dtype)}))
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / "model.bin")


def saved(model: Any, folder: Path, **options: Any) -> tuple[str, str]:
    """Return the dtype in the written configuration, and the dtype of the first tensor in the file."""
    model.save_pretrained(folder, **options)
    written = json.loads((folder / "config.json").read_text())["dtype"]
    return written, str(next(iter(torch.load(folder / "model.bin").values())).dtype)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_the_dtype_of_the_configuration_is_that_of_the_file(level: str, tmp_path: Path) -> None:
    model = PreTrainedModel(PreTrainedModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = quiet(model, optimizer, opt_level=level)
    half = {name: value.half() for name, value in model.state_dict().items()}
    dtypes = [parameter.dtype for parameter in model.parameters()]
    for each in (model, model.inner, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert saved(each, tmp_path) == ("torch.float32", "torch.float32")
        if level in ("O2", "O3", "O5"):
            assert saved(each, tmp_path, state_dict=half) == ("torch.float16", "torch.float16")
    assert [parameter.dtype for parameter in model.parameters()] == dtypes
    amp.shutdown()
    assert "save_pretrained" not in vars(model)
    assert "save_pretrained" not in vars(model.inner)
    assert saved(model, tmp_path) == ("torch.float32", "torch.float32")
