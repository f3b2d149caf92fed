"""A sample of the zoo: hand-written models, and families of transformers if it is installed."""

import pytest

from .judge import judge, misses
from .table import EXCEPTIONS, RAISES, chosen, find

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # "fp8" warns of models without a layer for it

HANDWRITTEN = [key for key in chosen(["handwritten"], [])[0] if key not in EXCEPTIONS]


@pytest.mark.parametrize("copies", [False, True], ids=["", "copies"])
@pytest.mark.parametrize("key", HANDWRITTEN)
def test_bf16_is_as_exact_as_autocast(key: str, copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bars are those of the zoo, beside the errors of torch.autocast in the same step.

    With `copies` the model computes with half-precision copies of its weights, as on an accelerator.
    """
    monkeypatch.setattr("apex.booster._shorthand._runs_on_accelerator", lambda device: copies)
    row = judge(find(key), "cpu", ("bf16",), seeds=2)
    assert "error" not in row["autocast"], row
    assert misses(row, "bf16") == [], row


@pytest.mark.parametrize("key", HANDWRITTEN)
def test_other_precisions_run(key: str) -> None:
    row = judge(find(key), "cpu", ("fp8", "fp16"), seeds=1)
    assert [name for name in ("fp8", "fp16") if misses(row, name)] == [name for at, name in RAISES if at == key], row
