"""Decorators that skip tests by the environment."""

import importlib
import unittest
from collections.abc import Iterator

import pytest

import apex.testing
from apex.testing import common_utils


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    importlib.reload(common_utils)


@pytest.mark.parametrize(
    ("variable", "decorator"), [("APEX_TEST_WITH_ROCM", "skipIfRocm"), ("APEX_SKIP_FLAKY_TEST", "skipFlakyTest")]
)
def test_skipped_where_the_variable_is_one(read_again: pytest.MonkeyPatch, variable: str, decorator: str) -> None:
    for value, skipped in (("1", True), ("0", False), (None, False)):
        if value is None:
            read_again.delenv(variable)
        else:
            read_again.setenv(variable, value)
        module = importlib.reload(common_utils)

        @getattr(module, decorator)
        def check(number: int) -> int:
            return number

        assert check.__name__ == "check"
        if skipped:
            with pytest.raises(unittest.SkipTest, match="check does not"):
                check(3)
        else:
            assert check(3) == 3


def test_the_package_has_the_names() -> None:
    assert apex.testing.skipIfRocm.__module__ == apex.testing.skipFlakyTest.__module__ == common_utils.__name__
    assert isinstance(apex.testing.TEST_WITH_ROCM, bool)
