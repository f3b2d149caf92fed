"""Every kernel compiles for every GPU generation we name, with no GPU present."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)  # two minutes on a quiet machine, all of Triton's compiler
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx90a", "gfx942"])
def test_every_kernel_compiles(target: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", target],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert not report["failures"], "\n".join(report["failures"])
    assert not report["unreached"], f"no launch case reaches {report['unreached']}"
    assert report["compiled"]
