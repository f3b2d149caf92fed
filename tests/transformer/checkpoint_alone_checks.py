"""One process loads what four have saved: a check that runs in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .small_gpt import Run, parts, split, whole

BESIDE = Path("..")


def loads_what_four_saved(rank: int) -> None:
    with split():
        run = Run(4)
        run.load(BESIDE / "two")
        two, three = whole(BESIDE / "two"), whole(BESIDE / "three")
        found = {key: view for key, view, _ in parts(run)}
        assert found.keys() == {key for key in two if not key.endswith("|padding")}
        for key, view in found.items():
            assert torch.equal(view, two[key]), key
        assert run.train().item() == pytest.approx(float((BESIDE / "loss").read_text()), rel=1e-6)
        for key, view, _ in parts(run):
            torch.testing.assert_close(view, three[key], rtol=1e-5, atol=1e-6, msg=key)


CHECKS = {check.__name__: check for check in (loads_what_four_saved,)}
