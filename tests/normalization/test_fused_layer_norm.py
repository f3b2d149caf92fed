"""The norm modules and functions as clients use them."""

import inspect

import pytest
import torch
from torch import nn

from apex.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm, fused_layer_norm
from apex.ops import _library
from tests.support.harness import Route, assert_close, routes

PAIRS = [(FusedLayerNorm, nn.LayerNorm), (FusedRMSNorm, nn.RMSNorm)]
HALVES = [torch.float16, torch.bfloat16]


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [16, (16,), [4, 8], torch.Size([3, 4, 8])])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_torch(route: Route, ours, theirs, shape, affine: bool) -> None:
    fused = ours(shape, elementwise_affine=affine).to(route.device)
    randomise(fused)
    plain = theirs(shape, eps=1e-5, elementwise_affine=affine).to(route.device, torch.float64)
    plain.load_state_dict(fused.state_dict())
    sizes = (16,) if isinstance(shape, int) else tuple(shape)
    x = torch.randn(2, 3, *sizes, device=route.device, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    with _library.implementation(route.implementation):
        output = fused(x)
        output.sin().sum().backward()
    expected = plain(wide)
    expected.sin().sum().backward()
    assert_close(output, expected)
    assert_close(x.grad, wide.grad)
    for (name, mine), (_, other) in zip(fused.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(mine.grad, other.grad, reduction=6, what=name)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_are_interchangeable(ours, theirs, affine: bool) -> None:
    fused, plain = ours((4, 8), elementwise_affine=affine), theirs((4, 8), elementwise_affine=affine)
    assert list(fused.state_dict()) == list(plain.state_dict())
    randomise(plain)
    fused.load_state_dict(plain.state_dict())
    for mine, other in zip(fused.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, other)
    randomise(fused)
    plain.load_state_dict(fused.state_dict())


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("fused", "mixed"), [(FusedLayerNorm, MixedFusedLayerNorm), (FusedRMSNorm, MixedFusedRMSNorm)])
def test_output_dtypes(route: Route, dtype: torch.dtype, fused, mixed) -> None:
    x = torch.randn(4, 32, device=route.device, dtype=dtype)
    with _library.implementation(route.implementation):
        assert fused(32).to(route.device)(x).dtype == dtype
        assert mixed(32).to(route.device)(x).dtype == torch.float32
        assert mixed(32).to(route.device, dtype)(x).dtype == dtype
        assert mixed(32).to(route.device, dtype)(x.float()).dtype == dtype


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
@pytest.mark.parametrize("memory_efficient", [True, False])
def test_autocast_casts_everything(route: Route, dtype: torch.dtype, module, memory_efficient: bool) -> None:
    norm = module(32, memory_efficient=memory_efficient).to(route.device)
    x = torch.randn(4, 32, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        with torch.autocast(route.device, dtype):
            output = norm(x)
        assert output.dtype == dtype
        output.float().sum().backward()
    assert x.grad.dtype == torch.float32
    assert norm.weight.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert FusedLayerNorm(8).double()(torch.randn(2, 8, dtype=torch.float64)).dtype == torch.float64


def test_autocast_for_another_device_changes_nothing() -> None:
    torch.set_autocast_enabled("cuda", True)
    try:
        assert FusedLayerNorm(8)(torch.randn(2, 8)).dtype == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("memory_efficient", [True, False])
def test_memory_efficient_gives_the_same_gradients(memory_efficient: bool) -> None:
    torch.manual_seed(1)
    norm = FusedLayerNorm(32, memory_efficient=memory_efficient)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
    x = torch.randn(5, 32, requires_grad=True)
    norm(x).sin().sum().backward()
    plain = nn.LayerNorm(32).double()
    plain.load_state_dict(norm.state_dict())
    wide = x.detach().double().requires_grad_()
    plain(wide).sin().sum().backward()
    assert_close(x.grad, wide.grad)
    assert_close(norm.weight.grad, plain.weight.grad, reduction=5)


AFFINE = ["input", "weight", "bias", "normalized_shape", "eps", "memory_efficient"]
FUNCTIONS = {
    "FusedLayerNormAffineFunction": AFFINE,
    "FusedLayerNormAffineMixedDtypesFunction": AFFINE,
    "FusedLayerNormFunction": ["input", "normalized_shape", "eps", "memory_efficient"],
    "FusedRMSNormAffineFunction": [name for name in AFFINE if name != "bias"],
    "FusedRMSNormAffineMixedDtypesFunction": [name for name in AFFINE if name != "bias"],
    "FusedRMSNormFunction": ["input", "normalized_shape", "eps", "memory_efficient"],
}


def function_values(device: str, dtype: torch.dtype = torch.float32) -> dict:
    weight = (torch.rand(16, device=device) + 0.5).requires_grad_()
    bias = torch.randn(16, device=device, requires_grad=True)
    x = torch.randn(3, 16, device=device).to(dtype).requires_grad_()
    return {"input": x, "weight": weight, "bias": bias, "normalized_shape": (16,), "eps": 1e-5}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_clients_introspect(function: str) -> None:
    assert inspect.getfullargspec(getattr(fused_layer_norm, function).forward).args[1:] == FUNCTIONS[function]


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [[], [False], [True]])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_clients_apply(function: str, memory_efficient: list, route: Route) -> None:
    arguments = FUNCTIONS[function][:-1]
    mixed = "Mixed" in function
    values = function_values(route.device, torch.bfloat16 if mixed else torch.float32)
    with _library.implementation(route.implementation):
        output = getattr(fused_layer_norm, function).apply(*(values[name] for name in arguments), *memory_efficient)
        tensors = {name: values[name] for name in arguments if isinstance(values[name], torch.Tensor)}
        dy = torch.randn_like(output)
        gradients = torch.autograd.grad(output, list(tensors.values()), dy)
    assert output.dtype == torch.float32
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    if "Layer" in function:
        expected = nn.functional.layer_norm(wide["input"], (16,), wide.get("weight"), wide.get("bias"), 1e-5)
    else:
        expected = nn.functional.rms_norm(wide["input"], (16,), wide.get("weight"), 1e-5)
    assert_close(output, expected)
    wanted = torch.autograd.grad(expected, list(wide.values()), dy.double())
    for name, actual, gradient in zip(tensors, gradients, wanted, strict=True):
        assert actual.dtype == tensors[name].dtype
        assert_close(actual, gradient, reduction=3, what=name)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_functions_check_their_arguments(route: Route, memory_efficient: bool) -> None:
    values = function_values(route.device)
    x, weight, bias = values["input"], values["weight"], values["bias"]
    apply = fused_layer_norm.FusedLayerNormAffineFunction.apply
    rest = (1e-5, memory_efficient)
    with _library.implementation(route.implementation):
        assert apply(x, weight, bias, 16, *rest).shape == x.shape
        with pytest.raises(ValueError, match="trailing dimensions"):
            apply(torch.randn(3, 17, device=route.device), weight, bias, (16,), *rest)
        with pytest.raises(ValueError, match="weight has shape"):
            apply(x, weight[:8], bias, (16,), *rest)
        with pytest.raises(ValueError, match="bias has shape"):
            apply(x, weight, bias[:8], (16,), *rest)
        with pytest.raises(ValueError, match="weight is on"):
            apply(x, weight.detach().to("meta"), bias, (16,), *rest)
        with pytest.raises(TypeError, match="floating-point"):
            apply(x.detach().long(), weight, bias, (16,), *rest)


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm])
def test_an_output_may_be_changed_in_place(route: Route, memory_efficient: bool, module) -> None:
    norm = module(16, memory_efficient=memory_efficient).to(route.device)
    x = torch.randn(3, 16, device=route.device, requires_grad=True)
    with _library.implementation(route.implementation):
        output = norm(x)
        if memory_efficient:  # the output was saved, so autograd must raise instead of using the changed values
            output += 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()
        else:
            output += 1
            output.sum().backward()
            assert x.grad is not None


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("trainable", ["input", "weight", "bias"])
def test_only_one_tensor_requires_a_gradient(route: Route, trainable: str) -> None:
    values = function_values(route.device)
    tensors = {name: values[name].detach().requires_grad_(name == trainable) for name in ("input", "weight", "bias")}
    dy = torch.randn(3, 16, device=route.device)
    with _library.implementation(route.implementation):
        output = fused_layer_norm.fused_layer_norm_affine(*tensors.values(), (16,), 1e-5)
        (gradient,) = torch.autograd.grad(output, tensors[trainable], dy)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    expected = nn.functional.layer_norm(wide["input"], (16,), wide["weight"], wide["bias"], 1e-5)
    assert_close(gradient, torch.autograd.grad(expected, wide[trainable], dy.double())[0], reduction=3)


@pytest.mark.parametrize("route", routes())
def test_weight_and_bias_of_different_dtypes(route: Route) -> None:
    x = torch.randn(3, 16, device=route.device)
    weight, bias = torch.ones(16, device=route.device), torch.ones(16, device=route.device, dtype=torch.float16)
    expected = nn.functional.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-5)
    for implementation in (route.implementation, "auto"):
        with _library.implementation(implementation):
            for memory_efficient in (False, True):
                output = fused_layer_norm.fused_layer_norm_affine(x, weight, bias, (16,), 1e-5, memory_efficient)
                assert_close(output, expected)


@pytest.mark.parametrize("shape", [16, (16,), [16], torch.Size([16]), torch.tensor(16).numpy()[()]])
def test_ways_to_write_a_shape(shape) -> None:
    x = torch.randn(3, 16)
    expected = nn.functional.layer_norm(x, (16,))
    for memory_efficient in (False, True):
        torch.testing.assert_close(fused_layer_norm.fused_layer_norm(x, shape, 1e-5, memory_efficient), expected)


def test_integer_weights_are_refused_for_any_shape() -> None:
    for shape in ((16,), [16], 16):
        with pytest.raises(TypeError, match="weight must be floating-point"):
            fused_layer_norm.fused_rms_norm_affine(torch.randn(3, 16), torch.ones(16, dtype=torch.int32), shape)


def test_functions_default_to_a_smaller_eps() -> None:
    for name in (
        "fused_layer_norm",
        "fused_layer_norm_affine",
        "fused_rms_norm",
        "fused_rms_norm_affine",
        "mixed_dtype_fused_layer_norm_affine",
        "mixed_dtype_fused_rms_norm_affine",
    ):
        assert inspect.signature(getattr(fused_layer_norm, name)).parameters["eps"].default == 1e-6


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.float16])
def test_manual_rms_norm(weight_dtype: torch.dtype | None) -> None:
    x = torch.randn(3, 4, 8, dtype=torch.float16)
    weight = None if weight_dtype is None else torch.rand(4, 8).to(weight_dtype)
    output = fused_layer_norm.manual_rms_norm(x, (4, 8), weight, 1e-5)
    wide_weight = None if weight is None else weight.double()
    expected = nn.functional.rms_norm(x.double(), (4, 8), wide_weight, 1e-5)
    torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3)
    assert output.dtype == (torch.float16 if weight_dtype == torch.float16 else torch.float32)


def test_subclasses_and_reassigned_weights() -> None:
    class Scaled(FusedLayerNorm):
        def forward(self, input):
            return 2 * super().forward(input)

    norm = Scaled(8)
    norm.weight = nn.Parameter(torch.full((8,), 3.0))
    norm.bias = nn.Parameter(torch.ones(8))
    x = torch.randn(4, 8)
    torch.testing.assert_close(norm(x), 2 * (3 * nn.functional.layer_norm(x, (8,)) + 1))
    assert isinstance(norm, FusedLayerNorm)


def test_mixed_norms_need_their_parameters() -> None:
    for mixed in (MixedFusedLayerNorm, MixedFusedRMSNorm):
        assert mixed(8, elementwise_affine=True).weight is not None
        with pytest.raises(RuntimeError, match="elementwise_affine"):
            mixed(8, elementwise_affine=False)


@pytest.mark.parametrize("mixed", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_norms_warn_of_keywords_that_they_ignore(mixed: type) -> None:
    """Upstream ignores unknown keywords, and NeMo passes a misspelt one."""
    with pytest.warns(UserWarning, match=f"{mixed.__name__} ignores momentum, sequence_parallel_enbaled; it takes "):
        norm = mixed(8, 1e-3, sequence_parallel_enbaled=False, momentum=0.1)
    assert norm.eps == 1e-3
    assert norm.weight.shape == (8,)


def test_representation_and_reset() -> None:
    norm = FusedRMSNorm([4, 8], eps=1e-3)
    assert repr(norm) == "FusedRMSNorm((4, 8), eps=0.001, elementwise_affine=True)"
    randomise(norm)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(4, 8))


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("memory_efficient", [False, True])
def test_bad_input_is_refused_in_clear_words(route: Route, memory_efficient: bool) -> None:
    norm = FusedLayerNorm(16, memory_efficient=memory_efficient).to(route.device)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with _library.implementation(route.implementation):
        with pytest.raises(ValueError, match=r"normalized_shape=\[16\] .* \[4, 17\]"):
            norm(torch.randn(4, 17, device=route.device))
        with pytest.raises(TypeError, match=r"floating-point input, got torch\.int64"):
            norm(torch.ones(4, 16, dtype=torch.int64, device=route.device))
        with pytest.raises(ValueError, match=r"weight is on .*, the input on meta"):
            norm(torch.randn(4, 16, device="meta"))
        with pytest.raises(ValueError, match=r"weight has shape \[8\]"):
            fused_layer_norm.fused_rms_norm_affine(
                torch.randn(4, 16, device=route.device),
                torch.ones(8, device=route.device),
                (16,),
                1e-5,
                memory_efficient,
            )
        with pytest.raises(ValueError, match="normalized_shape"):
            fused_layer_norm.fused_layer_norm(torch.randn((), device=route.device), (), 1e-5, memory_efficient)
    for name, value in norm.state_dict().items():
        assert torch.equal(value, before[name])


def test_small_inputs_are_refused_in_the_same_words() -> None:
    with pytest.raises(ValueError, match="trailing dimensions"):
        FusedLayerNorm(16)(torch.randn(4, 17))
    with pytest.raises(ValueError, match="trailing dimensions"):
        FusedRMSNorm(16)(torch.randn(4, 17))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_a_traced_module_follows_its_input(device: str, module) -> None:
    norm = module(16).to(device)
    traced = torch.jit.trace(norm, torch.randn(4, 16, device=device))
    x = torch.randn(7, 16, device=device)
    assert_close(traced(x), norm(x).double())


@pytest.mark.gpu
@pytest.mark.parametrize("module", [FusedLayerNorm, FusedRMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peak_memory_is_no_more_than_torchs(module, dtype: torch.dtype) -> None:
    """The norm stands inside a network, and nothing else needs its input."""

    def peak(norm: nn.Module) -> int:
        source = torch.randn(8192, 4096, device="cuda", dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(source)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        norm(source + 0).backward(gradient)  # the sum hands its gradient on without a copy
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    theirs = nn.LayerNorm if module is FusedLayerNorm else nn.RMSNorm
    plain, saving, torchs = (
        peak(norm.to("cuda", dtype)) for norm in (module(4096), module(4096, memory_efficient=True), theirs(4096))
    )
    tensor_bytes = 8192 * 4096 * dtype.itemsize
    # The price of a deterministic reduction: a row of partial sums per multiprocessor for each parameter.
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    partial_sums = multiprocessors * 4096 * 4 * (2 if module is FusedLayerNorm else 1)
    assert plain <= torchs + partial_sums + 2**20
    assert saving <= plain - tensor_bytes // 2
