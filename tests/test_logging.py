"""Loggers that know of ranks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import apex
from apex.logging import DistributedLogger, get_dist_logger


def test_there_is_one_logger_of_a_name() -> None:
    logger = get_dist_logger()
    assert logger is get_dist_logger("apex") is apex.logging.get_dist_logger()
    assert logger is not get_dist_logger("apex.other")
    with pytest.raises(ValueError, match="'apex' already"):
        DistributedLogger("apex")


def test_records_name_the_rank_and_may_be_of_some_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = get_dist_logger("files")
    logger.log_to_file(tmp_path / "new", mode="w", level="INFO", suffix="run")
    logger.info("everywhere")
    logger.warning("in the first", ranks=[0])
    logger.error("elsewhere", ranks=[1, 2])
    logger.debug("not yet")
    logger.set_level("DEBUG")
    monkeypatch.setattr("apex.logging._rank", lambda: 2)
    logger.error("in the third", ranks=[2])
    text = (tmp_path / "new" / "rank_0_run.log").read_text()
    assert [line.split(": ")[1] for line in text.splitlines()] == ["everywhere", "in the first", "in the third"]
    assert "files" in text
    assert "WARNING" in text
    with pytest.raises(ValueError, match="level='LOUD'"):
        logger.set_level("LOUD")


def test_the_package_s_own_logger_is_left_alone() -> None:
    before = logging.getLogger("apex").handlers[:], logging.getLogger("apex").level
    get_dist_logger("apex").debug("nothing")
    assert (logging.getLogger("apex").handlers, logging.getLogger("apex").level) == before
