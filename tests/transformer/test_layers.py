"""Norms that note sequence parallelism, and loggers."""

from __future__ import annotations

import logging

import pytest
import torch

import apex
from apex.transformer import log_util
from apex.transformer.layers import FastLayerNorm, FusedLayerNorm, MixedFusedLayerNorm


@pytest.mark.parametrize("kind", [FusedLayerNorm, MixedFusedLayerNorm, FastLayerNorm])
def test_parameters_say_whether_the_sequence_is_split(kind: type) -> None:
    assert not kind(4).weight.sequence_parallel_enabled
    norm = kind(4, 1e-3, sequence_parallel_enabled=True)
    assert norm.sequence_parallel_enabled
    assert norm.weight.sequence_parallel_enabled
    assert norm.bias.sequence_parallel_enabled
    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, (4,), eps=1e-3))


def test_loggers() -> None:
    assert log_util.get_transformer_logger("apex.transformer.microbatches").name == "apex.transformer"
    assert log_util.get_transformer_logger("folder/train.py").name == "folder/train"
    before = apex._library_root_logger.level
    try:
        log_util.set_logging_level(logging.DEBUG)
        assert logging.getLogger("apex.transformer").isEnabledFor(logging.DEBUG)
    finally:
        apex._library_root_logger.setLevel(before)
