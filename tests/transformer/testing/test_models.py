"""GPT and BERT on split layers, in four and eight processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apex.transformer.testing.standalone_transformer_lm import TransformerConfig
from tests.parallel.processes import run_checks

from . import grid_checks, model_checks


@pytest.fixture(scope="module")
def in_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(model_checks.__name__, Path(tmp_path_factory.mktemp("four")), processes=4)


@pytest.mark.parametrize("name", model_checks.CHECKS)
def test_four_processes(name: str, in_four: dict[str, str]) -> None:
    assert not in_four[name], in_four[name]


@pytest.fixture(scope="module")
def in_eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(grid_checks.__name__, Path(tmp_path_factory.mktemp("eight")), processes=8)


@pytest.mark.parametrize("name", grid_checks.CHECKS)
def test_eight_processes(name: str, in_eight: dict[str, str]) -> None:
    assert not in_eight[name], in_eight[name]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_attention_heads": 0}, ValueError),
        ({"num_query_groups": 0}, ValueError),
        ({"ffn_hidden_size": 0}, ValueError),
        ({"kv_channels": 0}, ValueError),
        ({"recompute": "full", "recompute_num_layers": 0}, ValueError),
        ({"num_layers": 2.0}, TypeError),
        ({"hidden_dropout": "0.1"}, TypeError),
    ],
    ids=str,
)
def test_sizes_of_a_configuration_are_checked_by_name(options: dict[str, Any], error: type[Exception]) -> None:
    """A width of 0 was taken for the default, and a number of heads of 0 was divided by."""
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    with pytest.raises(error, match=f"^{list(options)[-1]} must be"):
        TransformerConfig(**{**sizes, "max_position_embeddings": 8, **options})
