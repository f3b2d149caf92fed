"""`amp.init` and its handle, functions that users cast, and `disable_casts`."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apex import amp
from apex.amp.amp import half_function
from apex.amp.handle import AmpHandle, NoOpHandle
from apex.amp.opt import OptimWrapper
from tests.amp.common import assert_same, batch, quiet, small_model, values


def product() -> torch.dtype:
    """Return the dtype of a matrix product under the current casts."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_init_casts_until_the_handle_is_deactivated() -> None:
    handle = amp.init()
    assert isinstance(handle, AmpHandle)
    assert handle.is_active()
    assert amp._amp_state.handle is handle
    assert product() == torch.float16
    with handle._disable_casts():
        assert not handle.is_active()
        assert product() == torch.float32
    assert product() == torch.float16
    assert handle.has_cache
    assert not handle.verbose
    assert handle.cache == {}
    handle._clear_cache()
    handle._deactivate()
    assert not handle.is_active()
    assert product() == torch.float32


def test_deactivating_reaches_into_models() -> None:
    model = quiet(nn.Linear(2, 2), opt_level="O1")
    amp._amp_state.handle._deactivate()
    assert model(torch.ones(1, 2)).dtype == torch.float32


def test_init_after_initialize() -> None:
    model = quiet(nn.Linear(2, 2), opt_level="O1")
    amp.init()
    assert model(torch.ones(1, 2)).dtype == torch.float16
    amp.shutdown()
    assert product() == torch.float32


def test_init_in_bfloat16() -> None:
    amp.init(patch_type=torch.bfloat16)
    assert product() == torch.bfloat16


def test_handle_that_does_nothing() -> None:
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert product() == torch.float32
    assert not handle.is_active()
    assert not handle.has_cache
    assert not handle.verbose
    loss = torch.ones(())
    with handle.scale_loss(loss, None) as scaled:
        assert scaled is loss
    with handle._disable_casts():
        pass
    handle._clear_cache()
    handle._deactivate()
    optimizer = handle.wrap_optimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    with optimizer.scale_loss(loss) as scaled:
        assert scaled is loss
    optimizer.step()


def gradients(model: nn.Module, step: int) -> list[Tensor]:
    inputs, targets = batch(step)
    return list(torch.autograd.grad(F.mse_loss(model(inputs), targets), list(model.parameters())))


def test_scale_loss_of_the_handle() -> None:
    handle = amp.init(loss_scale=128.0)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(0)
    loss = F.mse_loss(model(inputs), targets)
    with handle.scale_loss(loss, optimizer) as scaled:
        assert scaled.item() == pytest.approx(loss.item() * 128)
        scaled.backward()
    for param, expected in zip(model.parameters(), gradients(model, 0), strict=True):
        torch.testing.assert_close(param.grad, expected, atol=1e-3, rtol=1e-2)


def test_overflow_under_the_handle(capsys: pytest.CaptureFixture) -> None:
    handle = amp.init()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = values(model.parameters())
    with handle.scale_loss(model(batch(0)[0]).mean() * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert_same(before, model.parameters())
    assert handle._default_scaler.loss_scale() == 2.0**15
    assert "Gradient overflow, skipping update" in capsys.readouterr().out
    optimizer.zero_grad()
    with handle.scale_loss(model(batch(0)[0]).pow(2).mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(before[0], model[0].weight)


def test_wrapped_optimizer_with_two_losses() -> None:
    handle = amp.init()
    model = small_model()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    assert isinstance(optimizer, OptimWrapper)
    assert optimizer.param_groups[0]["lr"] == 0.1
    expected = [a + b for a, b in zip(gradients(model, 0), gradients(model, 1), strict=True)]
    model = small_model()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    for step in range(2):
        inputs, targets = batch(step)
        with optimizer.scale_loss(F.mse_loss(model(inputs), targets)) as scaled:
            scaled.backward()
    for param, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, atol=2e-3, rtol=1e-2)
    with pytest.raises(RuntimeError, match="num_loss"), optimizer.scale_loss(torch.ones(())):
        pass
    optimizer.step()
    optimizer.zero_grad()
    # An overflow in either skips the step, once.
    before = values(model.parameters())
    for factor in (float("inf"), 1.0):
        with optimizer.scale_loss(model(batch(0)[0]).pow(2).mean() * factor * 0.1) as scaled:
            scaled.backward()
    optimizer.step()
    assert_same(before, model.parameters())
    assert [scaler.loss_scale() for scaler in optimizer._loss_scaler] == [2.0**15, 2.0**16]
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    with pytest.raises(NotImplementedError):
        optimizer.step(closure=lambda: None)


def types(*args: Tensor, **kwargs: Tensor) -> list[torch.dtype]:
    return [value.dtype for value in (*args, *kwargs.values())]


def test_decorators() -> None:
    half, full, bfloat, promote = (
        decorate(types)
        for decorate in (amp.half_function, amp.float_function, amp.bfloat16_function, amp.promote_function)
    )
    x, h, i = torch.ones(1), torch.ones(1).half(), torch.ones(1, dtype=torch.int64)
    for function in (half, full, bfloat, promote):
        assert function(x, h, i) == [torch.float32, torch.float16, torch.int64]
    amp.init()
    assert half(x, h, i) == [torch.float16, torch.float16, torch.int64]
    assert full(x, h, i) == [torch.float32, torch.float32, torch.int64]
    assert bfloat(x, other=h) == [torch.bfloat16, torch.bfloat16]
    assert promote(x, h, i) == [torch.float32, torch.float32, torch.int64]
    assert promote(h, h) == [torch.float16, torch.float16]
    assert half.__name__ == "types"
    with amp.disable_casts():
        assert half(x, h) == [torch.float32, torch.float16]
    assert half_function is amp.half_function


def test_operators_inside_a_decorated_function_are_cast_as_usual() -> None:
    @amp.half_function
    def attention(q: Tensor, k: Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        scores = q @ k
        return q.dtype, scores.dtype, F.softmax(scores, -1).dtype

    amp.init()
    assert attention(torch.ones(2, 2), torch.ones(2, 2)) == (torch.float16, torch.float16, torch.float32)


@pytest.mark.parametrize("preferred", [None, True, False])
def test_registered_functions_run_in_the_users_type(preferred: bool | None) -> None:
    """The user's registration overrides PyTorch's list."""
    namespace = type("namespace", (), {"function": staticmethod(types)})
    originals = torch.einsum, torch.matmul, F.softmax, torch.Tensor.exp
    amp.register_half_function(torch, "einsum")
    amp.register_float_function(torch, "matmul")
    amp.register_half_function(F, "softmax")
    amp.register_half_function(torch.Tensor, "exp")
    amp.register_promote_function(namespace, "function")
    amp.register_bfloat16_function(torch, "tanh")
    with pytest.raises(ValueError, match="no function named nothing"):
        amp.register_half_function(torch, "nothing")
    x, h = torch.ones(2, 2), torch.ones(2, 2).half()
    assert torch.matmul(x, x).dtype == torch.float32  # nothing happens before initialize
    quiet(small_model(), opt_level="O1", user_cast_preferred=preferred)
    assert torch.einsum("ab,bc->ac", x, x).dtype == torch.float16
    assert torch.matmul(h, h).dtype == torch.float32
    assert F.softmax(x, -1).dtype == torch.float16
    assert h.exp().dtype == torch.float16
    assert namespace.function(x, h) == [torch.float32, torch.float32]
    assert torch.tanh(x).dtype == torch.bfloat16
    amp.shutdown()
    assert (torch.einsum, torch.matmul, F.softmax, torch.Tensor.exp) == originals
    assert namespace.function is types


def test_registrations_work_inside_models_and_give_gradients() -> None:
    amp.register_float_function(torch, "sigmoid")

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.sigmoid(super().forward(x))
            assert out.dtype == torch.float32
            return out

    model = quiet(Net(2, 2), opt_level="O1")
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float32


def test_registrations_do_nothing_at_o2() -> None:
    before = torch.einsum
    amp.register_half_function(torch, "einsum")
    quiet(small_model(), opt_level="O2")
    assert torch.einsum is before
