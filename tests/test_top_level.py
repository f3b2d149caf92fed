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


def test_log_records_say_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    formatter = apex.RankInfoFormatter("[%(rank_info)s] %(message)s")
    record = logging.LogRecord("apex", logging.INFO, "file.py", 1, "text", None, None)
    assert formatter.format(record) == "[] text"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    assert formatter.format(record) == "[rank 1 of 4] text"
