"""apex.contrib.transducer as its users call it: modules, gradients, packing, masks, compiled and under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from apex.contrib.transducer import TransducerJoint, TransducerLoss, _transducer_ref
from apex.contrib.transducer.transducer import TransducerJointFunc, TransducerLossFunc
from apex.ops import _library
from tests.ops.transducer import formulas
from tests.support.harness import Route, assert_close, routes

FRAMES, TOKENS, FEATURES, WORDS = 4, 4, 8, 5
F_LEN, G_LEN = [4, 3], [2, 4]
BLANK = WORDS - 1


def joint_tensors(
    device: str = "cpu", dtype: torch.dtype = torch.float64, features: int = FEATURES
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    f = torch.randn(2, FRAMES, features, dtype=torch.float64).to(device, dtype).requires_grad_()
    g = torch.randn(2, TOKENS, features, dtype=torch.float64).to(device, dtype).requires_grad_()
    lengths = (torch.tensor(length, dtype=torch.int32, device=device) for length in (F_LEN, G_LEN))
    return f, g, *lengths


def loss_tensors(
    device: str = "cpu", dtype: torch.dtype = torch.float64, words: int = WORDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(2, FRAMES, TOKENS, words, dtype=torch.float64).to(device, dtype).requires_grad_()
    label = torch.randint(words - 1, (2, TOKENS - 1), dtype=torch.int32, device=device)
    f_len, g_len = (torch.tensor(length, dtype=torch.int32, device=device) for length in (F_LEN, G_LEN))
    return x, label, f_len, g_len - 1


def packing(f_len: Tensor, g_len: Tensor) -> tuple[Tensor, int]:
    offset = torch.cumsum(f_len * g_len, 0)
    return offset, int(offset[-1])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_joint_and_its_gradients(packed: bool, relu: bool) -> None:
    f, g, f_len, g_len = joint_tensors(features=3)
    joint = TransducerJoint(pack_output=packed, relu=relu)
    more = packing(f_len, g_len) if packed else ()
    wanted = formulas.joint(f, g, f_len, g_len, packed)
    if relu:
        wanted = torch.where(wanted == -1, wanted, wanted.relu())
    torch.testing.assert_close(joint(f, g, f_len, g_len, *more), wanted)
    assert torch.autograd.gradcheck(lambda f, g: joint(f, g, f_len, g_len, *more), (f, g))
    assert torch.autograd.gradgradcheck(lambda f, g: joint(f, g, f_len, g_len, *more), (f, g))


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_dropout_passes_gradients_where_its_mask_says(relu: bool, packed: bool, route: Route) -> None:
    f, g, f_len, g_len = joint_tensors(route.device, torch.float32)
    joint = TransducerJoint(packed, relu=relu, dropout=True, dropout_prob=0.4, probe_mask=True)
    offset, rows = packing(f_len, g_len)
    with _library.implementation(route.implementation):
        h = joint(f, g, f_len, g_len, offset, rows)
        dh = torch.randn_like(h)
        gradients = torch.autograd.grad(h, (f, g), dh)
    (mask,) = joint.mask_probe
    assert mask.dtype == torch.uint8
    plain = formulas.joint(f.cpu(), g.cpu(), f_len, g_len, packed)
    if relu:
        plain = plain.relu()
    through = plain * mask.cpu() / 0.6
    exists = torch.ones_like(plain, dtype=torch.bool)
    if not packed:
        for b in range(2):
            exists[b, F_LEN[b] :], exists[b, :, G_LEN[b] :] = False, False
    torch.testing.assert_close(h.cpu()[exists], through[exists])
    assert (h[~exists.to(route.device)] == -1).all()
    dropped = 1 - mask.cpu()[exists].float().mean().item()
    assert (0.55 < dropped < 0.85) if relu else (0.25 < dropped < 0.55)
    wanted = torch.autograd.grad(through, (f, g), dh.cpu() * exists)
    torch.testing.assert_close(gradients, wanted)
    assert torch.equal(joint.eval()(f, g, f_len, g_len, offset, rows).cpu()[exists], plain[exists])


def test_joint_as_its_reference() -> None:
    f, g, f_len, g_len = joint_tensors()
    padding = formulas.joint(f, g, f_len, g_len, False).detach() == -1
    dh = torch.randn(2, FRAMES, TOKENS, FEATURES, dtype=torch.float64).masked_fill(padding, 0.0)
    for packed in (False, True):
        f.grad = g.grad = None
        joint = TransducerJoint(packed, relu=True, dropout=True, dropout_prob=0.2, probe_mask=True)
        torch.manual_seed(1)
        h = joint(f, g, f_len, g_len, *packing(f_len, g_len))
        found = torch.autograd.grad(h, (f, g), formulas.pack(dh, f_len, g_len) if packed else dh)
        (mask,) = joint.mask_probe
        if packed:
            mask = torch.zeros(dh.shape, dtype=torch.uint8).masked_scatter_(~padding, mask)
        given = f, g, dh, f_len, g_len, packed, True, True, 0.2, mask
        wanted, *gradients = _transducer_ref.transducer_joint_reference(*given)
        torch.testing.assert_close(h, wanted)
        torch.testing.assert_close(list(found), gradients)
        assert gradients[0] is f.grad
    with pytest.raises(NotImplementedError, match="mask"):
        _transducer_ref.transducer_joint_reference(*given[:9])


def test_gradient_of_a_single_input() -> None:
    f, g, f_len, g_len = joint_tensors()
    h = TransducerJoint()(f.detach(), g, f_len, g_len)
    dh = torch.randn_like(h)
    (dg,) = torch.autograd.grad(h, g, dh)
    torch.testing.assert_close(dg, torch.autograd.grad(formulas.joint(f, g, f_len, g_len, False), g, dh)[0])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fuse", [False, True])
def test_loss_and_its_gradient(packed: bool, fuse: bool) -> None:
    x, label, f_len, y_len = loss_tensors(words=3)
    loss = TransducerLoss(fuse_softmax_backward=fuse, packed_input=packed)
    offset, _ = packing(f_len, y_len + 1)
    given = formulas.pack(x, f_len, y_len + 1).detach().requires_grad_() if packed else x
    debug: list[Tensor] = []

    def losses(logits: Tensor) -> Tensor:
        return loss(logits, label, f_len, y_len, 2, offset, FRAMES, debug)

    wanted = formulas.losses(x, label, f_len, y_len, 2)
    torch.testing.assert_close(losses(given), wanted)
    assert torch.autograd.gradcheck(losses, given)
    alpha, beta, gradient, again = _transducer_ref.transducer_loss_reference(
        x, label, f_len, y_len, 2, torch.tensor([1.0, -3.0])
    )
    torch.testing.assert_close(debug, [alpha, beta])
    torch.testing.assert_close(again, wanted.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, x, torch.tensor([1.0, -3.0]).double())[0])
    assert gradient is x.grad
    (twice,) = torch.autograd.grad(losses(given).square().sum(), given)
    assert twice.shape == given.shape
    with pytest.raises(RuntimeError, match="first derivative only"):
        torch.autograd.grad(losses(given).sum(), given, create_graph=True)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, route: Route) -> None:
    x, label, f_len, y_len = loss_tensors(route.device, dtype)
    debug: list[Tensor] = []
    with _library.implementation(route.implementation):
        losses = TransducerLoss()(x, label, f_len, y_len, BLANK, debug_list=debug)
        losses.sum().backward()
    wide = x.detach().double().cpu().requires_grad_()
    wanted = formulas.losses(wide, label.cpu(), f_len.cpu(), y_len.cpu(), BLANK)
    wanted.sum().backward()
    assert [losses.dtype, debug[0].dtype] == [dtype, torch.float32]
    assert_close(-debug[1][:, 0, 0], wanted.detach(), reduction=100)
    assert_close(losses, wanted.detach())
    assert_close(x.grad, wide.grad, reduction=100)


@pytest.mark.parametrize("route", routes(interpreter=False))
def test_a_model_compiles_checkpoints_and_runs_under_autocast(route: Route) -> None:
    f, g, f_len, g_len = joint_tensors(route.device, torch.float32)
    _, label, _, y_len = loss_tensors(route.device)
    head = torch.nn.Linear(FEATURES, WORDS, device=route.device)
    joint, loss = TransducerJoint(pack_output=True, relu=True), TransducerLoss(packed_input=True)
    offset, rows = packing(f_len, g_len)

    def losses(f: Tensor, g: Tensor) -> Tensor:
        return loss(head(joint(f, g, f_len, g_len, offset, rows)), label, f_len, y_len, BLANK, offset, FRAMES)

    def model(f: Tensor, g: Tensor) -> Tensor:
        return losses(f, g).sum()

    backend = "inductor" if route.device == "cuda" else "aot_eager"  # generated C++ would need a compiler
    with _library.implementation(route.implementation):
        plain = model(f, g)
        wanted = torch.autograd.grad(plain, (f, g))
        for other in (
            torch.compile(model, fullgraph=True, backend=backend),
            lambda f, g: checkpoint(model, f, g, use_reentrant=False),
        ):
            value = other(f, g)
            torch.testing.assert_close(value, plain)
            torch.testing.assert_close(torch.autograd.grad(value, (f, g)), wanted)
        with torch.autocast(route.device, dtype=torch.bfloat16):
            found = losses(f, g)
        assert found.dtype == torch.bfloat16  # a sum would be float32: autocast of a GPU says so
        value = found.float().sum()
        torch.testing.assert_close(value, plain, rtol=0.05, atol=0)
        for actual, expected in zip(torch.autograd.grad(value, (f, g)), wanted, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_have_the_dtypes_of_their_inputs(compiled: bool, route: Route) -> None:
    f, g, f_len, g_len = joint_tensors(route.device, torch.float32)
    half = f.detach().half().requires_grad_()
    joint = TransducerJoint(dropout=True, dropout_prob=0.5)
    function = torch.compile(joint, fullgraph=True, backend="aot_eager") if compiled else joint
    with _library.implementation(route.implementation):
        h = function(half, g, f_len, g_len)
        h.sum().backward()
    assert [h.dtype, half.grad.dtype, g.grad.dtype] == [torch.float32, torch.float16, torch.float32]


def test_dropout_with_one_float64_input() -> None:
    """A kernel accepts f but not h, so the dropout noise must not be a kernel's."""
    f, g, f_len, g_len = joint_tensors()
    joint = TransducerJoint(dropout=True, dropout_prob=0.5, probe_mask=True)
    choose = _library.runs_triton
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_library, "runs_triton", lambda family, t: t.dtype == torch.float32 or choose(family, t))
        h = joint(f.detach().float(), g, f_len, g_len)
    assert joint.mask_probe[0].shape == h.shape
    assert h.isfinite().all()


def test_functions_take_upstreams_arguments() -> None:
    f, g, f_len, g_len = joint_tensors()
    none = torch.empty(0)
    h = TransducerJointFunc.apply(f, g, f_len, g_len, False, True, False, none, 0, 1, 4, 0, None)
    torch.testing.assert_close(h, TransducerJoint(relu=True)(f, g, f_len, g_len))
    x, label, f_len, y_len = loss_tensors()
    losses = TransducerLossFunc.apply(x, label, f_len, y_len, none, FRAMES, BLANK, True, None, 1, False)
    torch.testing.assert_close(losses, TransducerLoss()(x, label, f_len, y_len, BLANK))
    full = ["given"]
    TransducerLoss()(x, label, f_len, y_len, BLANK, debug_list=full)
    assert full == ["given"]


def test_the_memory_that_a_relu_keeps_is_its_output() -> None:
    f, g, f_len, g_len = joint_tensors()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        h = TransducerJoint(relu=True, dropout=True, dropout_prob=0.5)(f, g, f_len, g_len)
    large = [tensor for tensor in kept if tensor.numel() >= h.numel()]
    assert [tensor.data_ptr() for tensor in large] == [h.data_ptr()]


def test_bad_arguments_are_named() -> None:
    f, g, f_len, g_len = joint_tensors()
    x, label, _, y_len = loss_tensors()
    with pytest.raises(NotImplementedError, match="opt=1"):
        TransducerJoint(relu=True, opt=0)
    with pytest.raises(ValueError, match="opt=2 must be 0 or 1"):
        TransducerJoint(opt=2)
    with pytest.raises(ValueError, match="dropout_prob=-1"):
        TransducerJoint(dropout=True, dropout_prob=-1)
    with pytest.raises(ValueError, match="needs batch_offset and packed_batch"):
        TransducerJoint(pack_output=True)(f, g, f_len, g_len)
    with pytest.raises(ValueError, match="needs batch_offset and max_f_len"):
        TransducerLoss(packed_input=True)(x, label, f_len, y_len, 0)
    with pytest.raises(ValueError, match="blank_idx=5"):
        TransducerLoss()(x, label, f_len, y_len, WORDS)
