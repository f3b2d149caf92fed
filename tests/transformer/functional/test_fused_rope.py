"""The public functions and autograd classes of rotary position embeddings."""

import pytest
import torch

from apex.ops import _library
from apex.ops.rope import RopeSpec
from apex.transformer import functional
from apex.transformer.functional import fused_rope
from tests.ops.rope.cases import plain
from tests.support.harness import Route, assert_close, routes

EDGES = (0, 3, 4, 10)


def problem(device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    angles = torch.rand(10, 1, 1, 16, device=device) * 20
    rows, columns = (torch.rand(1, n, 1, 8, device=device) * 20 for n in (2, 6))
    return {
        "t": torch.randn(10, 3, 4, 16, device=device).to(dtype),
        "packed": torch.randn(10, 4, 16, device=device).to(dtype),
        "images": torch.randn(3, 10, 4, 16, device=device).to(dtype),
        "freqs": angles,
        "cos": angles.cos(),
        "sin": angles.sin(),
        "edges": torch.tensor(EDGES, dtype=torch.int32, device=device),
        "cos_h": rows.cos(),
        "sin_h": rows.sin(),
        "cos_w": columns.cos(),
        "sin_w": columns.sin(),
    }


# Function, its autograd classes, names of its arguments in `problem` (or values), the specification of it.
FUNCTIONS = [
    ("fused_apply_rotary_pos_emb", "FusedRoPEFunc", ("t", "freqs", False), RopeSpec("sbhd")),
    ("fused_apply_rotary_pos_emb", "FusedRoPEFunc", ("t", "freqs", True), RopeSpec("sbhd", True)),
    ("fused_apply_rotary_pos_emb_cached", "FusedRoPECachedFunc", ("t", "cos", "sin", True), RopeSpec("sbhd", True)),
    ("fused_apply_rotary_pos_emb_thd", "FusedRoPETHDFunc", ("packed", "edges", "freqs"), RopeSpec("thd")),
    (
        "fused_apply_rotary_pos_emb_2d",
        "FusedRoPE2DFunc",
        ("images", 2, 5, "cos_h", "sin_h", "cos_w", "sin_w"),
        RopeSpec("image", width=5),
    ),
]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "kind", "names", "spec"), FUNCTIONS)
def test_functions_and_classes(
    function: str, kind: str, names: tuple, spec: RopeSpec, dtype: torch.dtype, route: Route
) -> None:
    tensors = problem(route.device, dtype)
    values = [tensors[name] if isinstance(name, str) else name for name in names]
    t = values[0].requires_grad_()
    tables = [v.double().cpu() for v in values[1:] if isinstance(v, torch.Tensor) and v.is_floating_point()]
    wide = t.detach().double().cpu().requires_grad_()
    expected = plain(wide, tables, spec, EDGES)
    dy = torch.randn_like(t)
    (expected_gradient,) = torch.autograd.grad(expected, wide, dy.double().cpu())
    calls = [getattr(functional, function)]
    calls += [getattr(fused_rope, kind + suffix).apply for suffix in ("", "Apex", "Aiter")]
    with _library.implementation(route.implementation):
        for call in calls:
            output = call(*values)
            (gradient,) = torch.autograd.grad(output, t, dy)
            assert output.dtype == dtype
            assert (output.transpose(0, 1) if spec.swap_memory else output).is_contiguous()
            assert_close(output, expected)
            assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("route", routes())
def test_batch_first(route: Route) -> None:
    tensors = problem(route.device)
    t = tensors["t"].transpose(0, 1).contiguous()
    expected = plain(t.double().cpu(), (tensors["freqs"].double().cpu(),), RopeSpec("bshd"))
    with _library.implementation(route.implementation):
        output = functional.fused_apply_rotary_pos_emb(t, tensors["freqs"], tensor_format="bshd")
        cached = functional.fused_apply_rotary_pos_emb_cached(
            t, tensors["cos"], tensors["sin"], transpose_output_memory=True, tensor_format="bshd"
        )
    assert_close(output, expected)
    assert_close(cached, expected)
    assert output.is_contiguous()
    assert cached.transpose(0, 1).is_contiguous()


def test_bad_arguments() -> None:
    tensors = problem("cpu")
    with pytest.raises(ValueError, match="tensor_format='bhsd' is not known; use sbhd or bshd"):
        functional.fused_apply_rotary_pos_emb(tensors["t"], tensors["freqs"], tensor_format="bhsd")
    tables = [tensors[name] for name in ("cos_h", "sin_h", "cos_w", "sin_w")]
    with pytest.raises(
        ValueError, match=r"t has shape \[3, 10, 4, 16\], expected \[b, img_h \* img_w = 3 \* 5, h, d\]"
    ):
        functional.fused_apply_rotary_pos_emb_2d(tensors["images"], 3, 5, *tables)
    with pytest.raises(ValueError, match="cos_h has 2 positions, the image needs 5"):
        functional.fused_apply_rotary_pos_emb_2d(tensors["images"], 5, 2, *tables)


def test_numpy_like_flags_are_taken() -> None:
    tensors = problem("cpu")
    output = functional.fused_apply_rotary_pos_emb(tensors["t"], tensors["freqs"], torch.tensor(True))
    assert output.transpose(0, 1).is_contiguous()


def test_rocm_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    assert not fused_rope.check_if_rocm_pytorch()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert fused_rope.check_if_rocm_pytorch()
