"""Context parallelism in two and four processes, and in full grids in eight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apex.transformer.context_parallel import context_attention
from apex.transformer.packed_seq_params import PackedSeqParams
from tests.parallel.processes import run_checks
from tests.support.grids import full_grids

from . import context_checks


@pytest.fixture(scope="module", params=[2, 4, 8] if full_grids() else [2, 4])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(context_checks.__name__, Path(tmp_path_factory.mktemp("context")), processes=request.param)


@pytest.mark.parametrize("name", context_checks.CHECKS)
def test_equals_one_process(name: str, found: dict[str, str]) -> None:
    assert not found[name], found[name]


def test_a_batch_without_sequences() -> None:
    query = torch.zeros(8, 0, 4, 16, requires_grad=True)
    assert context_attention(query, query, query).shape == query.shape


def test_keys_of_packed_documents_have_the_bounds_of_the_queries() -> None:
    bounds, padded = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 8])
    for keys in (bounds[:2], torch.tensor([0, 4, 7])):
        with pytest.raises(ValueError, match="cu_seqlens_kv is"):
            PackedSeqParams(cu_seqlens_q=bounds, cu_seqlens_kv=keys, max_seqlen_q=4).bounds()
    both = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds.clone(), "max_seqlen_q": 4}
    assert PackedSeqParams(**both).bounds() == (bounds, 4)
    assert PackedSeqParams(**both, cu_seqlens_q_padded=padded).bounds() == (padded, 4)
