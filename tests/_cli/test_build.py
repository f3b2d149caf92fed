"""`apex build`: what is compiled, where it is found again, and what cannot be asked for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

from apex._cli.build import command
from apex._cli.build.calls import known_ops, parse_call
from apex._cli.build.command import run_build, selected_ops
from apex.ops import _compile_ahead, _device, _tuned
from apex.ops.glu import config as glu_config

from .helpers import run_quickly

pytest.importorskip("triton")

# Ops of which a small shape compiles quickly.
SCRIPT = """
import torch
from apex.optimizers import FusedSGD

weight = torch.nn.Parameter(torch.ones(300, 40))
weight.grad = torch.ones_like(weight)
FusedSGD([weight], lr=0.1).step()
"""


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


TWICE = """
from pathlib import Path
from apex._cli.build.command import run_build

for place in (None, Path("/kernels")):
    names, gpus = ["step.py", "swiglu:64x512:float16"], ["sm_90", "gfx942"]
    status = run_build(names, gpus=gpus, cache=Path("cache"), installed_at=place, jobs=1, as_json=True)
    assert status == 0
    print("----")
"""


def test_kernels_are_compiled_once_and_found_again(tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(SCRIPT)
    result = run_quickly("-c", TWICE, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    report, again = (json.loads(document) for document in result.stdout.split("----")[:2])
    calls = ["step.py", "swiglu:64x512:float16"]
    assert [(row["call"], row["gpu"]) for row in report["rows"]] == [(c, g) for g in ("sm_90", "gfx942") for c in calls]
    assert all(row["compiled"] and not row["found"] for row in report["rows"])
    folder = tmp_path / "cache"
    assert report["cache"] == str(folder)
    for kind in ("cubin", "hsaco"):
        assert {path.stem for path in folder.rglob(f"*.{kind}")} >= {"apply_rule", "glu_forward", "glu_backward"}
    repeated = again["rows"]
    assert [row["found"] for row in repeated] == [row["compiled"] for row in report["rows"]]
    assert not any(row["compiled"] for row in repeated)
    # Triton has noted where each file is.
    groups = list(folder.rglob("__grp__*.json"))
    assert groups
    for group in groups:
        paths = json.loads(group.read_text())["child_paths"]
        assert all(path == f"/kernels/{group.parent.name}/{name}" for name, path in paths.items())


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], "apex build --list"),
        (["layernorm"], "did you mean layer_norm?"),
        (["rms_norm:64"], "rms_norm:16384x4096"),
        (["rms_norm:64x0"], "rows x columns"),
        (["rms_norm:64x64:float64"], "bfloat16, float16, float32"),
        (["rms_norm:64x64:float32:9"], "write rms_norm:16384x4096:DTYPE"),
        (["no.py"], "there is no script 'no.py'"),
    ],
)
def test_what_cannot_be_built_is_said(names: list[str], words: str) -> None:
    with pytest.raises(typer.BadParameter, match=re.escape(words)):
        run_build(names, gpus=["sm_90"])


def test_gpus_are_named(tmp_path: Path) -> None:
    """In processes that do not interpret kernels."""
    command = ["-m", "apex", "build", "--cache", str(tmp_path / "cache")]
    unknown = run_quickly(*command, "adam", "--gpu", "sm_70", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "sm_80, sm_90, sm_100, gfx90a, gfx942" in unknown.stderr
    assert unknown.stderr.splitlines()[-1].startswith("hint: --gpu sm_90 compiles for")
    (tmp_path / "reads.py").write_text("import torch\nif torch.ones(1) > 0:\n    pass\n")
    reading = run_quickly(*command, "reads.py", "--gpu", "sm_90", cwd=tmp_path)
    assert reading.returncode == 2
    assert "reads.py cannot be planned without its data" in reading.stderr


def test_every_op_has_a_name_a_shape_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_build([], list_only=True) == 0
    listed = capsys.readouterr().out
    for name, op in known_ops().items():
        assert parse_call(f"{name}:{op.sizes[1]}", "bfloat16").name in listed


def test_variables_of_the_originals_select_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert selected_ops() == []
    monkeypatch.setenv("APEX_BUILD_FUSED_LAYER_NORM", "1")
    monkeypatch.setenv("APEX_BUILD_XENTROPY", "0")
    assert selected_ops() == ["layer_norm", "rms_norm"]
    monkeypatch.setenv("APEX_BUILD_CUDA_OPS", "1")
    assert "xentropy" not in selected_ops()
    assert set(selected_ops()) == {name for name, op in known_ops().items() if op.extensions} - {"xentropy"}


def test_a_table_for_the_gpu_here_changes_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = _compile_ahead.GPUS["sm_90"]
    monkeypatch.setattr(_compile_ahead, "gpu_here", lambda: {"here": here})
    call = parse_call("swiglu:64x512", "bfloat16")
    command._plan([call], [])
    before = [launch.prepared.num_warps for _, _, launch in command._tasks]
    with _compile_ahead.planning(here):
        warps = glu_config.forward_tile(64, 256, 2, here.facts).num_warps
    entry = {"op": "glu.forward_tile", "dtype": "16-bit", "shape": {"rows": 64, "width": 256}}
    entry |= {"config": {"num_warps": 16}, "instead_of": {"num_warps": warps}}
    tables = [{"gpu": here.facts.name, **_tuned.versions(), "entries": [entry]}]
    (tmp_path / "tuned.json").write_text(json.dumps({"format": _tuned.FORMAT, "tables": tables}))
    monkeypatch.setenv("APEX_TUNED", str(tmp_path / "tuned.json"))
    _device.forget_launches()
    try:
        command._plan([call], [])
    finally:
        monkeypatch.undo()
        _device.forget_launches()
    after = [launch.prepared.num_warps for _, _, launch in command._tasks]
    assert sorted(after) == sorted([16, *before[1:]])


PLANS = """
import sys, torch
from apex._cli.build.calls import parse_call
from apex.ops import _compile_ahead

order = int(sys.argv[1])
for call in ["softmax", "attention", "lamb"][::order]:
    with _compile_ahead.planning(_compile_ahead.GPUS["sm_90"]) as launches:
        parse_call(call, "bfloat16").run(torch.device("meta"))
    for launch in launches[::order]:
        print(call, launch.prepared.kernel.name, launch.prepared.kernel.function.cache_key, len(launch.tensors[0]))
"""


def test_a_plan_is_that_of_the_job(tmp_path: Path) -> None:
    """Keys of Triton's cache depend on no kernel looked up before, and parameters without memory share none."""
    plans = [run_quickly("-c", PLANS, order, cwd=tmp_path) for order in ("1", "-1")]
    assert not any(plan.returncode for plan in plans), plans[0].stderr
    lines = [sorted(plan.stdout.splitlines()) for plan in plans]
    assert lines[0] == lines[1]
    assert {line.split()[-1] for line in lines[0] if line.startswith("lamb")} == {"2"}


FIRST_CALLS = """
import sys, torch
from apex._cli.build import command
from apex._cli.build.calls import known_ops, parse_call
from tests._cli.test_build import files_below
from pathlib import Path
before, missed = files_below(Path(sys.argv[1])), {}
for name in known_ops():
    parse_call(name, "bfloat16").run(torch.device("cuda"))
    torch.cuda.synchronize()
    after = files_below(Path(sys.argv[1]))
    if after != before:
        missed[name] = sorted(after - before)
    before = after
print(missed)
sys.exit(bool(missed))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("by_name", [False, True], ids=["this GPU", "by name"])
def test_after_a_build_a_first_call_compiles_nothing(tmp_path: Path, by_name: bool) -> None:
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    if by_name and capability not in ("80", "90", "100"):
        pytest.skip(f"sm_{capability} has no name")
    gpus = [f"sm_{capability}"] if by_name else []
    build = f"from pathlib import Path; from apex._cli.build.command import run_build; import sys; \
sys.exit(run_build({list(known_ops())}, gpus={gpus}, cache=Path({str(tmp_path)!r})))"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    for arguments in ([build], [FIRST_CALLS, str(tmp_path)]):
        command = [sys.executable, "-c", *arguments]
        result = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr[-3000:]
    assert any(name.endswith(".cubin") for name in files_below(tmp_path))
