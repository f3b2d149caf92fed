"""Split models in four processes: with replicas, and with layers and stages split at once."""

from tests.booster.hybrid_checks import equality
from tests.parallel.processes import Check

CHECKS: dict[str, Check] = {
    "tensor": equality("fp32", tp_size=2),
    "tensor zero": equality("fp16_naive", tp_size=2, zero_stage=1),
    "pipeline": equality("fp16", pp_size=2),
    "pipeline zero": equality("fp16_apex", pp_size=2, zero_stage=1),
    "pipelines outside": equality("fp32", pp_size=2, dp_outside=False),
    "both": equality("bf16", tp_size=2, pp_size=2),
    "four stages": equality("fp8", pp_size=4),
}
