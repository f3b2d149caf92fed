"""Those of `process_checks` that any number of processes passes in a few seconds.

Resuming to the bit is left out: torch's DistributedDataParallel changes the order of its buckets after its first step,
and with it that in which the gradients of more than two processes are summed up.
"""

from tests.booster import process_checks

CHECKS = {
    name: check
    for name, check in process_checks.CHECKS.items()
    if name.startswith("equal") or name in ("goes on elsewhere", "starts from the first process")
}
