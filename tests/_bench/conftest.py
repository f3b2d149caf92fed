"""Benchmarks among other tests."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case ends by thawing all objects, those of the test session too; each collection after it would take 0.1 s."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
