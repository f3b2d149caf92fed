"""Records of model sharding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from apex._fuse.rule import FusedModule
from apex.pipeline.schedule.v_schedule import PipelineGraph
from apex.shardformer import GradientCheckpointConfig, ShardConfig, ShardFormer
from apex.shardformer.policies.auto_policy import get_autopolicy


def test_a_model_that_is_not_divided_stays() -> None:
    model = nn.Linear(2, 2)
    config = ShardConfig(enable_tensor_parallelism=False)
    assert config.tensor_parallel_size == 1
    assert ShardFormer(config).optimize(model) == (model, [])


def test_options_of_models_that_are_not_divided_act_or_warn() -> None:
    """Norms are fused and layers checkpointed, as by HybridParallelPlugin; options for divided models warn."""
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    options: Any = {"enable_tensor_parallelism": False}
    config = ShardConfig(
        **options, enable_fused_normalization=True, gradient_checkpoint_config=GradientCheckpointConfig(0.5)
    )
    expected = model(torch.ones(2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShardFormer(config).optimize(model)
    assert isinstance(model[0], FusedModule)
    assert ["forward" in vars(layer) for layer in model] == [True, False]
    torch.testing.assert_close(model(torch.ones(2, 4)), expected)
    with pytest.warns(UserWarning, match="no effect of fp8_communication=True: the model is not divided"):
        ShardFormer(ShardConfig(**options, fp8_communication=True)).optimize(model)
    with pytest.warns(UserWarning, match="enable_flash_attention=True changes nothing"):
        ShardFormer(ShardConfig(**options, enable_flash_attention=True)).optimize(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a GradientCheckpointConfig"):
        ShardFormer(ShardConfig(**options, gradient_checkpoint_config=2)).optimize(model)


def test_divided_models_need_a_policy_of_the_user() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"no policy for Linear: give custom_policy\(model, stage, stages\)"):
        ShardFormer(ShardConfig(pipeline_stage_manager=object())).optimize(model)
    with pytest.raises(NotImplementedError, match="no policy for Linear"):
        get_autopolicy(model)(model, 0, 2)


def test_schedules_are_made_by_the_plugin() -> None:
    assert PipelineGraph(2, 4, 1, 1, 1, 1, 1, 1, 1).get_v_schedule() == []
