"""The dispatch: which implementation runs, why, and who is told."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from apex import _env
from apex.ops import _device, _library, attention, batch_norm, dense, group_norm, norm

CPU = torch.device("cpu")


def test_the_cpu_takes_torch_by_default() -> None:
    with _library.implementation("auto"):
        choice = _library.explain(norm.FAMILY, CPU, torch.float32)
    assert choice.implementation == "torch"
    assert choice.reason


def test_tensors_without_memory_take_kernels_only_while_launches_are_planned() -> None:
    meta = torch.device("meta")
    with _library.implementation("auto"):
        assert _library.explain(norm.FAMILY, meta, torch.float32).implementation == "torch"
    with _library.implementation("auto"), _device.pretend(_device.INTERPRETER):
        assert _library.explain(norm.FAMILY, meta, torch.float32).implementation == "triton"


def test_torch_can_be_asked_for() -> None:
    with _library.implementation("torch"):
        assert _library.explain(norm.FAMILY, CPU, torch.float32) == _library.Choice("torch", "APEX_IMPL=torch")


def test_a_request_that_cannot_be_met_says_why() -> None:
    with _library.implementation("triton"), pytest.raises(RuntimeError, match=r"APEX_IMPL=triton .* float64"):
        _library.explain(norm.FAMILY, CPU, torch.float64)


def test_a_request_that_cannot_be_met_changes_nothing() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    with _library.implementation("triton"), pytest.raises(RuntimeError, match="APEX_IMPL"):
        norm.layer_norm(x, 8)
    assert norm.layer_norm(x, 8).dtype == torch.float64


def test_the_override_ends_with_its_block() -> None:
    before = _library.requested
    with pytest.raises(ZeroDivisionError), _library.implementation("torch"):
        raise ZeroDivisionError
    assert _library.requested == before


def test_unknown_implementation() -> None:
    with pytest.raises(ValueError, match="cuda"), _library.implementation("cuda"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("value", ["auto", "triton", "torch", " Torch ", ""])
def test_environment_variable(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("APEX_IMPL", value)
    assert _env.requested_implementation() == (value.strip().lower() or "auto")


def test_environment_variable_with_an_unknown_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_IMPL", "fast")
    with pytest.raises(ValueError, match="APEX_IMPL='fast'"):
        _env.requested_implementation()


def test_a_fallback_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "_reported", set())
    with caplog.at_level(logging.INFO, logger="apex.ops"), _library.implementation("auto"):
        for _ in range(3):
            _library.explain(norm.FAMILY, CPU, torch.float64)
            _library._runs_triton.clear()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "float64" in messages[0]


def test_without_triton_everything_still_works() -> None:
    """A process in which triton cannot be imported."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, apex\n"
        "from apex.normalization import FusedLayerNorm\n"
        "from apex.ops import _library\n"
        "x = torch.randn(4, 8, requires_grad=True)\n"
        "FusedLayerNorm(8, memory_efficient=True)(x).sum().backward()\n"
        "print(_library.triton_problem())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "triton" in result.stdout


@pytest.mark.parametrize(("version", "problem"), [("3.3.1", "Triton 3.3.1 cannot compile"), ("3.4.0", "None")])
def test_a_triton_that_cannot_compile_the_kernels_is_not_used(version: str, problem: str) -> None:
    code = (
        "import importlib.util, sys, types; import torch\n"
        "from apex.ops import _library\n"
        "old = types.ModuleType('triton'); old.__spec__ = importlib.util.spec_from_loader('triton', None)\n"
        f"sys.modules['triton'] = old; old.__version__ = {version!r}\n"
        "print(_library.triton_problem())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "APEX_IMPL")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert problem in result.stdout


@pytest.mark.gpu
def test_a_gpu_takes_triton() -> None:
    with _library.implementation("auto"):
        assert _library.explain(norm.FAMILY, torch.device("cuda", 0), torch.bfloat16).implementation == "triton"
        assert _library.explain(norm.FAMILY, torch.device("cuda", 0), torch.float64).implementation == "torch"


def test_an_operator_skips_a_dispatcher_that_would_only_call_it() -> None:
    call = _library._quick_call(lambda *_, **__: "dispatcher", lambda *_: "implementation")
    x = torch.ones(3)
    arguments = (x, torch.nn.Parameter(x), None, 1e-5, 3, True, "silu", torch.float32, [True, False])
    assert call(*arguments) == "dispatcher"  # there may be something to differentiate
    with torch.no_grad():
        assert call(*arguments) == "implementation"
        assert call(x, eps=1e-5) == "dispatcher"
        assert call(x.to("meta")) == "dispatcher"
        assert call(x, FakeTensorMode().from_tensor(x)) == "dispatcher"
        with FakeTensorMode():
            assert call(x) == "dispatcher"
        with torch.device("cpu"):  # a mode that sees functions
            assert call(x) == "dispatcher"
        assert torch.func.vmap(lambda row: x if call(row) == "dispatcher" else None)(torch.ones(2, 3)) is not None
        with torch.profiler.profile() as profiler:
            torch.ops.apex.norm.default(x, None, None, 3, 1e-5, True, False, torch.float32, torch.float32)
        assert "apex::norm" in {event.name for event in profiler.events()}
        frames: list[str] = []
        monitor = sys.getprofile()
        sys.setprofile(lambda frame, *_: frames.append(frame.f_code.co_filename))
        torch.ops.apex.norm.default(x, None, None, 3, 1e-5, True, False, torch.float32, torch.float32)
        sys.setprofile(monitor)
    assert frames
    assert not [name for name in frames if name.endswith("_library/autograd.py")]


PASSES = {
    "layer norm": lambda x, weight, bias: norm.layer_norm(x, x.shape[-1], weight, bias),
    "layer norm that keeps its output": lambda x, weight, bias: norm.layer_norm(
        x, x.shape[-1], weight, bias, memory_efficient=True
    ),
    "batch norm": lambda x, weight, bias: batch_norm.batch_norm(x, None, None, weight, bias, channel_dim=-1),
    "group norm": lambda x, weight, bias: group_norm.group_norm(x.movedim(-1, 1), 2, weight, bias),
    "perceptron": lambda x, weight, bias: dense.mlp(x, [torch.outer(weight, weight)] * 3, [bias] * 3),
    "packed attention": lambda x, weight, bias: attention.packed_attention(
        (x * weight + bias).reshape(4, 3, 1, 16), torch.tensor([0, 4]), 4, zero_tail=False
    ),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_asks_the_dispatch_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question takes the host half a microsecond, as long as a tensor's address and dtype for a launch.

    The backward pass of what kernels took need not ask at all.
    """
    x, weight, bias = torch.randn(4, 6, 8), torch.ones(8), torch.zeros(8)
    leaves = [each.requires_grad_() for each in (x, weight, bias)]
    asked: list[str] = []
    runs_triton = _library.runs_triton_now

    def noting(family: _library.OpFamily, tensor: torch.Tensor) -> bool:
        asked.append(family.name)
        return runs_triton(family, tensor)

    monkeypatch.setattr(_library, "runs_triton_now", noting)
    with _library.implementation("triton"):
        output = PASSES[name](*leaves)
        assert len(asked) == 1
        torch.autograd.grad(output.square().sum(), leaves)
        assert len(asked) <= 2
