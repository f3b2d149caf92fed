"""A sample of the zoo: hand-written models, and families of transformers if it is installed."""

import importlib.util

import pytest

from .judge import JUDGED, judge, misses
from .table import EXCEPTIONS, RAISES, chosen, find

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # "fp8" warns of models without a layer for it

FAMILIES = [
    "bart, seq2seq",
    "bert, masked",
    "clip, contrast",
    "gpt2, causal",
    "llama, causal",
    "t5, seq2seq",
    "vit, image",
]
SAMPLE, _ = chosen(["handwritten"], [])
if importlib.util.find_spec("transformers"):
    SAMPLE += chosen(["transformers"], FAMILIES)[0]
SAMPLE = [key for key in SAMPLE if key not in EXCEPTIONS]


@pytest.mark.parametrize("key", SAMPLE)
def test_bf16_is_as_exact_as_autocast(key: str) -> None:
    """The bars are those of the zoo, beside the errors of torch.autocast in the same step."""
    row = judge(find(key), "cpu", JUDGED, seeds=2)
    assert "error" not in row["autocast"], row
    assert [(name, miss) for name in JUDGED for miss in misses(row, name)] == [], row


@pytest.mark.parametrize("key", SAMPLE)
def test_other_precisions_run(key: str) -> None:
    row = judge(find(key), "cpu", ("fp8", "fp16"), seeds=1)
    assert [name for name in ("fp8", "fp16") if misses(row, name)] == [name for at, name in RAISES if at == key], row
