"""Names of Colossal-AI that scripts import: each exists here at the same path, or is refused with a reason."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

import apex
from apex._refused import _REASON_OF, reason_for
from apex.compat import colossalai
from tests._cli.helpers import run_quickly

# The names that 44 scripts of Colossal-AI 0.5.0 (examples, applications, tests) import, by module.
NAMES = {
    "": "launch launch_from_torch launch_from_slurm launch_from_openmpi get_default_parser booster nn kernel",
    "accelerator": "get_accelerator set_accelerator auto_set_accelerator BaseAccelerator",
    "booster": "Booster Plugin Accelerator",
    "booster.accelerator": "Accelerator",
    "booster.mixed_precision": "FP16TorchMixedPrecision",
    "booster.plugin": "GeminiPlugin HybridParallelPlugin LowLevelZeroPlugin MoeHybridParallelPlugin Plugin "
    "TorchDDPPlugin TorchFSDPPlugin",
    "booster.plugin.dp_plugin_base": "DPPluginBase",
    "booster.plugin.moe_hybrid_parallel_plugin": "MoeHybridParallelPlugin",
    "checkpoint_io": "CheckpointIO GeneralCheckpointIO",
    "cluster": "DistCoordinator ProcessGroupMesh",
    "cluster.dist_coordinator": "DistCoordinator",
    "cluster.process_group_mesh": "ProcessGroupMesh",
    "fx": "is_compatible_with_meta",
    "initialize": "launch launch_from_torch launch_from_slurm launch_from_openmpi",
    "interface": "ModelWrapper OptimizerWrapper",
    "kernel.kernel_loader": "CPUAdamLoader FusedOptimizerLoader",
    "lazy": "LazyInitContext",
    "lazy.lazy_init": "LazyInitContext",
    "logging": "DistributedLogger disable_existing_loggers get_dist_logger",
    "nn": "HybridAdam LinearWarmupLR CosineAnnealingLR lr_scheduler optimizer",
    "nn.lr_scheduler": "ConstantWarmupLR CosineAnnealingLR CosineAnnealingWarmupLR ExponentialLR FlatAnnealingLR "
    "FlatAnnealingWarmupLR LambdaLR LinearWarmupLR MultiStepLR MultiStepWarmupLR MultiplicativeLR OneCycleLR "
    "PolynomialLR PolynomialWarmupLR StepLR",
    "nn.optimizer": "CPUAdam FusedAdam FusedLAMB FusedSGD HybridAdam Lamb Lars",
    "nn.optimizer.hybrid_adam": "HybridAdam",
    "pipeline.schedule.v_schedule": "PipelineGraph",
    "shardformer": "GradientCheckpointConfig PipelineGradientCheckpointConfig ShardConfig ShardFormer",
    "shardformer.layer": "Linear1D_Col Linear1D_Row",
    "shardformer.policies.auto_policy": "get_autopolicy",
    "tensor": "ColoParameter",
    "tensor.colo_parameter": "ColoParameter",
    "testing": "DummyDataloader assert_close assert_close_loose assert_equal assert_equal_in_group "
    "assert_hf_output_close assert_not_equal check_state_dict_equal clear_cache_before_run free_port parameterize "
    "rerun_if_address_is_in_use rerun_on_exception skip_if_not_enough_gpus spawn",
    "testing.random": "seed_all",
    "utils": "MultiTimer Timer conditional_context get_current_device multi_tensor_applier set_seed",
    "utils.timer": "MultiTimer",
    "zero": "LowLevelZeroOptimizer",
    "zero.low_level": "LowLevelZeroOptimizer",
    "zero.low_level._utils": "all_gather_into_flat_tensor_nd",
}
GEMINI = "Gemini here is FSDP2, without chunks. Use Booster(plugin=GeminiPlugin(...))"
TRAINING = "apex is for training by Booster"
LEGACY = "the legacy engine is not here. Use Booster"
DIVIDED = "its state cannot be divided here. Use HybridAdam with LowLevelZeroPlugin"
LAYERS = "of its layers Linear1D_Col and Linear1D_Row are here. Use apex.transformer.tensor_parallel for others"
REFUSED = {
    "zero.GeminiDDP": GEMINI,
    "zero.GeminiOptimizer": GEMINI,
    "zero.gemini.chunk.ChunkManager": GEMINI,
    "utils.get_dataloader": "loaders are made by plugins. Use plugin.prepare_dataloader",
    "kernel.triton": TRAINING,
    "shardformer.modeling.bloom": "models are not rewritten by class",
    "inference.config.InferenceConfig": TRAINING,
    "auto_parallel.offload.solver.NOT_NVML": TRAINING,
    "fx.symbolic_trace": TRAINING,
    "fx.passes.meta_info_prop.MetaInfoProp": TRAINING,
    "kernel.kernel_loader.InferenceOpsLoader": TRAINING,
    "legacy.core.global_context": LEGACY,
    "amp.AMP_TYPE": LEGACY,
    "context.ParallelMode": LEGACY,
    "nn.optimizer.DistributedLamb": DIVIDED,
    "nn.optimizer.DistributedCAME": DIVIDED,
    "nn.optimizer.DistributedAdaFactor": DIVIDED,
    "nn.optimizer.GaLoreAdamW8bit": DIVIDED,
    "nn.optimizer.galore.get_galore_param_groups": DIVIDED,
    "tensor.d_tensor.api.clear_layout_converter": DIVIDED,
    "nn.optimizer.CAME": "it is not implemented. Use HybridAdam",
    "shardformer.policies.gpt2.GPT2Policy": "models are not rewritten by class",
    "shardformer.layer.VocabParallelEmbedding1D": LAYERS,
    "shardformer.layer.loss.dist_log_prob": LAYERS,
}


@pytest.mark.parametrize("module", NAMES)
def test_names_exist_at_the_same_path(module: str) -> None:
    found = importlib.import_module(f"apex.{module}".rstrip("."))
    for name in NAMES[module].split():
        assert getattr(found, name) is not None
        assert name in dir(found)


def imported(package: str, name: str) -> None:
    module, _, member = f"{package}.{name}".rpartition(".")
    exec(f"from {module} import {member}")


@pytest.mark.parametrize("name", REFUSED)
def test_other_names_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        imported("apex", name)
    assert str(caught.value).startswith("colossalai.")
    assert f" has no counterpart in apex: {REFUSED[name]}" in str(caught.value)


@pytest.mark.parametrize("name", _REASON_OF)
def test_refused_names_are_absent_to_those_who_ask(name: str) -> None:
    """Imports say why in a ModuleNotFoundError; questions such as `hasattr` get no error at all."""
    if name in ("fx", "shardformer.layer", "shardformer.policies"):  # some of their names are here
        name = f"{name}.nothing"
    parent, _, member = f"apex.{name}".rpartition(".")
    with pytest.raises(ModuleNotFoundError) as caught:
        imported("apex", name)
    assert str(caught.value) == reason_for(name), "only imports from a package (`__path__`) reach the error's reason"
    if importlib.util.find_spec(parent) is not None:
        module = importlib.import_module(parent)
        assert not hasattr(module, member), "attributes that are missing raise AttributeError"
        assert getattr(module, member, None) is None


@pytest.mark.parametrize("name", ["legacy", "utils.checkpoint", "utils.get_dataloader", "zero.GeminiDDP"])
def test_attributes_that_are_refused_say_why(name: str) -> None:
    parent, _, member = f"apex.{name}".rpartition(".")
    with pytest.raises(AttributeError, match=rf"colossalai\.{name} has no counterpart in apex: .*Use "):
        getattr(importlib.import_module(parent), member)


def test_the_old_initialize_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"the legacy engine is not here\. Use Booster"):
        apex.initialize(None, None)


def test_ordinary_mistakes_stay_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'HybridAdams'"):
        _ = apex.nn.HybridAdams
    assert not hasattr(apex.utils, "nothing")


INSTALLED = """
import importlib, json, sys
import apex
from apex._refused import _REASON_OF, reason_for
from apex.compat import colossalai as compat
compat.install(); compat.install()
import colossalai
import colossalai.nn.optimizer
from colossalai.booster.plugin import GeminiPlugin
found = {"same": colossalai is apex and colossalai.nn.optimizer is apex.nn.optimizer}
found["plugin"] = GeminiPlugin.__module__
found["specs"] = [apex.__spec__.name, apex.nn.__spec__.name]
for name in ("inference.core", "zero.gemini", "no_such_module"):
    try:
        importlib.import_module(f"colossalai.{name}")
    except ModuleNotFoundError as error:
        found[name] = str(error)
try:
    importlib.metadata.version("colossalai")
except importlib.metadata.PackageNotFoundError:
    found["distribution"] = False
print(json.dumps(found))
"""


def test_install_maps_imports_of_the_other_package(tmp_path: Path) -> None:
    done = run_quickly("-c", INSTALLED, cwd=tmp_path)
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert found["same"]
    assert found["plugin"] == "apex.booster.plugin.gemini_plugin"
    assert found["specs"] == ["apex", "apex.nn"]
    assert found["distribution"] is False
    assert found["inference.core"] == f"colossalai.inference has no counterpart in apex: {TRAINING}."
    assert found["zero.gemini"] == f"colossalai.zero.gemini has no counterpart in apex: {GEMINI}."
    assert "there is no module apex.no_such_module" in found["no_such_module"]


def test_nothing_is_installed_by_itself(tmp_path: Path) -> None:
    code = "import apex, apex.compat.colossalai, apex.booster\nimport colossalai"
    done = run_quickly("-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert "No module named 'colossalai'" in done.stderr


def test_install_refuses_beside_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "colossalai.py").write_text("real = True")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    try:
        with pytest.raises(RuntimeError, match=r"colossalai is installed; .*install\(replace=True\)"):
            colossalai.install()
        assert sys.meta_path == before
        import colossalai as real

        assert real.real
        colossalai.install(replace=True)
        import colossalai as replaced

        assert replaced is apex  # type: ignore[comparison-overlap]
    finally:
        sys.meta_path[:] = before
        for name in [name for name in sys.modules if name.split(".")[0] == "colossalai"]:
            del sys.modules[name]


def test_run_installs_it_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, colossalai\nfrom colossalai.cluster import DistCoordinator\nimport helper\n"
        "colossalai.launch_from_torch('gloo', verbose=False)\n"
        "DistCoordinator().print_on_master(f'{sys.argv[1:]} {colossalai.__name__} {helper.value}')\n"
    )
    (tmp_path / "helper.py").write_text("value = 7")
    options = ("--nproc-per-node=1", "--colossalai", str(script), "--flag", "3")
    done = run_quickly("-m", "apex", "run", *options, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert "['--flag', '3'] apex 7" in done.stdout
