"""Records of model sharding."""

from __future__ import annotations

import pytest
from torch import nn

from apex.pipeline.schedule.v_schedule import PipelineGraph
from apex.shardformer import ShardConfig, ShardFormer
from apex.shardformer.policies.auto_policy import get_autopolicy


def test_a_model_that_is_not_divided_stays() -> None:
    model = nn.Linear(2, 2)
    config = ShardConfig(enable_tensor_parallelism=False)
    assert config.tensor_parallel_size == 1
    assert ShardFormer(config).optimize(model) == (model, [])


def test_divided_models_need_a_policy_of_the_user() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(NotImplementedError, match=r"no policy for Linear: give custom_policy\(model, stage, stages\)"):
        ShardFormer(ShardConfig(pipeline_stage_manager=object())).optimize(model)
    with pytest.raises(NotImplementedError, match="no policy for Linear"):
        get_autopolicy(model)(model, 0, 2)


def test_schedules_are_made_by_the_plugin() -> None:
    assert PipelineGraph(2, 4, 1, 1, 1, 1, 1, 1, 1).get_v_schedule() == []
