"""Checks in four processes: of `process_checks` each plugin in one precision, and all of `hybrid_four_checks`.

Resuming to the bit is that of `TorchDDPPlugin(find_unused_parameters=True)` where it is torch's: without, torch's
DistributedDataParallel changes the order of its buckets after its first step, and with it that in which the gradients
of more than two processes are summed up.
"""

from tests.booster import hybrid_four_checks, process_checks

CHECKS = {name: process_checks.CHECKS[name] for name in process_checks.one_of_each(0)}
CHECKS |= {name: process_checks.CHECKS[name] for name in ("goes on elsewhere", "starts from the first process")}
CHECKS |= {
    f"resumes {plugin} fp32": process_checks.CHECKS[f"resumes {plugin} fp32"]
    for plugin in process_checks.PLUGINS
    if plugin != "ddp"
}
CHECKS["resumes ddp in order"] = process_checks.resumes("ddp in order", "fp32", False, False)
if process_checks.needs_fsdp:
    CHECKS["equal gemini twice fp32"] = process_checks.equality("gemini twice", "fp32", "adam")
CHECKS |= {f"split {name}": check for name, check in hybrid_four_checks.CHECKS.items()}
