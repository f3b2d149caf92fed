"""Random calls of the public classes: each does what PyTorch's counterpart does, or is refused and changes nothing.

`make test` draws a few of each, the same every time. Many, and others each time, of which the last lines count how many
worked and how many were refused:

    pytest tests/test_properties.py --hypothesis-profile=campaign --hypothesis-seed=0 -s
"""

from __future__ import annotations

import platform
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import property_examples, property_layers, property_training
from tests.support.drawn import HealthCheck, given, settings, st
from tests.support.properties import run_trial

hypothesis = pytest.importorskip("hypothesis")
SUBJECTS = {**property_examples.SUBJECTS, **property_layers.SUBJECTS, **property_training.SUBJECTS}
CAMPAIGN = settings.default == settings.get_profile("campaign")
EXAMPLES = settings.get_profile("campaign").max_examples if CAMPAIGN else 25
counts: dict[str, Counter[str]] = {}


@pytest.fixture(scope="module", autouse=True)
def _table() -> Iterator[None]:
    """What was called, printed after a campaign."""
    yield
    if not CAMPAIGN:
        return
    total: Counter[str] = sum(counts.values(), Counter())
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, hypothesis {hypothesis.__version__}"
    print(f"\n{versions}, {platform.machine()}, {'cuda' if torch.cuda.is_available() else 'cpu'}")
    print(f"{'calls of':24} {'all':>6} {'worked':>7} {'refused':>8} {'failed':>7}")
    for name, found in [*counts.items(), ("all", total)]:
        numbers = found["worked"], found["refused"], found["failed"]
        print(f"{name:24} {sum(numbers):6} {numbers[0]:7} {numbers[1]:8} {numbers[2]:7}")


@pytest.mark.timeout(3600 if CAMPAIGN else 300)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_calls_work_or_are_refused(subject: str) -> None:
    """All calls are made whatever the others do; a failure names what was drawn for it."""
    found = counts.setdefault(subject, Counter())
    failures: dict[str, list[Any]] = {}

    @settings(
        max_examples=EXAMPLES,
        derandomize=not CAMPAIGN,
        phases=[hypothesis.Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def call(data: Any) -> None:
        drawn: list[Any] = []

        def draw(strategy: st.SearchStrategy[Any]) -> Any:
            drawn.append(data.draw(strategy))
            return drawn[-1]

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[run_trial(SUBJECTS[subject](draw))] += 1
            except AssertionError as error:
                found["failed"] += 1
                failures.setdefault(str(error).splitlines()[0], drawn)

    call()
    assert not failures, "\n".join(f"{message}: {drawn}" for message, drawn in failures.items())
