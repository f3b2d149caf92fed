"""Arguments, results and errors of `amp.initialize`."""

import copy
import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from apex import amp
from apex.amp._amp_state import _amp_state as state
from apex.fp16_utils import FP16_Optimizer
from apex.optimizers import FusedAdam
from apex.parallel import LARC
from tests.amp.common import HALF, LEVELS, assert_same, loss_of, quiet, small_model, train, values


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_results_have_the_form_of_the_arguments() -> None:
    model = small_model()
    optimizer = sgd(model)
    assert quiet(model) is model
    assert quiet(models=model, optimizers=None) is model
    assert quiet(model, []) == (model, [])
    assert quiet(models=model, optimizers=optimizer) == (model, optimizer)
    assert quiet([model], optimizer) == ([model], optimizer)
    assert quiet((model,), [optimizer]) == ([model], [optimizer])
    assert quiet([model]) == [model]
    assert quiet(model, optimizer, enabled=False) == (model, optimizer)
    assert quiet(model, enabled=False) is model


def test_models_that_overlap_with_one_optimizer() -> None:
    model = small_model()
    (whole, part), optimizer = quiet([model, model[3]], sgd(model), opt_level="O2")
    assert whole is model
    assert part is model[3]
    train(model, optimizer, 2)
    assert part(torch.randn(2, 8)).dtype == torch.float32


def test_several_optimizers_for_one_model() -> None:
    model = small_model()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = FusedAdam(model[3].parameters(), lr=0.1)
    model, [first, second] = quiet(model, [first, second], opt_level="O2")
    before = values(model.parameters())
    with amp.scale_loss(loss_of(model, 0), [first, second]) as scaled:
        scaled.backward()
    first.step()
    second.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [True, False, False, True, True]


def test_signature_is_upstreams() -> None:
    names = list(inspect.signature(amp.initialize).parameters)
    assert names[:14] == [
        "models", "optimizers", "enabled", "opt_level", "cast_model_type", "patch_torch_functions",
        "keep_batchnorm_fp32", "master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity",
        "min_loss_scale", "max_loss_scale",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in inspect.signature(amp.initialize).parameters.items()}
    assert defaults["opt_level"] == "O1"
    assert defaults["min_loss_scale"] is None
    assert defaults["max_loss_scale"] == 2.0**24
    assert defaults["scale_backoff_factor"] == 0.5


@pytest.mark.parametrize("verbosity", [0, 1, 2, True, False])
def test_verbosity(verbosity: Any, capsys: pytest.CaptureFixture) -> None:
    amp.initialize(small_model(), opt_level="O2", verbosity=verbosity)
    printed = capsys.readouterr().out
    assert bool(printed) == bool(verbosity)
    if verbosity:
        assert "Selected optimization level O2" in printed
        assert "Defaults for this optimization level are:" in printed
        assert "After processing overrides, optimization options are:" in printed


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ("O0", (torch.float32, False, None, None, False, 1.0)),
        ("O1", (None, True, torch.float16, None, None, "dynamic")),
        ("O2", (torch.float16, False, None, True, True, "dynamic")),
        ("O3", (torch.float16, False, None, False, False, 1.0)),
        ("O4", (None, True, torch.bfloat16, None, None, 1.0)),
        ("O5", (torch.bfloat16, False, None, True, True, 1.0)),
    ],
)
def test_levels(level: str, expected: tuple) -> None:
    quiet(small_model(), opt_level=level)
    options = state.opt_properties.options
    assert options["enabled"] is True
    assert options["opt_level"] == level
    names = ("cast_model_type", "patch_torch_functions", "patch_torch_functions_type", "keep_batchnorm_fp32",
             "master_weights", "loss_scale")  # fmt: skip
    assert tuple(options[name] for name in names) == expected
    assert tuple(getattr(state.opt_properties, name) for name in names) == expected


@pytest.mark.parametrize(("given", "kept"), [(True, True), ("True", True), (False, False), ("False", False)])
def test_keep_batchnorm(given: Any, kept: bool) -> None:
    model = quiet(small_model(), opt_level="O2", keep_batchnorm_fp32=given)
    assert model[1].weight.dtype == (torch.float32 if kept else torch.float16)
    assert model[1].running_mean.dtype == model[1].weight.dtype
    assert model[0].weight.dtype == torch.float16


@pytest.mark.parametrize("given", [128, 128.0, "128.0"])
def test_loss_scale_as_number_or_string(given: Any) -> None:
    model = small_model()
    model, optimizer = quiet(model, sgd(model), opt_level="O1", loss_scale=given)
    assert state.loss_scalers[0].loss_scale() == 128.0
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == loss.float().item() * 128.0
        scaled.backward()
    train(model, optimizer, 3)
    assert state.loss_scalers[0].loss_scale() == 128.0


def test_overrides_on_top_of_a_level() -> None:
    model = small_model()
    model, optimizer = quiet(model, sgd(model), opt_level="O3", keep_batchnorm_fp32=True, master_weights=True)
    assert model[1].weight.dtype == torch.float32
    assert model[0].weight.dtype == torch.float16
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    model = quiet(small_model(), opt_level="O2", cast_model_type=torch.bfloat16)
    assert model[0].weight.dtype == torch.bfloat16
    quiet(small_model(), opt_level="O1", patch_torch_functions_type=torch.bfloat16)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outputs", [None, torch.float16, torch.float64])
def test_cast_model_outputs(level: str, outputs: torch.dtype | None) -> None:
    class Nested(nn.Linear):
        def forward(self, x: torch.Tensor) -> dict:  # type: ignore[override]
            return {"out": [super().forward(x)], "count": torch.tensor(3), "name": "n"}

    result = quiet(Nested(2, 2), opt_level=level, cast_model_outputs=outputs)(torch.randn(1, 2))
    default = HALF[level] if level in ("O1", "O4") else torch.float32
    assert result["out"][0].dtype == (outputs or default)
    assert result["count"].dtype == torch.int64
    assert result["name"] == "n"


def test_inputs_are_cast_however_they_come() -> None:
    class Checks(nn.Module):
        def forward(self, a: Any, *, b: Any) -> torch.Tensor:
            assert a["x"][0].dtype == torch.float16
            assert a["x"][1].dtype == torch.int64
            assert b.dtype == torch.float16
            return b

    model = quiet(Checks(), opt_level="O2")
    model({"x": (torch.randn(2), torch.ones(2, dtype=torch.int64)), "y": None}, b=torch.randn(2))
    model.forward({"x": (torch.randn(2), torch.ones(2, dtype=torch.int64))}, b=torch.randn(2))
    assert list(inspect.signature(model.forward).parameters) == ["a", "b"]


@pytest.mark.parametrize(
    "options",
    [
        {"loss_scale": torch.tensor(128.0)},
        {"opt_level": "O2", "keep_batchnorm_fp32": 1, "loss_scale": 128},
        {"opt_level": "O2", "cast_model_type": torch.bfloat16, "loss_scale": "128"},
        {"max_loss_scale": math.inf, "min_loss_scale": 0, "dynamic_init_scale": 128, "num_losses": 2},
        {"opt_level": "O1", "cast_model_type": False, "loss_scale": "1.28e2", "enabled": 1},
    ],
    ids=str,
)
def test_numbers_and_flags_of_other_kinds(options: dict) -> None:
    quiet(small_model(), **options)
    assert state.loss_scalers[0].loss_scale() == 128.0


def test_numbers_and_flags_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    scale, kept, count = numpy.float32(128.0), numpy.bool_(True), numpy.int64(2)
    quiet(small_model(), opt_level="O2", loss_scale=scale, keep_batchnorm_fp32=kept, num_losses=count)
    assert [scaler.loss_scale() for scaler in state.loss_scalers] == [128.0, 128.0]


def test_a_disabled_amp_asks_for_nothing_else() -> None:
    """Scripts pass the level of their command line, or none."""
    model = small_model()
    assert quiet(model, enabled=None, opt_level=None, loss_scale="none") is model
    assert quiet(model, enabled=False, opt_level="", num_losses=0) is model


def refused(error: type[Exception], match: str, *args: Any, **kwargs: Any) -> None:
    """Check that `initialize` raises and that an existing session continues unchanged."""
    model = small_model(seed=5)
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2", num_losses=2)
    twin = small_model(seed=5)
    before = dict(vars(state)), values(model.parameters())
    with pytest.raises(error, match=match):
        amp.initialize(*args, **{"verbosity": 1, **kwargs})
    after = dict(vars(state)), values(model.parameters())
    assert before[0] == after[0]
    assert_same(before[1], after[1])
    losses = train(model, optimizer, 3)
    amp.shutdown()
    twin, optimizer = quiet(twin, FusedAdam(twin.parameters(), lr=0.01), opt_level="O2", num_losses=2)
    assert losses == train(twin, optimizer, 3)


@pytest.mark.parametrize(
    ("error", "match", "options"),
    [
        (RuntimeError, "unexpected optimization level 'O9'", {"opt_level": "O9"}),
        (RuntimeError, "letter O, not the number zero", {"opt_level": "02"}),
        (RuntimeError, "master_weights make no sense", {"opt_level": "O1", "master_weights": True}),
        (RuntimeError, "keep_batchnorm_fp32", {"opt_level": "O1", "keep_batchnorm_fp32": True}),
        (RuntimeError, "cast_model_type was", {"opt_level": "O1", "cast_model_type": torch.float16}),
        (RuntimeError, "patch_torch_functions", {"opt_level": "O2", "patch_torch_functions": True}),
        (ValueError, "keep_batchnorm_fp32", {"opt_level": "O2", "keep_batchnorm_fp32": "yes"}),
        (RuntimeError, "unexpected optimization level 2", {"opt_level": 2}),
        (RuntimeError, "unexpected optimization level", {"opt_level": ["O2"]}),
        (TypeError, "enabled must be True or False, not 'no'", {"enabled": "no"}),
        (TypeError, "master_weights must be True or False", {"opt_level": "O2", "master_weights": "True"}),
        (TypeError, "patch_torch_functions must be", {"patch_torch_functions": "yes"}),
        (TypeError, "patch_torch_functions_type must be torch.float16", {"patch_torch_functions_type": "half"}),
        (ValueError, "patch_torch_functions_type must be", {"patch_torch_functions_type": torch.float32}),
        (TypeError, "cast_model_type must be a floating-point", {"opt_level": "O2", "cast_model_type": "float16"}),
        (ValueError, "cast_model_type must be", {"opt_level": "O2", "cast_model_type": torch.int8}),
        (TypeError, "cast_model_outputs must be .* not 'float'", {"cast_model_outputs": "float"}),
        (ValueError, "cast_model_outputs must be .* not torch.int64", {"cast_model_outputs": torch.int64}),
        (ValueError, "keep_batchnorm_fp32", {"opt_level": "O2", "keep_batchnorm_fp32": 1.0}),
        (ValueError, "loss_scale must be a positive number", {"loss_scale": -1.0}),
        (ValueError, "loss_scale", {"loss_scale": 0}),
        (ValueError, "loss_scale", {"loss_scale": math.nan}),
        (ValueError, "loss_scale", {"loss_scale": math.inf}),
        (ValueError, "loss_scale .* finite in float32", {"loss_scale": 1e39}),
        (ValueError, "loss_scale", {"loss_scale": "inf"}),
        (ValueError, "loss_scale must be .* not 'large'", {"loss_scale": "large"}),
        (TypeError, "loss_scale", {"loss_scale": True}),
        (TypeError, "loss_scale", {"loss_scale": [1.0]}),
        (ValueError, "num_losses", {"num_losses": -1}),
        (TypeError, "num_losses must be an integer of at least 0, not 1.5", {"num_losses": 1.5}),
        (TypeError, "num_losses", {"num_losses": "2"}),
        (TypeError, "verbosity", {"verbosity": "1"}),
        (ValueError, "max_loss_scale", {"max_loss_scale": 0}),
        (ValueError, "max_loss_scale", {"max_loss_scale": math.nan}),
        (TypeError, "max_loss_scale", {"max_loss_scale": None}),
        (ValueError, "min_loss_scale", {"min_loss_scale": math.nan}),
        (ValueError, "min_loss_scale", {"min_loss_scale": -1.0}),
        (TypeError, "min_loss_scale", {"min_loss_scale": "1"}),
        (ValueError, "dynamic_init_scale", {"dynamic_init_scale": math.inf}),
        (ValueError, "scale_growth_factor", {"scale_growth_factor": math.nan}),
        (ValueError, "scale_backoff_factor", {"scale_backoff_factor": 0}),
        (TypeError, "scale_window", {"scale_window": 1.5}),
        (ValueError, "overflow_patience", {"overflow_patience": 0}),
        (ValueError, "ddp_replica_count", {"ddp_replica_count": 0}),
        (TypeError, "combine_grad", {"combine_grad": "yes"}),
        (TypeError, "combine_ddp", {"combine_ddp": "no"}),
        (TypeError, "check_combined_tensors", {"check_combined_tensors": 0.5}),
        (TypeError, "user_cast_preferred", {"user_cast_preferred": "x"}),
        (ValueError, "min_loss_scale", {"min_loss_scale": 4.0, "max_loss_scale": 2.0}),
        (ValueError, "scale_window", {"scale_window": 0}),
        (ValueError, "scale_growth_factor", {"scale_growth_factor": 0.5}),
        (ValueError, "scale_backoff_factor", {"scale_backoff_factor": 2.0}),
        (ValueError, "dynamic_init_scale", {"dynamic_init_scale": 0.0}),
    ],
)
def test_bad_options(error: type[Exception], match: str, options: dict) -> None:
    model = small_model()
    refused(error, match, model, sgd(model), **options)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_wrapped_models() -> None:
    model = small_model()
    refused(RuntimeError, "wrapped in DataParallel already", nn.DataParallel(model), sgd(model))

    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    refused(RuntimeError, "then wrap it", DistributedDataParallel(model), sgd(model), opt_level="O2")


def test_things_that_are_no_models_or_optimizers() -> None:
    model = small_model()
    refused(TypeError, "models must be", "model", sgd(model))
    refused(TypeError, "models must be", None, sgd(model))
    refused(TypeError, "models must be", [model, 3], sgd(model))
    refused(TypeError, "models must be", [3, model], sgd(model))
    refused(TypeError, "models must be", [model, 3], sgd(model), enabled=False)
    refused(TypeError, "optimizers must be", model, {"first": sgd(model)})
    refused(TypeError, "optimizers must be", model, model)
    refused(TypeError, "optimizers must be", model, [sgd(model), 3])
    halves = FP16_Optimizer(sgd(nn.Linear(2, 2).half()), verbose=False)
    refused(RuntimeError, "give amp.initialize the bare optimizer", model, halves)


def test_an_optimizer_of_other_parameters() -> None:
    refused(RuntimeError, "none of the parameters of the optimizer", small_model(), sgd(small_model()), opt_level="O2")
    refused(RuntimeError, "SGD", small_model(), LARC(sgd(small_model())), opt_level="O2")


@pytest.mark.parametrize("level", LEVELS)
def test_half_precision_models(level: str) -> None:
    model = small_model().half()
    refused(RuntimeError, "0.weight is torch.float16 already", model, sgd(model), opt_level=level)


def test_float64_models() -> None:
    model = small_model().double()
    refused(RuntimeError, "parameter 0.weight is torch.float64, and O2 has", model, sgd(model), opt_level="O2")


def test_a_model_in_half_precision_is_allowed_if_asked_for() -> None:
    state.allow_incoming_model_not_fp32 = True
    model = small_model().half()
    model, optimizer = quiet(model, sgd(model), opt_level="O2")
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}
    train(model, optimizer, 2)


def test_hard_override_turns_refusals_into_warnings() -> None:
    state.hard_override = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = quiet(small_model().half(), opt_level="O2", patch_torch_functions=False)
    assert any("already" in str(each.message) for each in caught)
    assert model[0].weight.dtype == torch.float16
    with pytest.warns(UserWarning, match="keep_batchnorm_fp32"):
        quiet(small_model(), opt_level="O1", keep_batchnorm_fp32=True)


def test_a_scripted_model() -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    assert quiet(scripted, opt_level="O1")(torch.randn(1, 2)).dtype == torch.float16
    with pytest.raises(TypeError, match="before torch"):
        quiet(scripted, opt_level="O2")


@pytest.mark.parametrize("second", LEVELS)
@pytest.mark.parametrize("first", ["O1", "O2", "O3"])
def test_a_second_initialize_replaces_the_first(first: str, second: str) -> None:
    """Compare with a model and optimizer that were only initialized the second way."""
    model = small_model()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    model, optimizer = quiet(model, optimizer, opt_level=first)
    again, optimizer = quiet(model, optimizer, opt_level=second, num_losses=2)
    assert again is model
    assert len(state.loss_scalers) == 2
    other = small_model()
    if first == "O3":  # the first made the weights less exact for good
        for param in (*other[0].parameters(), *other[1].parameters(), *other[3].parameters()):
            param.data = param.data.half().float()
    losses = train(model, optimizer, 4)
    masters = values(amp.master_params(optimizer))
    amp.shutdown()
    other, optimizer = quiet(other, FusedAdam(other.parameters(), lr=0.01), opt_level=second)
    assert train(other, optimizer, 4) == losses
    assert_same(masters, amp.master_params(optimizer))


def test_initializing_again_keeps_the_trained_weights() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2")
    train(model, optimizer, 3)
    masters = values(amp.master_params(optimizer))
    moments = [optimizer.state[p]["exp_avg"].clone() for p in amp.master_params(optimizer)]
    model, optimizer = quiet(model, optimizer, opt_level="O5")
    assert_same(masters, amp.master_params(optimizer))
    assert_same(moments, [optimizer.state[p]["exp_avg"] for p in amp.master_params(optimizer)])
    assert model[0].weight.dtype == torch.bfloat16
    train(model, optimizer, 3)


def test_a_copied_optimizer_with_masters_is_refused() -> None:
    """Its step would update copies of the masters and not the copied model."""
    model = small_model()
    copied, optimizer = copy.deepcopy(quiet(model, FusedAdam(model.parameters()), opt_level="O5"))
    with pytest.raises(RuntimeError, match="has not seen"), amp.scale_loss(loss_of(copied, 0), optimizer):
        pass


@pytest.mark.parametrize(("first", "second"), [("O1", "O0"), ("O4", "O1"), ("O0", "O5")])
def test_a_copied_model_is_initialized_anew(first: str, second: str) -> None:
    """The casts of the model that it was copied from are gone."""
    inputs = torch.randn(5, 6)
    copied = quiet(copy.deepcopy(quiet(small_model(), opt_level=first)).float(), opt_level=second)
    assert_same([copied(inputs)], [quiet(small_model(), opt_level=second)(inputs)])
    amp.shutdown()
    assert copied(inputs).dtype == torch.float32


def test_a_model_initialized_again_without_its_optimizer() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2")
    train(model, optimizer, 2)
    masters = values(amp.master_params(optimizer))
    quiet(model, opt_level="O0")
    assert_same(masters, model.parameters())
    assert not hasattr(optimizer, "_amp_stash")
    quiet(small_model(), opt_level="O2")
    with pytest.raises(RuntimeError, match="has not seen"), amp.scale_loss(loss_of(model, 0), optimizer):
        pass


@pytest.mark.parametrize("foreach", [False, True])
def test_state_of_an_optimizer_whose_model_is_initialized_again(foreach: bool) -> None:
    """O3 made it in half precision; it fits the parameters that O1 has made float32 again."""
    model = small_model()
    model, optimizer = quiet(model, torch.optim.Adam(model.parameters(), eps=1e-3, foreach=foreach), opt_level="O3")
    train(model, optimizer, 1)
    quiet(model, opt_level="O1")
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert not torch.equal(before, model[0].weight)


def test_another_pair_joins_the_session() -> None:
    first, second = small_model(), small_model(seed=1)
    first, optimizer = quiet(first, sgd(first), opt_level="O2")
    second, other = quiet(second, sgd(second), opt_level="O2")
    train(first, optimizer, 2)
    train(second, other, 2)
    assert first[0].weight.dtype == second[0].weight.dtype == torch.float16


def test_disabled() -> None:
    model = small_model()
    model, optimizer = quiet(model, sgd(model), enabled=False, opt_level="O2")
    assert model[0].weight.dtype == torch.float32
    loss = loss_of(model, 0)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    assert amp.state_dict() == {}
    amp.load_state_dict({})


def test_disabling_gives_a_pair_back() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2")
    train(model, optimizer, 1)
    quiet(model, optimizer, enabled=False)
    train(model, optimizer, 1)
    assert model[0].weight.dtype == torch.float32


def test_amp_keeps_nothing_alive() -> None:
    import gc
    import weakref

    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2")
    train(model, optimizer, 2)
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_arguments_of_other_variants_are_taken() -> None:
    """Pass the arguments of ROCm's and Ascend's variants by keyword."""
    model = small_model()
    model, optimizer = quiet(
        model,
        sgd(model),
        opt_level="O2",
        combine_grad=None,
        combine_ddp=True,
        ddp_replica_count=2,
        user_cast_preferred=True,
        check_combined_tensors=None,
        patch_torch_functions_type=None,
    )
    train(model, optimizer, 2)


def test_masters_have_the_marks_of_their_parameters() -> None:
    """Norms over all ranks read from an optimizer's parameters whether a parameter is a part or an expert."""
    model = small_model()
    model[0].weight.tensor_model_parallel, model[0].weight.partition_dim = True, 1
    model[0].weight.main_grad = torch.zeros_like(model[0].weight)
    model[3].weight.allreduce = False
    model, optimizer = quiet(model, sgd(model), opt_level="O2")
    masters = dict(zip(model.parameters(), amp.master_params(optimizer), strict=True))
    assert vars(masters[model[0].weight]) == {"tensor_model_parallel": True, "partition_dim": 1}
    assert vars(masters[model[3].weight]) == {"allreduce": False}
