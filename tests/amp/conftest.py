"""Every test starts and ends without amp."""

from collections.abc import Iterator

import pytest

from apex import amp


@pytest.fixture(autouse=True)
def _no_session() -> Iterator[None]:
    amp.shutdown()
    yield
    amp.shutdown()
