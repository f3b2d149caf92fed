"""Those of `process_checks` that one process runs: each plugin in one precision, another than four processes have."""

from tests.booster import process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in (*process_checks.one_of_each(1), "goes on elsewhere")}
