"""Fixtures of several test files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from apex.transformer import parallel_state, tensor_parallel


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make an NCCL group of this process."""
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
