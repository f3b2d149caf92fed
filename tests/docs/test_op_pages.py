"""The Python on the pages of single operators runs as it stands there."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["focal_loss.md", "glu.md", "index_mul_2d.md", "multihead_attn.md"])
def test_page(page: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    names: dict = {}
    exec(compile(code, page, "exec"), names)
    leaves = [value for value in names.values() if isinstance(value, torch.Tensor) and value.is_leaf]
    assert any(leaf.grad is not None for leaf in leaves)
