"""The Python on every page of the documentation runs as it stands there, on a small model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from tests.support.warm import run_python

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(page.name for page in DOCS.glob("*.md"))
GUIDES = [page for page in PAGES if "```python" in (DOCS / page).read_text()]


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture(autouse=True)
def amp_is_off_afterwards() -> Iterator[None]:
    yield
    amp.shutdown()


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the guides take as given."""
    monkeypatch.chdir(tmp_path)  # where they may write
    torch.manual_seed(0)
    model, encoder, decoder = nn.Linear(4, 2), nn.Linear(4, 3), nn.Linear(3, 2)
    batches = [(torch.randn(3, 4), torch.randn(3, 2)) for _ in range(4)]
    return {
        "torch": torch,
        "amp": amp,
        "device": "cpu",
        "path": tmp_path / "checkpoint.pt",
        "batches": batches,
        "dataset": [(torch.randn(4), torch.randn(2)) for _ in range(8)],
        "inputs": batches[0][0],
        "targets": batches[0][1],
        "loss_function": nn.functional.mse_loss,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "encoder": encoder,
        "decoder": decoder,
        "encoder_optimizer": torch.optim.SGD(encoder.parameters(), lr=0.1),
        "decoder_optimizer": torch.optim.SGD(decoder.parameters(), lr=0.1),
    }


@pytest.mark.parametrize(("page", "index"), [(page, index) for page in GUIDES for index in range(len(snippets(page)))])
def test_snippet(page: str, index: int, names: dict[str, Any], request: pytest.FixtureRequest) -> None:
    code = snippets(page)[index]
    if page == "parallel.md":
        request.getfixturevalue("process_group")
    else:
        request.getfixturevalue("forked_writers")
    initializes = any("amp.initialize(" in line for line in code.splitlines() if not line.startswith("#"))
    if "amp." in code and not initializes:
        names["model"], names["optimizer"] = amp.initialize(
            names["model"], names["optimizer"], opt_level="O1", dynamic_init_scale=128.0, verbosity=0
        )
    names["scaler"] = torch.amp.GradScaler("cpu")
    before = [parameter.detach().clone() for parameter in names["model"].parameters()]
    exec(compile(code, f"{page}[{index}]", "exec"), names)
    is_script = "__main__" in code  # which a test of its own runs
    if "optimizer.step()" in code and "encoder" not in code and not is_script:
        assert not any(map(torch.equal, before, names["model"].parameters()))


def test_the_first_script_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    script = re.findall(r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "script.py").write_text(script)
    process = run_python("script.py", cwd=tmp_path, environment=os.environ)
    assert process.returncode == 0, process.stderr
    assert 0 < float(process.stdout.splitlines()[-1].removeprefix("loss ")) < 1  # a model of zeros has 8


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
        assert target.startswith("https://") or (DOCS / target).exists(), target
