"""What four processes do."""

from tests.contrib.zero import agreement_checks, checkpoint_checks, engine_checks, format_checks, muon_checks
from tests.parallel.processes import Check

CHECKS: dict[str, Check] = {
    **engine_checks.CHECKS,
    **checkpoint_checks.CHECKS,
    **agreement_checks.CHECKS,
    **muon_checks.FOUR_CHECKS,
    "formats_like_one_process": format_checks.like_one_process,
}
