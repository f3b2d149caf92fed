"""What two processes do."""

from tests.contrib.zero import (
    adam_checks,
    count_checks,
    engine_checks,
    format_checks,
    muon_checks,
    option_checks,
    schedule_checks,
    subclass_checks,
)
from tests.parallel.processes import Check

CHECKS: dict[str, Check] = {
    **engine_checks.CHECKS,
    **adam_checks.CHECKS,
    **count_checks.CHECKS,
    **muon_checks.CHECKS,
    **format_checks.CHECKS,
    **option_checks.CHECKS,
    **schedule_checks.CHECKS,
    **subclass_checks.CHECKS,
}
