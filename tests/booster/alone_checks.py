"""The checks of `process_checks` for one process: the combinations that four processes do not run."""

from tests.booster import process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in (*process_checks.EQUAL[1::2], "goes on elsewhere")}
