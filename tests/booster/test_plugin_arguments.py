"""Every argument of every plugin: its default is accepted in silence; another value acts, warns, is logged or raises.

Plugins are made, and models boosted, in one process that believes to be the first of four: torch's fake process group
exchanges nothing. `hybrid_checks`, `process_checks` and `four_checks` train in real ones.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex import amp
from apex._fuse.rule import RULES, FusedModule
from apex.booster import plugin as plugins
from apex.booster._precision import CastModel
from apex.booster.mixed_precision import FP8MixedPrecision
from apex.booster.plugin import GradientCheckpointConfig, PipelineGradientCheckpointConfig, _arguments
from apex.booster.plugin._fusion_arguments import HEAD
from apex.booster.plugin._gradient_checkpoints import checkpoint_layers, chosen_layers
from apex.booster.wrappers import ModelWrapper
from apex.transformer import parallel_state
from apex.transformer import tensor_parallel as tp

from .plugin_arguments import CASES, ORIGINAL, OURS, Acts, Raises, Warns
from .problem import adam, net
from .problem import booster as make

WORLD = 4


@pytest.fixture(scope="module", autouse=True)
def fake_processes() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    amp.shutdown()
    parallel_state.destroy_model_parallel()


SIMPLE = (int, float, torch.dtype)


class Layers(nn.Module):
    """A norm, attention, a gated MLP, a list of blocks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2)
        self.batch_norm = nn.BatchNorm1d(16)
        self.row = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("table", torch.ones(3))
        self.split = tp.ColumnParallelLinear(16, 16, use_cpu_initialization=True) if _is_split() else None


def _is_split() -> bool:
    initialized = parallel_state.model_parallel_is_initialized()
    return initialized and parallel_state.get_tensor_model_parallel_world_size() > 1


def model_for(plugin: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = Layers()
    stages = getattr(plugin, "pp_size", 1)
    return layers if stages == 1 else nn.Sequential(*[nn.Linear(4, 4) for _ in range(5)])


def look(name: str, patch: pytest.MonkeyPatch, **arguments: Any) -> dict[str, Any]:
    """Make a plugin, boost a model, and return what can be seen of the arguments."""
    sharded: list[dict[str, Any]] = []
    if name in ("TorchFSDPPlugin", "GeminiPlugin"):
        import torch.distributed.fsdp as fsdp

        patch.setattr(fsdp, "fully_shard", lambda module, **options: sharded.append({"module": module, **options}))
    broadcasts: list[Any] = []
    patch.setattr("apex.booster.plugin.torch_fsdp_plugin.broadcast_from_first", lambda *given: broadcasts.append(given))
    plugin = getattr(plugins, name)(**arguments)
    model = model_for(plugin)
    # The names of parameters in other stages are unknown here: no optimizer.
    given = None if getattr(plugin, "pp_size", 1) > 1 else torch.optim.AdamW(model.parameters())
    boosted, optimizer, *_ = make(plugin=plugin).boost(model, given)
    seen: dict[str, Any] = {
        "plugin": plugin,
        "max_norm": getattr(optimizer, "max_norm", None),
        "fp8": isinstance(getattr(plugin, "precision", None), FP8MixedPrecision),
        "dtypes": {param.dtype for param in boosted.parameters()},
        "buffer": getattr(model, "table", torch.ones(1)).dtype,
        "fused": [type(each).__name__ for each in model.modules() if isinstance(each, FusedModule)],
        "checkpointed": [name for name, each in model.named_modules() if "forward" in vars(each)],
        "layers": list(boosted.unwrap().state_dict()),
        "synced": any(
            isinstance(each, nn.SyncBatchNorm) or "Sync" in type(each).__name__ for each in boosted.modules()
        ),
        "broadcasts": len(broadcasts),
    }
    if optimizer is not None:
        seen |= {key: value for key, value in vars(optimizer.unwrap()).items() if isinstance(value, SIMPLE)}
        seen["offloads"] = getattr(optimizer.unwrap(), "_host", None) is not None
    if getattr(optimizer, "scaler", None) is not None:
        seen |= {f"scaler.{key.strip('_')}": value for key, value in vars(optimizer.scaler).items()}
    for each in boosted.modules():
        if isinstance(each, nn.parallel.DistributedDataParallel):
            seen |= {f"ddp.{key}": value for key, value in vars(each).items()}
            seen["ddp.buffers"] = getattr(each, "forward_sync_buffers", getattr(each, "broadcast_buffers", None))
    wrapper = boosted
    while isinstance(wrapper, ModelWrapper):
        if isinstance(wrapper, CastModel):
            seen["inputs"] = wrapper._casts.inputs
        wrapper = wrapper.module
    if sharded:
        last = sharded[-1]
        seen |= {"units": len(sharded), "mesh": tuple(last["mesh"].shape), "policy": last["mp_policy"]}
        seen |= {"resharded": last["reshard_after_forward"], "offloads": "offload_policy" in last}
        seen["ignored"] = len(last.get("ignored_params", ()))
    return seen


def signature(name: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(plugins, name).__init__).parameters)
    del found["self"]
    return found


ARGUMENTS = [(name, argument) for name in ORIGINAL for argument in signature(name)]


@pytest.mark.parametrize("name", ORIGINAL)
def test_arguments_and_their_order_match_the_original(name: str) -> None:
    found = signature(name)
    assert list(found) == [*ORIGINAL[name], *OURS.get(name, [])]
    differ = {"sync_module_states"}  # without it processes would train different models
    for argument, default in ORIGINAL[name].items():
        assert found[argument].default == default or argument in differ, argument
        assert found[argument].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    with pytest.raises(TypeError, match=rf"{name}.__init__\(\) got an unexpected keyword argument 'no_such'"):
        getattr(plugins, name)(no_such=1)


@pytest.mark.parametrize("name", ORIGINAL)
def test_defaults_of_the_original_are_accepted_in_silence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(_arguments.get_dist_logger()._logger, "log", lambda level, message: logged.append(message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Only .* of buckets are used")  # of a tiny model
        for argument, default in ORIGINAL[name].items():
            getattr(plugins, name)(**{argument: default})
        getattr(plugins, name)(**ORIGINAL[name])
        look(name, monkeypatch, **ORIGINAL[name])
    assert not logged


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_another_value_acts_warns_is_logged_or_raises(
    name: str, argument: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = CASES[name][argument]
    for case in cases if isinstance(cases, list) else [cases]:
        parallel_state.destroy_model_parallel()
        value = case.value() if type(case.value) is type(lambda: 0) else case.value
        given = {**case.others, argument: value}
        assert value != signature(name)[argument].default
        if isinstance(case, Acts):
            found = _entry(look(name, monkeypatch, **given), case.key)
            assert found == case.expected, case
            parallel_state.destroy_model_parallel()
            if case.key == "plugin.placement.folded":  # pp_style and num_model_chunks belong together
                case.others["pp_style"] = "interleaved"
            assert _entry(look(name, monkeypatch, **case.others), case.key) != found, case
        elif isinstance(case, Warns):
            with pytest.warns(UserWarning, match=case.match):
                look(name, monkeypatch, **given)
        elif isinstance(case, Raises):
            with pytest.raises(case.kind, match=case.match):
                look(name, monkeypatch, **given)
        else:
            logged: list[str] = []
            monkeypatch.setattr(
                _arguments.get_dist_logger()._logger,
                "log",
                lambda level, message: logged.append(message),  # noqa: B023
            )
            getattr(plugins, name)(**given)
            assert [line for line in logged if re.search(rf"no effect of {argument}=", line)] == logged
            assert len(logged) == 1


def _entry(seen: dict[str, Any], key: str) -> Any:
    """Return an entry of the observations, an attribute of an entry, or its length."""
    if key in seen:
        return seen[key]
    first, *names = key.split(".")
    if key == "plugin.pipeline":
        return dist.get_process_group_ranks(seen["plugin"].pp_group)
    found = seen.get(first)
    for name in names:
        found = getattr(found, name, None)
        found = found() if callable(found) else found
    return len(found) if isinstance(found, list) else found


def test_plain_layers_are_refused_with_tensor_parallelism() -> None:
    """Every process would train the whole model."""
    booster = make(plugin=plugins.HybridParallelPlugin(tp_size=2))
    model = net()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"tp_size=2, but no layer of the model is split; build it from apex\.transf"):
        booster.boost(model, adam(model))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("outside", "pipeline", "replicas"), [(True, [0, 1], [0, 2]), (False, [0, 2], [0, 1])])
def test_attributes_that_scripts_read(outside: bool, pipeline: list[int], replicas: list[int]) -> None:
    plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2, dp_outside=outside)
    ranks = dist.get_process_group_ranks
    assert plugin.dp_size == plugin.pp_size == plugin.stage_manager.num_stages == 2
    assert (ranks(plugin.pp_group), ranks(plugin.dp_group)) == (pipeline, replicas)
    assert ranks(plugin.tp_group) == ranks(plugin.sp_group) == [0]
    assert plugin.pg_mesh.shape == plugin.pg_mesh.size() == (2, 2, 1, 1)
    assert plugin.pg_mesh.coordinate() == (0, 0, 0, 0)
    assert plugin.pg_mesh.get_ranks_in_group(plugin.pg_mesh.get_group_along_axis(1)) == (
        pipeline if outside else replicas
    )
    manager = plugin.stage_manager
    assert (manager.stage, manager.is_first_stage(), manager.is_last_stage()) == (0, True, False)
    parallel_state.destroy_model_parallel()
    plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2, pp_style="zbv", num_model_chunks=2)
    assert plugin.stage_manager.is_last_stage()
    assert not plugin.stage_manager.is_last_stage(ignore_chunk=True)
    parallel_state.destroy_model_parallel()
    assert plugins.HybridParallelPlugin().stage_manager is None
    for name in ORIGINAL:
        parallel_state.destroy_model_parallel()
        assert getattr(plugins, name)().dp_size == WORLD
        assert getattr(plugins, name)().logger.info


def test_groups_in_another_order_are_warned_of() -> None:
    parallel_state.initialize_model_parallel(1, 2)
    with pytest.warns(UserWarning, match="dp_outside=True has no effect: apex.transformer has groups in another order"):
        plugin = plugins.HybridParallelPlugin(1, 2, num_microbatches=2)
    assert dist.get_process_group_ranks(plugin.pg_mesh.get_group_along_axis(0)) == [0, 2]


def test_fusing_warns_without_modules_to_fuse() -> None:
    for argument in ("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused"):
        with pytest.warns(UserWarning, match=f"{argument}=True changes nothing"):
            make(plugin=plugins.HybridParallelPlugin(**{argument: True})).boost(nn.Linear(2, 2))
    everything = plugins.HybridParallelPlugin(enable_all_optimization=True)
    with pytest.warns(UserWarning, match="enable_all_optimization=True changes nothing"):
        make(plugin=everything).boost(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(plugin=everything).boost(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


class Model(nn.Module):
    """The inside of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(last_hidden_state=self.norm(self.words(input_ids)))


def test_heads_of_language_models_keep_their_logits() -> None:
    assert [rule.name for rule in RULES].count(HEAD) == 1
    head = next(rule for rule in RULES if rule.name == HEAD)
    place, model = RULES.index(head), Model()
    # Makes apex.fuse treat this model as a language model whose head it can fuse.
    RULES[place] = head._replace(matches=lambda module: isinstance(module, Model), reason=lambda module: "")
    try:
        make(plugin=plugins.HybridParallelPlugin(enable_all_optimization=True)).boost(model)
    finally:
        RULES[place] = head
    assert type(model) is Model
    assert isinstance(model.norm, FusedModule)


@pytest.mark.parametrize(("strategy", "reshards"), [("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)])
def test_a_machine_is_a_shard_group(strategy: str, reshards: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    seen = look("TorchFSDPPlugin", monkeypatch, sharding_strategy=strategy)
    assert (seen["mesh"], seen["resharded"]) == ((2, 2), reshards)
    with pytest.raises(ValueError, match=f"sharding_strategy={strategy} is of all processes; process_group must be"):
        plugins.TorchFSDPPlugin(dist.group.WORLD, strategy)


class Config:
    _attn_implementation = "eager"


class Attending(nn.Linear):
    """A model with an attention implementation like Hugging Face's."""

    def __init__(self, knows: bool) -> None:
        super().__init__(2, 2)
        self.knows, self.config = knows, Config()

    def set_attn_implementation(self, name: str) -> None:
        if not self.knows:
            raise ValueError(f"no {name}")
        self.config._attn_implementation = name


def test_flash_attention_takes_sdpa_of_hugging_face() -> None:
    plugin = plugins.HybridParallelPlugin(enable_flash_attention=True)
    model = Attending(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(plugin=plugin).boost(model)
    assert model.config._attn_implementation == "sdpa"
    with pytest.warns(UserWarning, match="enable_flash_attention=True changes nothing"):
        make(plugin=plugin).boost(Attending(False))


class Dropping(nn.Module):
    """A layer that draws from PyTorch's stream and from one of tensor parallelism's, and counts its calls."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        with tp.get_cuda_rng_tracker().fork():
            x = nn.functional.dropout(x, 0.5)
        return nn.functional.dropout(self.linear(x), 0.5) * scale


def test_checkpointed_layers_draw_the_same_numbers_again() -> None:
    parallel_state.initialize_model_parallel(1, 1)
    gradients, calls, after = [], [], []
    for config in (None, GradientCheckpointConfig(0.7)):
        torch.manual_seed(0)
        model = nn.ModuleList([Dropping() for _ in range(3)])
        checkpoint_layers(chosen_layers(model, config, 0))
        tp.model_parallel_cuda_manual_seed(1)
        x = torch.linspace(-1, 1, 32).view(4, 8)
        for layer in model:
            x = layer(x, scale=2.0)
        x.sum().backward()
        gradients.append([param.grad for param in model.parameters()])
        calls.append([layer.calls for layer in model])
        after.append(tp.get_cuda_rng_tracker().get_states())
    assert calls == [[1, 1, 1], [2, 2, 1]]
    assert all(map(torch.equal, *gradients))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


def test_layers_come_from_the_longest_module_list() -> None:
    """A ratio or a count of layers does not refer to a model's short lists (heads, embeddings)."""
    model = nn.Module()
    model.heads, model.blocks, model.more = (nn.ModuleList([nn.Identity() for _ in range(size)]) for size in (1, 4, 2))
    assert chosen_layers(model, GradientCheckpointConfig(0.5), 0) == list(model.blocks)[:2]
    counts = PipelineGradientCheckpointConfig(num_ckpt_layers_per_stage=[1, 4])
    assert chosen_layers(model, counts, 1) == list(model.blocks)
    row = nn.Sequential(nn.Identity(), nn.ReLU())
    assert chosen_layers(row, GradientCheckpointConfig(0.5), 0) == [row[0]]


def test_arguments_of_experts() -> None:
    plugin = plugins.MoeHybridParallelPlugin(1, 1, 2)
    with pytest.raises(ValueError, match="initialised with 2 expert-parallel ranks, not 4"):
        plugins.MoeHybridParallelPlugin(1, 1, 4)
    assert parallel_state.get_expert_model_parallel_world_size() == 2
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="ep_size=2, but no parameter of the model is an expert; build it from"):
        make(plugin=plugin).boost(model, torch.optim.SGD(model.parameters()))
    parallel_state.destroy_model_parallel()
    with pytest.warns(UserWarning, match="no effect of moe_dp_outside=False"):
        plugin = plugins.MoeHybridParallelPlugin(1, 1, 1, None, "bf16", moe_dp_outside=False)
    assert plugin.precision.dtype == torch.bfloat16
