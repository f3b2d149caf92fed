"""Those of `process_checks` that four processes run: every second combination of a plugin and a precision.

Resuming to the bit is left out: torch's DistributedDataParallel changes the order of its buckets after its first step,
and with it that in which the gradients of more than two processes are summed up.
"""

from tests.booster import process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in process_checks.EQUAL[::2]}
CHECKS |= {name: process_checks.CHECKS[name] for name in ("goes on elsewhere", "starts from the first process")}
