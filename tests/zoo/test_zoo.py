"""A sample of the zoo: hand-written models, and families of transformers if it is installed."""

import pytest

from .judge import judge, misses
from .table import EXCEPTIONS, FAULTS, chosen, find

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # "fp8" warns of models without a layer for it

HANDWRITTEN, _ = chosen(["handwritten"], [])


def models(faults: frozenset[str]) -> list:
    """Return the keys of the sample; those with a known fault are expected to fail."""
    known = pytest.mark.xfail(reason="a known fault of the precision engine", strict=False)
    return [pytest.param(key, marks=[known] if key in faults else []) for key in HANDWRITTEN if key not in EXCEPTIONS]


@pytest.mark.parametrize("key", models(FAULTS))
def test_bf16_is_as_exact_as_autocast(key: str) -> None:
    """The bars are those of the zoo, beside the errors of torch.autocast in the same step."""
    row = judge(find(key), "cpu", ("bf16",))
    assert "error" not in row["autocast"], row
    assert misses(row, "bf16") == [], row


@pytest.mark.parametrize("key", models(FAULTS))
def test_other_precisions_run(key: str) -> None:
    row = judge(find(key), "cpu", ("fp8", "fp16"), seeds=1)
    assert [name for name in ("fp8", "fp16") if misses(row, name)] == [], row
