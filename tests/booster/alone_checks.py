"""The checks of `process_checks` for one process: each plugin in one precision that four processes do not run."""

from tests.booster import process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in (*process_checks.one_of_each(1), "goes on elsewhere")}
