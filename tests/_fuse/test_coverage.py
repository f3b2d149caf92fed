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

from .families import ADD, ALL, FAMILIES, HEAD, HEADS, KINDS, MASK, MLP, NORM, ROPE

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


def make(model: str, config: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return a model of transformers twice, with equal weights. Some configurations write to the options: copy them."""
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**copy.deepcopy(options))).train()
    return made, copy.deepcopy(made)


def compare(model: Any, plain: Any, **inputs: Any) -> list[Any]:
    """Compare losses and gradients of a fused and of a plain model; return their outputs."""
    outputs, results = [], []
    for each in (model, plain):
        torch.manual_seed(0)
        outputs.append(each(**inputs))
        params = [param for param in each.parameters() if param.requires_grad]
        gradients = torch.autograd.grad(outputs[-1].loss, params, allow_unused=True)
        results.append([outputs[-1].loss.detach(), *(g for g in gradients if g is not None)])
    assert len(results[0]) == len(results[1])
    largest = max(float(wanted.norm()) for wanted in results[1][1:])
    for found, wanted in zip(*results, strict=True):
        assert float((found - wanted).norm()) <= 2e-5 * float(wanted.norm()) + 1e-6 * largest
    return outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = FAMILIES[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the table is of transformers 5")
    if not hasattr(transformers, family.model):
        pytest.skip(f"this transformers has no {family.model}")
    model, plain = make(family.model, family.config, family.options)
    report = apex.fuse(model, verbose=False)
    rules = {row.rule for row in report if not row.reason}
    found = {kind for start, kind in KINDS.items() if any(rule.startswith(start) for rule in rules)}
    assert found == family.rules, str(report)
    assert (family.rules == ALL) == (not family.why)
    ids = torch.randint(3, 80, (2, 12), generator=torch.Generator().manual_seed(0))
    outputs = compare(model, plain, input_ids=ids, labels=ids)
    assert [each.logits is None for each in outputs] == [HEAD in family.rules, False]
    apex.unfuse(model)
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava"])
def test_a_family_with_images(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    family = FAMILIES[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the configurations are of transformers 5")
    model, plain = make(family.model, family.config, family.options)
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
    compare(model, plain, input_ids=ids, labels=ids, **inputs)


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_another_name(name: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("the configurations are of transformers 5")
    config, options = HEADS[name]
    model, plain = make(name, config, options)
    report = apex.fuse(model, verbose=False)
    assert (report[0].name, report[0].rule, report[0].reason) == ("", "linear layer + cross-entropy", ""), str(report)
    generator = torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 80, (2, 12), generator=generator), torch.ones(2, 12, dtype=torch.int64)
    mask[1, 9:] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if name == "WhisperForConditionalGeneration":
        inputs = {"input_features": torch.randn(2, 8, 32, generator=generator)}
    outputs = compare(model, plain, **inputs, labels=ids.masked_fill(mask == 0, -100))
    assert [each.logits is None for each in outputs] == [True, False]
