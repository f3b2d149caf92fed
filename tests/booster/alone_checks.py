"""The checks of `process_checks` for one process: each plugin in one precision that four processes do not run."""

from tests.booster import process_checks

CHECKS = {name: process_checks.EQUAL[name] for name in process_checks.one_of_each(1)}
CHECKS["goes on elsewhere"] = process_checks.CHECKS["goes on elsewhere"]
