"""`amp.shutdown` gives back a process as if amp had never been, and a model that has learned."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import apex
from apex import amp
from apex.amp._amp_state import AmpState
from apex.amp._containers import applier
from apex.optimizers import FusedAdam
from apex.parallel import LARC
from tests.amp.common import LEVELS, assert_same, loss_of, quiet, small_model, train, values


def picture(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return everything that amp may have changed."""
    return {
        "class": type(model),
        "attributes": {m: sorted(vars(m)) for m in model.modules()},
        "hooks": {m: [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")] for m in model.modules()},
        "dtypes": {name: tensor.dtype for name, tensor in model.state_dict().items()},
        "params": [[id(p) for p in group["params"]] for group in optimizer.param_groups],
        "states": {id(p) for p in optimizer.state},
        "optimizer": sorted(name for name in vars(optimizer) if name not in ("_ready", "_opt_called")),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        ),
        "kernels": set(torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")),
        "functions": (torch.einsum, torch.nn.functional.linear, torch.Tensor.exp),
    }


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["SGD", "FusedAdam", "LARC"])
@pytest.mark.parametrize("scheduler", [False, True])
def test_nothing_is_left(level: str, kind: str, scheduler: bool) -> None:
    model = small_model()
    optimizer: Any = FusedAdam(model.parameters(), lr=0.01) if kind == "FusedAdam" else None
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if scheduler:
        torch.optim.lr_scheduler.StepLR(optimizer, 10)
    optimizer = LARC(optimizer) if kind == "LARC" else optimizer
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = picture(model, optimizer)
    amp.register_half_function(torch, "einsum")
    quiet(model, optimizer, opt_level=level, combine_grad=level == "O3")
    train(model, optimizer, 3)
    learned = values(amp.master_params(optimizer))
    optimizer.zero_grad()
    amp.shutdown()
    assert picture(model, optimizer) == before
    assert_same([value.float() for value in learned], model.parameters())
    assert vars(amp._amp_state).keys() == vars(AmpState()).keys()
    # And both go on without amp.
    loss_of(model, 1).backward()
    start = values(model.parameters())
    optimizer.step()
    assert not torch.equal(start[0], model[0].weight)


def test_gradients_are_given_back() -> None:
    model = small_model()
    model, optimizer = quiet(model, FusedAdam(model.parameters(), lr=0.01), opt_level="O2")
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    unscaled = [p.grad.clone() for p in amp.master_params(optimizer)]
    amp.shutdown()
    assert_same(unscaled, [p.grad for p in model.parameters()])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *(("SGD", {"momentum": 0.9, "foreach": foreach}) for foreach in (False, True)),
        *(("Adam", {"eps": 1e-3, "foreach": foreach}) for foreach in (False, True)),
        ("LBFGS", {"max_iter": 2}),
    ],
)
def test_state_of_o3_fits_the_parameters_afterwards(kind: str, options: dict[str, Any]) -> None:
    """State that was made or cast in half precision is float32 again."""
    model = small_model()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    quiet(model, optimizer, opt_level="O3")
    for _ in range(2):
        optimizer.step(closure)
    amp.shutdown()
    found: list[torch.Tensor] = []
    applier(list(optimizer.state.values()), found.append)
    assert {value.dtype for value in found if value.is_floating_point()} == {torch.float32}
    assert len(found) >= 5
    before = values(model.parameters())
    optimizer.step(closure)
    assert not torch.equal(before[0], model[0].weight)
    assert kind == "LBFGS" or model[0].weight.isfinite().all()  # whose products of differences float16 does not hold


def test_state_that_amp_did_not_cast_stays() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.state[model[0].weight]["own"] = torch.ones(2, dtype=torch.bfloat16)
    quiet(model, optimizer, opt_level="O1")
    amp.shutdown()
    assert optimizer.state[model[0].weight]["own"].dtype == torch.bfloat16


def test_shutdown_twice_and_without_a_session() -> None:
    amp.shutdown()
    quiet(small_model(), opt_level="O1")
    amp.shutdown()
    amp.shutdown()
    assert not hasattr(amp._amp_state, "opt_properties")
    quiet(small_model(), opt_level="O1")
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def test_autocast_of_the_users_own_is_restored() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quiet(small_model(), opt_level="O1")
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
        amp.shutdown()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert torch.is_autocast_cache_enabled()


def product() -> torch.dtype:
    """Return the dtype of a product under the thread's autocast."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def in_thread(function: Any) -> Any:
    """Return the result of a function that runs in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_autocast_blocks_that_end_before_amp_does() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quiet(small_model(), opt_level="O1")
    assert product() == torch.float32
    amp.shutdown()
    assert product() == torch.float32
    assert torch.is_autocast_cache_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quiet(small_model(), opt_level="O1")
    quiet(small_model(), opt_level="O1")
    assert product() == torch.float16
    amp.shutdown()
    assert product() == torch.float32


def test_an_autocast_block_around_shutdown() -> None:
    """Inside the block the user's autocast counts. Its end restores amp's casts, and the next call of amp ends them."""
    quiet(small_model(), opt_level="O1")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        amp.shutdown()
        assert product() == torch.bfloat16
    amp.shutdown()
    assert product() == torch.float32
    assert torch.is_autocast_cache_enabled()


def test_shutdown_in_another_thread() -> None:
    model = small_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        quiet(model, opt_level="O1")

        def shut_down() -> tuple:
            with pytest.warns(UserWarning, match="autocast stays on in thread 'MainThread'"):
                amp.shutdown()
            return product(), torch.is_autocast_cache_enabled()

        assert in_thread(shut_down) == (torch.float32, True)
        assert model(torch.ones(2, 6)).dtype == product() == torch.float16  # this thread's own autocast
        amp.shutdown()
        assert product() == torch.bfloat16
    assert product() == torch.float32


def test_threads_that_initialize_one_after_the_other() -> None:
    def start() -> torch.dtype:
        quiet(small_model(), opt_level="O4")
        return product()

    quiet(small_model(), opt_level="O1")
    assert in_thread(start) == torch.bfloat16
    quiet(small_model(), opt_level="O2")
    assert product() == torch.float32


def test_double_precision_models_come_back_in_double() -> None:
    model = small_model().double()
    quiet(model, opt_level="O0")
    assert model[0].weight.dtype == torch.float32
    amp.shutdown()
    assert model[0].weight.dtype == torch.float64


def test_state_object_and_module() -> None:
    """`apex.amp._amp_state` is a submodule and, on the package, the state object: both at once."""
    import apex.amp._amp_state as by_import
    from apex.amp import _amp_state as on_package
    from apex.amp._amp_state import _amp_state as in_module

    assert on_package is in_module
    assert apex.amp._amp_state is in_module
    assert by_import is not None
    assert on_package.verbosity == 1
    assert not hasattr(on_package, "opt_properties")


def test_applier() -> None:
    from apex.amp._initialize import applier, to_type

    nested = {"a": [torch.ones(1), (torch.ones(1), "text")], "b": None, "c": 3}
    halved = applier(nested, lambda value: to_type(torch.float16, value))
    assert halved["a"][0].dtype == halved["a"][1][0].dtype == torch.float16
    assert halved["a"][1][1] == "text"
    assert (halved["b"], halved["c"]) == (None, 3)

    class Batch:
        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def to(self, dtype: torch.dtype) -> "Batch":
            return Batch(dtype)

    assert applier([Batch(torch.float32)], lambda value: to_type(torch.float16, value))[0].dtype == torch.float16
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    again = applier(packed, lambda value: to_type(torch.float16, value))
    assert again.data.dtype == torch.float16
    assert again.batch_sizes.dtype == torch.int64


def test_master_params_of_anything_with_groups() -> None:
    param = torch.ones(1, requires_grad=True)
    plain = torch.optim.SGD([param], lr=0.1)
    assert list(amp.master_params(plain)) == [param]
    wrapper = type("Wrapper", (), {"param_groups": plain.param_groups})()
    assert [id(p) for p in amp.master_params(wrapper)] == [id(param)]
    assert list(amp.master_params(LARC(plain))) == [param]
