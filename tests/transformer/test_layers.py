"""Norms that mark their parameters for sequence parallelism, and loggers."""

from __future__ import annotations

import logging

import pytest
import torch

import apex
from apex.contrib import layer_norm as contrib_layer_norm
from apex.contrib.layer_norm.layer_norm import _fast_layer_norm
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


def test_fast_layer_norm_can_be_extended_like_contribs() -> None:
    """NeMo's LayerNorm1P derives from this class, asks for contrib's and reads `epsilon`."""

    class OnePlus(FastLayerNorm):
        def reset_parameters(self) -> None:
            torch.nn.init.zeros_(self.weight)
            torch.nn.init.zeros_(self.bias)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _fast_layer_norm(x, self.weight + 1, self.bias, self.epsilon)

    norm = OnePlus(4, 1e-3, sequence_parallel_enabled=True)
    assert isinstance(norm, contrib_layer_norm.FastLayerNorm)
    assert norm.weight.sequence_parallel_enabled
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
