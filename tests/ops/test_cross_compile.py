"""Every kernel compiles for a GPU of NVIDIA or AMD, with a matrix product for one of each, with no GPU present.

With `--every-launch`, as `make cross-compile` has it, every launch for every GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(1800)  # about a minute on a quiet machine, all of Triton's compiler
def test_every_kernel_compiles(pytestconfig: pytest.Config) -> None:
    targets = ["sm_90", "sm_80", "sm_100", "gfx942", "gfx90a"]
    options = ["--every-launch"] if pytestconfig.getoption("every_launch") else []
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", *options, *targets],
        cwd=REPOSITORY,
        env={**environment, "TRITON_DISABLE_LINE_INFO": "1"},  # the same code, a twentieth sooner
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    reports = json.loads(result.stdout)
    assert list(reports) == targets
    for target, report in reports.items():
        assert not report["failures"], "\n".join([target, *report["failures"], result.stderr[-2000:]])
        assert not report["unreached"], f"no launch case reaches {report['unreached']} on {target}"
        assert report["compiled"]
