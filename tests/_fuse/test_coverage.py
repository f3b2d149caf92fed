"""Every family of families.py: which rules it gets, and the same loss and gradients as before."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import apex

from .families import ADD, ALL, FAMILIES, HEAD, KINDS, MASK, MLP, NORM, ROPE

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
DOCS = Path(__file__).parents[2] / "docs/fuse.md"


def table() -> list[str]:
    """Return the lines of the table in docs/fuse.md."""
    lines = []
    for name, family in FAMILIES.items():
        marks = ["yes" if kind in family.rules else "no" for kind in (NORM, MLP, ROPE, HEAD, MASK, ADD)]
        lines.append(f"| {name} | {' | '.join(marks)} | {family.why} |")
    return lines


def test_the_documentation_has_this_table() -> None:
    text = DOCS.read_text()
    start = text.index("| family |")
    found = [line for line in text[start:].split("\n\n")[0].splitlines() if not re.match(r"\| family|\|-", line)]
    assert found == table()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = FAMILIES[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the table is of transformers 5")
    if not hasattr(transformers, family.model):
        pytest.skip(f"this transformers has no {family.model}")
    torch.manual_seed(0)
    model: Any = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options)).train()
    plain = copy.deepcopy(model)
    report = apex.fuse(model, verbose=False)
    rules = {row.rule for row in report if not row.reason}
    found = {kind for start, kind in KINDS.items() if any(rule.startswith(start) for rule in rules)}
    assert found == family.rules, str(report)
    assert (family.rules == ALL) == (not family.why)
    ids = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for each in (model, plain):
        torch.manual_seed(0)
        outputs = each(input_ids=ids, labels=ids)
        assert (outputs.logits is None) == (each is model and HEAD in family.rules)
        gradients = torch.autograd.grad(outputs.loss, [*each.parameters()], allow_unused=True)
        results.append([outputs.loss.detach(), *(g for g in gradients if g is not None)])
    assert len(results[0]) == len(results[1])
    largest = max(float(wanted.norm()) for wanted in results[1][1:])
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-6 * largest
    apex.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava"])
def test_a_family_with_images(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = FAMILIES[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the configurations are of transformers 5")
    torch.manual_seed(0)
    model: Any = getattr(transformers, family.model)(getattr(transformers, family.config)(**family.options)).train()
    plain = copy.deepcopy(model)
    apex.fuse(model, verbose=False)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 80, (1, 24), generator=generator)
    inputs: dict[str, Any]
    if name == "llava":
        inputs = {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
        ids[0, 3:19] = 90
    else:
        grid, patch = torch.tensor([[1, 4, 4]]), 3 * model.config.vision_config.temporal_patch_size * 4 * 4
        inputs = {"pixel_values": torch.randn(16, patch, generator=generator), "image_grid_thw": grid}
        ids[0, 2], ids[0, 3:7], ids[0, 7] = 92, 90, 93
        inputs["mm_token_type_ids"] = (ids == 90).long()
    results = []
    for each in (model, plain):
        loss = each(input_ids=ids, labels=ids, **inputs).loss
        gradients = torch.autograd.grad(loss, [*each.parameters()], allow_unused=True)
        results.append([loss.detach(), *(g for g in gradients if g is not None)])
    largest = max(float(wanted.norm()) for wanted in results[1][1:])
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-6 * largest
