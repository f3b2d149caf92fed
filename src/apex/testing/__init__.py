"""Decorators that skip tests depending on the environment, and helpers with the names of Colossal-AI's tests."""

from __future__ import annotations

from .._lazy import lazy_subpackages
from .common_utils import SKIP_FLAKY_TEST, TEST_WITH_ROCM, skipFlakyTest, skipIfRocm

_COMPARISONS = (
    *("assert_close", "assert_close_loose", "assert_equal", "assert_equal_in_group", "assert_hf_output_close"),
    *("assert_not_equal", "check_state_dict_equal"),
)
_HELPERS = (
    *("DummyDataloader", "clear_cache_before_run", "free_port", "parameterize", "rerun_if_address_is_in_use"),
    *("rerun_on_exception", "skip_if_not_enough_gpus", "spawn"),
)
_MEMBERS = {**dict.fromkeys(_COMPARISONS, "comparison"), **dict.fromkeys(_HELPERS, "utils")}

__all__ = ["SKIP_FLAKY_TEST", "TEST_WITH_ROCM", "skipFlakyTest", "skipIfRocm", *sorted(_MEMBERS)]

__getattr__, __dir__ = lazy_subpackages(__name__, ("random",), _MEMBERS)
