"""The joint against its definition in float64, by every route, with uninitialised memory full of NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from apex.ops import _library
from apex.ops.transducer import JOINT, joint_arguments, reference
from tests.ops.transducer import formulas
from tests.support.harness import Route, assert_close, assert_equal_bits, opcheck, routes

_HALF, _BF16, _F32, _F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# frames, tokens, features, lengths along both, dtypes of f and g: one frame; a rest of the four a program has; tokens
# that fill blocks and do not, and need two; chunks of frames; a sequence without frames
CASES = [
    (1, 1, 1, [1], [1], _F32, _F32),
    (6, 3, 20, [6, 1], [2, 3], _F32, _F32),
    (5, 9, 64, [5, 3], [9, 4], _HALF, _HALF),
    (3, 4, 24, [3, 2], [4, 1], _BF16, _BF16),
    (2, 130, 3, [2, 1], [130, 3], _F32, _F32),
    (33, 2, 16, [33], [2], _F32, _F32),
    (4, 3, 8, [0, 4], [3, 2], _HALF, _F32),
]


def tensors(case, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    frames, tokens, features, f_len, g_len, f_dtype, g_dtype = case
    f = torch.randn(len(f_len), frames, features).to(device, f_dtype)
    g = torch.randn(len(f_len), tokens, features).to(device, g_dtype)
    return f, g, torch.tensor(f_len, dtype=torch.int32, device=device), torch.tensor(g_len, device=device)


def offset_and_rows(f_len: Tensor, g_len: Tensor) -> tuple[Tensor, int]:
    offset = torch.cumsum(f_len * g_len, 0)
    return offset, int(offset[-1])


def with_noise(arguments: tuple, noise: Tensor | None) -> tuple:
    """Arguments of the op with this noise in place of what was drawn."""
    return (*arguments[:5], noise, *arguments[6:])


def run(arguments: tuple, dh: Tensor) -> list[Tensor]:
    """h, mask, df, dg."""
    h, mask = JOINT.run(*arguments)
    assert mask is not None
    kept = h if arguments[6] else mask
    return [h, mask, *JOINT.run_backward((dh,), (kept, *arguments[2:5]), arguments[6:], (True, True))]


def exact(arguments: tuple, dh: Tensor) -> list[Tensor]:
    """`run` by the reference in float64."""
    given = [t.cpu() if isinstance(t, Tensor) else t for t in arguments]
    given[0], given[1] = given[0].double(), given[1].double()
    h, mask = reference.joint(*given)
    gradients = reference.joint_backward(dh.double().cpu(), mask, *given[2:5], *given[6:], (True, True))
    return [h, mask, *gradients]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_definition(case, packed: bool) -> None:
    f, g, f_len, g_len = (t if t.dtype in (torch.int32, torch.int64) else t.double() for t in tensors(case, "cpu"))
    f, g = f.requires_grad_(), g.requires_grad_()
    offset, rows = offset_and_rows(f_len, g_len)
    wanted = formulas.joint(f, g, f_len, g_len, packed)
    at = offset if packed else None
    arguments = joint_arguments(f.detach(), g.detach(), f_len, g_len, at, packed_rows=rows, want_mask=True)
    h, mask = reference.joint(*arguments)
    torch.testing.assert_close(h, wanted.detach())
    exists = wanted.detach() != -1
    assert torch.equal(mask, exists.to(torch.uint8))
    dh = torch.randn_like(wanted)
    found = reference.joint_backward(dh, None, f_len, g_len, at, *arguments[6:], (True, True))
    for actual, expected in zip(found, torch.autograd.grad(wanted, (f, g), dh), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case, packed: bool, route: Route) -> None:
    f, g, f_len, g_len = tensors(case, route.device)
    offset, rows = offset_and_rows(f_len, g_len)
    at = offset if packed else None
    shape = (rows, f.shape[2]) if packed else (f.shape[0], f.shape[1], g.shape[1], f.shape[2])
    dh = torch.randn(shape, device=route.device).to(torch.promote_types(f.dtype, g.dtype))
    keep = (torch.rand(shape, device=route.device) > 0.3).to(torch.uint8)
    before = [t.clone() for t in (f, g, dh)]
    for relu, dropout, noise in ((False, 0.0, None), (False, 0.3, keep), (True, 0.3, keep)):
        arguments = with_noise(joint_arguments(f, g, f_len, g_len, at, relu, dropout, rows, True), noise)
        with _library.implementation(route.implementation):
            found = run(arguments, dh)
        h, mask, df, dg = exact(arguments, dh)
        assert [t.dtype for t in found] == [dh.dtype, torch.uint8, dh.dtype, dh.dtype]
        assert_close(found[0], h, what="h")
        assert torch.equal(found[1].cpu(), mask)
        assert_close(found[2], df, reduction=g.shape[1], what="df")
        assert_close(found[3], dg, reduction=f.shape[1], what="dg")
    with _library.implementation(route.implementation):
        assert_equal_bits(found, run(arguments, dh))
    assert_equal_bits([f, g, dh], before)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("relu", [False, True])
def test_rows_behind_the_last_sequence_are_padding(relu: bool, route: Route) -> None:
    f, g, f_len, g_len = tensors((3, 2, 600, [3, 1], [2, 2], _HALF, _HALF), route.device)
    offset, rows = offset_and_rows(f_len, g_len)
    for dropout in (0.0, 0.5):
        with _library.implementation(route.implementation):
            h, mask = JOINT.run(*joint_arguments(f, g, f_len, g_len, offset, relu, dropout, rows + 4, True))
        assert torch.equal(h[rows:], torch.full_like(h[rows:], -1.0))
        assert mask is not None
        assert not mask[rows:].any()
        assert mask[:rows].any()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_drops_about_as_many_as_asked(packed: bool, route: Route) -> None:
    f, g, f_len, g_len = tensors((6, 16, 96, [6, 5], [16, 10], _F32, _F32), route.device)
    offset, rows = offset_and_rows(f_len, g_len)
    given = f, g, f_len, g_len, offset if packed else None
    with _library.implementation(route.implementation):
        arguments, other = (joint_arguments(*given, False, 0.25, rows) for _ in range(2))
        h, mask = JOINT.run(*arguments)
        again, _ = JOINT.run(*arguments)
        different, _ = JOINT.run(*other)
        dropped, _ = JOINT.run(*joint_arguments(*given, False, 1.0, rows))
    without = joint_arguments(*(t if t is None else t.cpu() for t in given), packed_rows=rows)
    plain, _ = reference.joint(*without)
    mask, h = mask.cpu(), h.cpu()
    exists = torch.ones_like(plain, dtype=torch.bool)
    if not packed:
        exists[1, 5:], exists[1, :, 10:] = False, False
    assert abs(mask[exists].float().mean() - 0.75) < 0.02
    torch.testing.assert_close(h[exists], (plain * mask / 0.75)[exists])
    assert torch.equal(h, again.cpu())
    assert not torch.equal(h, different.cpu())
    assert not dropped.cpu()[exists].any()


@pytest.mark.parametrize("route", routes())
def test_strided_empty_and_not_a_number(route: Route) -> None:
    f, g, f_len, g_len = tensors((8, 6, 12, [8, 5], [6, 2], _F32, _F32), route.device)
    f, g = f[:, ::2, ::2], g.transpose(0, 1).contiguous().transpose(0, 1)[:, :, ::2]
    f_len = torch.stack([f_len // 2, f_len], 1)[:, 0]
    f[0, 0, 0] = float("nan")
    with _library.implementation(route.implementation):
        h, _ = JOINT.run(*joint_arguments(f, g, f_len, g_len, None, relu=True))
        dh = torch.randn(6, 4, 2, 6, device=route.device).permute(2, 1, 0, 3)
        plain = joint_arguments(f, g, f_len, g_len, None)
        found = JOINT.run_backward((dh,), (None, f_len, g_len, None), plain[6:], (True, True))
        for shape in ((0, 4, 6), (2, 0, 6), (2, 4, 0)):
            empty = torch.empty(shape, device=route.device)
            lengths = torch.zeros(shape[0], dtype=torch.int32, device=route.device)
            arguments = joint_arguments(empty, empty, lengths, lengths, None, relu=True)
            h_empty, _ = JOINT.run(*arguments)
            assert h_empty.shape == (shape[0], shape[1], shape[1], shape[2])
            df, dg = JOINT.run_backward((h_empty,), (None, lengths, lengths, None), arguments[6:], (True, True))
            assert df.shape == dg.shape == shape
    given = [t.cpu() for t in (f, g, f_len, g_len)]
    wanted, _ = reference.joint(*joint_arguments(*given, None, relu=True))
    assert torch.equal(h.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert h[0, 0, :, 0].isnan().all()
    wanted_gradients = reference.joint_backward(dh.cpu(), None, *given[2:], None, *plain[6:], (True, True))
    torch.testing.assert_close([t.cpu() for t in found], list(wanted_gradients))


@pytest.mark.parametrize("route", routes())
def test_pytorch_knows_the_operator_with_dropout(route: Route) -> None:
    f, g, f_len, g_len = tensors((5, 3, 8, [5, 2], [3, 2], _F32, _F32), route.device)
    offset, rows = offset_and_rows(f_len, g_len)
    with _library.implementation(route.implementation):
        keep = torch.ones(rows, 8, dtype=torch.uint8, device=route.device)
        arguments = (f, g, f_len, g_len, offset, keep, True, 0.5, 2.0, 5, 3, rows, True)
        opcheck(route, torch.ops.apex.transducer_joint.default, arguments)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    frames, tokens, features = 1500, 750, 1024
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of the GPU's memory, which other processes hold")
    f, g, _, _ = tensors((frames, tokens, features, [0] * 2, [0] * 2, _HALF, _HALF), "cuda")
    lengths = torch.full((2,), frames, device="cuda"), torch.full((2,), tokens, device="cuda")
    arguments = joint_arguments(f, g, *lengths, None)
    h, _ = JOINT.run(*arguments)
    assert torch.equal(h[1, -1], f[1, -1] + g[1])
    df, dg = JOINT.run_backward((h,), (None, *lengths, None), arguments[6:], (True, True))
    torch.testing.assert_close(df[1, -1], h[1, -1].float().sum(0).half())
    torch.testing.assert_close(dg[1, -1], h[1, :, -1].float().sum(0).half())


def test_bad_arguments_are_named() -> None:
    f, g, f_len, g_len = tensors((5, 3, 8, [5, 2], [3, 2], _F32, _F32), "cpu")
    check = joint_arguments
    with pytest.raises(ValueError, match=r"got shapes \[2, 5, 8\] and \[2, 3, 7\]"):
        check(f, g[..., 1:], f_len, g_len, None)
    with pytest.raises(TypeError, match=r"float64, got torch\.int64"):
        check(f.long(), g, f_len, g_len, None)
    with pytest.raises(ValueError, match="g on meta"):
        check(f, g.to("meta"), f_len, g_len, None)
    with pytest.raises(ValueError, match=r"dropout_prob=1.5 must be a probability"):
        check(f, g, f_len, g_len, None, dropout=1.5)
    with pytest.raises(TypeError, match=r"f_len must be int32 or int64, got torch\.float32"):
        check(f, g, f_len.float(), g_len, None)
    with pytest.raises(ValueError, match=r"g_len must have one element per sequence, \[2\], got shape \[1\]"):
        check(f, g, f_len, g_len[:1], None)
    with pytest.raises(ValueError, match="f_len must be between 0 and 5, got 6"):
        check(f, g, f_len + 1, g_len, None)
    with pytest.raises(ValueError, match="f_len is on meta"):
        check(f, g, f_len.to("meta"), g_len, None)
    with pytest.raises(ValueError, match="batch_offset must have one int64 per sequence"):
        check(f, g, f_len, g_len, f_len.float())
    with pytest.raises(ValueError, match="batch_offset is on meta"):
        check(f, g, f_len, g_len, f_len.to("meta"))
    with pytest.raises(ValueError, match="packed_batch=-1"):
        check(f, g, f_len, g_len, f_len, packed_rows=-1)
    with pytest.raises(ValueError, match=r"batch_offset=\[5, 2\] must be the running sum .*, \[15, 19\]"):
        check(f, g, f_len, g_len, f_len, packed_rows=19)
    with pytest.raises(ValueError, match="more rows than the 18 that are packed"):
        check(f, g, f_len, g_len, torch.tensor([15, 19]), packed_rows=18)
