"""The few names that `apex` itself has."""

import logging
import warnings

import pytest
import torch

import apex


def test_rocm_is_told_from_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert not apex.check_if_rocm_pytorch()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert apex.check_if_rocm_pytorch()


@pytest.mark.parametrize(("version", "enough"), [(None, False), (8500, False), (8600, True), (90000, True)])
def test_cudnn_version(monkeypatch: pytest.MonkeyPatch, version: int | None, enough: bool) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: version is not None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    if enough:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert apex.check_cudnn_version_and_warn("--some-option", 8600)
    else:
        with pytest.warns(UserWarning, match=r"`--some-option` needs cuDNN 8600"):
            assert not apex.check_cudnn_version_and_warn("--some-option", 8600)


def test_deprecations_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert issubclass(apex.DeprecatedFeatureWarning, FutureWarning)
    with pytest.warns(apex.DeprecatedFeatureWarning, match="old") as caught:
        apex.deprecated_warning("old")
    assert caught[0].filename == __file__
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apex.deprecated_warning("old")


def test_names_at_the_paths_where_clients_find_them() -> None:
    from apex.fp16_utils import FP16_Optimizer
    from apex.fused_dense import DenseNoBiasFunc, FusedDenseFunc, FusedDenseGeluDenseFunc
    from apex.mlp import MlpFunction
    from apex.transformer.functional import fused_rope

    functions = (MlpFunction, FusedDenseFunc, FusedDenseGeluDenseFunc, DenseNoBiasFunc)
    assert all(issubclass(function, torch.autograd.Function) for function in functions)
    assert apex.optimizers.FP16_Optimizer is FP16_Optimizer
    assert apex.parallel.ReduceOp is torch.distributed.ReduceOp
    assert fused_rope.AITER_ROPE_BACKEND is False


def test_log_records_have_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = apex.RankInfoFormatter("[%(rank_info)s] %(message)s")
    record = logging.LogRecord("apex", logging.INFO, "file.py", 1, "text", None, None)
    assert formatter.format(record) == "[] text"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert formatter.format(record) == "[rank 1 of 4] text"
