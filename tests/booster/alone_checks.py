"""Those of `process_checks` that one process runs: the combinations that four do not."""

from tests.booster import process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in (*process_checks.EQUAL[1::2], "goes on elsewhere")}
