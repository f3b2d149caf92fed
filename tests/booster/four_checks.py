"""The checks for four processes: each plugin of `process_checks` in one precision, and all `hybrid_four_checks`.

Bit-exact resuming with torch's DistributedDataParallel is checked with `find_unused_parameters=True`. Without it the
order of its buckets changes after the first step, and so does the order of the sums of more than two gradients. In
samples only the plugins resume here whose state is divided in a way of its own; two processes resume with all of them.
"""

from tests.booster import hybrid_four_checks, process_checks
from tests.support.grids import full_grids

CHECKS = {name: process_checks.EQUAL[name] for name in process_checks.one_of_each(0)}
CHECKS |= {name: process_checks.CHECKS[name] for name in ("goes on elsewhere", "starts from the first process")}
CHECKS |= {
    f"resumes {plugin} fp32": process_checks.RESUMES[f"resumes {plugin} fp32"]
    for plugin in (process_checks.PLUGINS if full_grids() else ("zero 2", "fsdp"))
    if plugin != "ddp" and plugin in process_checks.PLUGINS
}
CHECKS["resumes ddp in order"] = process_checks.resumes("ddp in order", "fp32", False, False)
if process_checks.needs_fsdp:
    CHECKS["equal gemini twice fp32"] = process_checks.equality("gemini twice", "fp32", "adam")
CHECKS |= {f"split {name}": check for name, check in hybrid_four_checks.CHECKS.items()}
