"""The attention modules: every flag against the reference, upstream's parameters, refusals, torch.compile."""

import math

import pytest
import torch
from torch import Tensor, nn

from apex.contrib.multihead_attn import EncdecMultiheadAttn, SelfMultiheadAttn
from apex.contrib.multihead_attn.encdec_multihead_attn_func import encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_func import fast_encdec_attn_func
from apex.contrib.multihead_attn.fast_encdec_multihead_attn_norm_add_func import fast_encdec_attn_norm_add_func
from apex.contrib.multihead_attn.fast_self_multihead_attn_func import fast_self_attn_func
from apex.contrib.multihead_attn.fast_self_multihead_attn_norm_add_func import fast_self_attn_norm_add_func
from apex.contrib.multihead_attn.self_multihead_attn_func import self_attn_func
from apex.ops import _library
from apex.ops._tolerance import excess_of_norm
from apex.ops.multihead import Mask, MaskKind
from tests.ops.multihead import exact
from tests.ops.multihead.cases import make_mask
from tests.support.harness import Route, assert_close, assert_equal_bits, routes

LENGTH, KEYS, BATCH, HEADS, WIDTH = 6, 9, 3, 2, 16


def with_random_parameters(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.25)
    return module


def arguments(mask: Mask | None) -> dict:
    if mask is None:
        return {}
    if mask.kind is MaskKind.CAUSAL:
        return {"attn_mask": "causal"}
    return {"attn_mask" if mask.kind is MaskKind.TIME else "key_padding_mask": mask.tensor}


def expected_self(module: SelfMultiheadAttn, x: Tensor, mask: Mask | None) -> Tensor:
    """Compute self attention by the reference, from the module's parameters in upstream's layout."""
    parameters = dict(module.named_parameters())
    if module.separate_qkv_params:
        by_head = [parameters[f"{name}_weight"].view(HEADS, -1, WIDTH) for name in "qkv"]
        weight = torch.stack(by_head, 1).reshape(3 * WIDTH, WIDTH)
        bias = None
        if module.bias:
            bias = torch.stack([parameters[f"{name}_bias"].view(HEADS, -1) for name in "qkv"], 1).reshape(-1)
    else:
        weight, bias = parameters["in_proj_weight"], parameters.get("in_proj_bias")
    weights, biases = (weight, module.out_proj_weight), (bias, module.out_proj_bias)
    attended = exact.attention([expected_norm(module, x)], weights, biases, HEADS, mask)
    return x + attended if module.include_norm_add else attended


def expected_norm(module: nn.Module, x: Tensor) -> Tensor:
    if not module.include_norm_add:
        return x
    fast = module.impl == "fast"
    gamma = module.lyr_nrm_gamma_weights if fast else module.lyr_nrm.weight
    beta = module.lyr_nrm_beta_weights if fast else module.lyr_nrm.bias
    return nn.functional.layer_norm(x, (WIDTH,), gamma, beta, 1e-5)


def assert_right(output: Tensor, expected: Tensor, leaves: list) -> None:
    """Compare values and gradients in float64."""
    dy = torch.randn_like(output)
    actual = torch.autograd.grad(output, leaves, dy)
    wanted = torch.autograd.grad(expected, leaves, dy)
    for a, e in zip((output, *actual), (expected, *wanted), strict=True):
        assert_close(a, e)


@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm_add", [False, True])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "time", "causal"])
def test_self_attention(impl: str, bias: bool, norm_add: bool, separate: bool, kind: str) -> None:
    module = SelfMultiheadAttn(
        WIDTH, HEADS, bias=bias, include_norm_add=norm_add, impl=impl, separate_qkv_params=separate
    )
    with_random_parameters(module).double()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = make_mask(kind, LENGTH, LENGTH, BATCH, "cpu", blind=True)
    output, weights = module(x, x, x, need_weights=True, **arguments(mask))
    assert weights is None
    assert output.is_contiguous()
    assert_right(output, expected_self(module, x, mask), [x, *module.parameters()])


@pytest.mark.parametrize(("impl", "bias"), [("fast", True), ("default", True), ("default", False)])
def test_additive_mask(impl: str, bias: bool) -> None:
    module = with_random_parameters(SelfMultiheadAttn(WIDTH, HEADS, bias=bias, impl=impl, mask_additive=True)).double()
    x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    mask = make_mask("additive", LENGTH, LENGTH, BATCH, "cpu")
    mask = Mask(mask.kind, mask.tensor.double())
    output, _ = module(x, x, x, key_padding_mask=mask.tensor)
    assert_right(output, expected_self(module, x, mask), [x, *module.parameters()])
    unmasked, _ = module(x, x, x)
    assert_right(unmasked, expected_self(module, x, None), [x, *module.parameters()])


@pytest.mark.parametrize(("impl", "bias"), [("fast", False), ("default", False), ("default", True)])
@pytest.mark.parametrize("norm_add", [False, True])
@pytest.mark.parametrize("kind", ["none", "padding", "time", "causal"])
def test_encdec_attention(impl: str, bias: bool, norm_add: bool, kind: str) -> None:
    module = EncdecMultiheadAttn(WIDTH, HEADS, bias=bias, include_norm_add=norm_add, impl=impl)
    with_random_parameters(module).double()
    query, key = (torch.randn(n, BATCH, WIDTH, dtype=torch.float64, requires_grad=True) for n in (LENGTH, KEYS))
    mask = make_mask(kind, LENGTH, KEYS, BATCH, "cpu", blind=True)
    output, weights = module(query, key, key, **arguments(mask))
    assert weights is None
    expected = exact.attention(
        (expected_norm(module, query), key),
        (module.in_proj_weight_q, module.in_proj_weight_kv, module.out_proj_weight),
        (module.in_proj_bias_q, module.in_proj_bias_kv, module.out_proj_bias),
        HEADS,
        mask,
    )
    if norm_add:
        expected = query + expected
    assert_right(output, expected, [query, key, *module.parameters()])


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize("encdec", [False, True])
def test_half_precision_with_norm_and_mask(route: Route, dtype: torch.dtype, impl: str, encdec: bool) -> None:
    kind = EncdecMultiheadAttn if encdec else SelfMultiheadAttn
    module = with_random_parameters(kind(WIDTH, HEADS, include_norm_add=True, impl=impl)).to(route.device, dtype)
    wide = kind(WIDTH, HEADS, include_norm_add=True, impl="default").double()
    wide.load_state_dict(module.state_dict() if impl == "default" else as_default(module.state_dict()))
    x, other = (torch.randn(n, BATCH, WIDTH, device=route.device, dtype=dtype) for n in (LENGTH, KEYS))
    keys = KEYS if encdec else LENGTH
    hidden = (torch.rand(BATCH, keys) > 0.5).byte()
    x.requires_grad_()
    x_wide = x.detach().cpu().double().requires_grad_()
    with _library.implementation(route.implementation):
        output, _ = module(x, other, other, key_padding_mask=hidden.to(route.device))
        dy = torch.randn_like(output)
        gradients = torch.autograd.grad(output, [x, *module.parameters()], dy)
    with _library.implementation("torch"):
        expected, _ = wide(x_wide, other.cpu().double(), None, key_padding_mask=hidden)
        wanted = torch.autograd.grad(expected, [x_wide, *wide.parameters()], dy.cpu().double())
    assert output.dtype == dtype
    by_name = dict(zip(["x", *as_default(dict(module.named_parameters()))], gradients, strict=True))
    expected_by_name = dict(zip(["x", *dict(wide.named_parameters())], wanted, strict=True))
    assert excess_of_norm(output.detach().cpu(), expected.detach()) <= 4
    for name, gradient in by_name.items():
        assert excess_of_norm(gradient.cpu(), expected_by_name[name]) <= 4, name


def as_default(state: dict) -> dict:
    """Return the step-by-step module's names of the layer norm's parameters."""
    names = {"lyr_nrm_gamma_weights": "lyr_nrm.weight", "lyr_nrm_beta_weights": "lyr_nrm.bias"}
    return {names.get(name, name): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (SelfMultiheadAttn(8, 2), ["in_proj_weight 24 8", "out_proj_weight 8 8"]),
        (
            SelfMultiheadAttn(8, 2, bias=True, include_norm_add=True),
            ["in_proj_weight 24 8", "out_proj_weight 8 8", "in_proj_bias 24", "out_proj_bias 8",
             "lyr_nrm_gamma_weights 8", "lyr_nrm_beta_weights 8"],
        ),
        (
            SelfMultiheadAttn(8, 2, bias=True, impl="default", include_norm_add=True, separate_qkv_params=True),
            ["q_weight 8 8", "k_weight 8 8", "v_weight 8 8", "out_proj_weight 8 8", "q_bias 8", "k_bias 8", "v_bias 8",
             "out_proj_bias 8", "lyr_nrm.weight 8", "lyr_nrm.bias 8"],
        ),
        (
            EncdecMultiheadAttn(8, 2, include_norm_add=True),
            ["in_proj_weight_q 8 8", "in_proj_weight_kv 16 8", "out_proj_weight 8 8", "lyr_nrm_gamma_weights 8",
             "lyr_nrm_beta_weights 8"],
        ),
        (
            EncdecMultiheadAttn(8, 2, bias=True, impl="default"),
            ["in_proj_weight_q 8 8", "in_proj_weight_kv 16 8", "out_proj_weight 8 8", "in_proj_bias_q 8",
             "in_proj_bias_kv 16", "out_proj_bias 8"],
        ),
    ],
    ids=["self", "self norm", "self separate", "encdec norm", "encdec bias"],
)  # fmt: skip
def test_state_dicts_are_upstreams(module: nn.Module, names: list[str]) -> None:
    state = module.state_dict()
    assert [" ".join([name, *map(str, tensor.shape)]) for name, tensor in state.items()] == names


def test_initial_parameters_are_upstreams() -> None:
    """They are drawn in upstream's order, so that a seed gives upstream's model."""
    torch.manual_seed(7)
    module = SelfMultiheadAttn(8, 2, bias=True, include_norm_add=True)
    torch.manual_seed(7)
    packed = nn.init.xavier_uniform_(torch.empty(24, 8), gain=math.sqrt(2))
    assert_equal_bits([module.in_proj_weight.detach()], [packed])
    assert_equal_bits([module.out_proj_weight.detach()], [nn.init.xavier_uniform_(torch.empty(8, 8))])
    assert module.in_proj_bias.eq(0).all()
    assert module.out_proj_bias.eq(0).all()
    assert module.lyr_nrm_gamma_weights.eq(1).all()
    assert module.lyr_nrm_beta_weights.eq(0).all()
    torch.manual_seed(7)
    module = EncdecMultiheadAttn(8, 2)
    torch.manual_seed(7)
    assert_equal_bits([module.in_proj_weight_q.detach()], [nn.init.xavier_uniform_(torch.empty(8, 8))])
    packed = nn.init.xavier_uniform_(torch.empty(16, 8), gain=math.sqrt(1.5))
    assert_equal_bits([module.in_proj_weight_kv.detach()], [packed])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="embed_dim=10 must be divisible by num_heads=4"):
        SelfMultiheadAttn(10, 4)
    with pytest.raises(ValueError, match=r"dropout=1\.5 must be at least 0 and less than 1"):
        SelfMultiheadAttn(8, 2, dropout=1.5)
    with pytest.raises(ValueError, match="impl='slow' is not known"):
        EncdecMultiheadAttn(8, 2, impl="slow")
    with pytest.raises(ValueError, match="bias=True is not supported with impl='fast'"):
        EncdecMultiheadAttn(8, 2, bias=True)
    with pytest.raises(ValueError, match="not supported with include_norm_add=True"):
        SelfMultiheadAttn(8, 2, bias=True, include_norm_add=True, mask_additive=True)
    with pytest.raises(ValueError, match="needs bias=True with impl='fast'"):
        SelfMultiheadAttn(8, 2, mask_additive=True)
    x, mask, square = torch.randn(4, 3, 8), torch.zeros(3, 4, dtype=torch.uint8), torch.zeros(4, 4)
    for module in (SelfMultiheadAttn(8, 2), SelfMultiheadAttn(8, 2, impl="default"), EncdecMultiheadAttn(8, 2)):
        with pytest.raises(ValueError, match="cannot both be given"):
            module(x, x, x, key_padding_mask=mask, attn_mask=square)
        with pytest.raises(ValueError, match=r"expected \[batch, keys\] = \[3, 4\]"):
            module(x, x, x, key_padding_mask=square)
        with pytest.raises(ValueError, match="must be a tensor or 'causal'"):
            module(x, x, x, attn_mask="past")
        with pytest.raises(ValueError, match=r"expected \[length, batch, embed_dim\]"):
            module(x[0], x[0], x[0])
    additive = SelfMultiheadAttn(8, 2, bias=True, mask_additive=True)
    with pytest.raises(ValueError, match="takes a key_padding_mask, not an attn_mask"):
        additive(x, x, x, attn_mask=square)
    with pytest.raises(TypeError, match=r"must be floating-point, got torch\.uint8"):
        additive(x, x, x, key_padding_mask=mask)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("impl", ["fast", "default"])
def test_dropout_follows_is_training_and_the_generator(route: Route, impl: str) -> None:
    module = SelfMultiheadAttn(WIDTH, HEADS, dropout=0.4, include_norm_add=True, impl=impl).to(route.device)
    x = torch.randn(LENGTH, BATCH, WIDTH, device=route.device)
    with _library.implementation(route.implementation), torch.no_grad():
        state = torch.cuda.get_rng_state() if route.device == "cuda" else torch.get_rng_state()
        first, other = module(x, x, x)[0], module.eval()(x, x, x)[0]
        (torch.cuda.set_rng_state if route.device == "cuda" else torch.set_rng_state)(state)
        assert_equal_bits([module(x, x, x)[0]], [first])
        assert not torch.equal(first, other)
        still = [module(x, x, x, is_training=False)[0] for _ in range(2)]
        assert_equal_bits(still[:1], still[1:])
        module.dropout = 0.0
        assert_equal_bits(still[:1], [module(x, x, x)[0]])


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_autocast(impl: str) -> None:
    for module in (SelfMultiheadAttn(WIDTH, HEADS, impl=impl), EncdecMultiheadAttn(WIDTH, HEADS, impl=impl)):
        x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
        expected = torch.autograd.grad(module(x, x, x)[0].square().sum(), [x, *module.parameters()])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = module(x, x, x)
        assert output.dtype == torch.bfloat16
        gradients = torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])
        for actual, wanted in zip(gradients, expected, strict=True):
            assert actual.dtype == torch.float32
            assert (actual - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_autocast_leaves_float64_alone(impl: str) -> None:
    for kind in (SelfMultiheadAttn, EncdecMultiheadAttn):
        module = kind(WIDTH, HEADS, impl=impl).double()
        x = torch.randn(LENGTH, BATCH, WIDTH, dtype=torch.float64)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, _ = module(x, x, x)
        assert_equal_bits([output.detach()], [module(x, x, x)[0].detach()])


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_a_mask_has_no_gradient(impl: str) -> None:
    module = SelfMultiheadAttn(WIDTH, HEADS, bias=True, impl=impl, mask_additive=True)
    x, mask = torch.randn(LENGTH, BATCH, WIDTH), torch.randn(BATCH, LENGTH, requires_grad=True)
    output, _ = module(x, x, x, key_padding_mask=mask)
    assert torch.autograd.grad(output.sum(), mask, allow_unused=True) == (None,)


# Queries, keys, batch, embedding, heads.
SMALLEST = [(1, 1, 1, 1, 1), (1, 4, 1, 4, 4), (3, 1, 2, 4, 2), (0, 3, 2, 4, 2), (3, 0, 2, 4, 2), (3, 3, 0, 4, 2)]


@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize("norm_add", [False, True])
@pytest.mark.parametrize("shape", SMALLEST, ids=str)
def test_sizes_of_one_and_none(impl: str, norm_add: bool, shape: tuple) -> None:
    """Without keys attention gives zeros."""
    queries, keys, batch, width, heads = shape
    module = EncdecMultiheadAttn(width, heads, dropout=0.5, include_norm_add=norm_add, impl=impl).double()
    query, key = (torch.randn(n, batch, width, dtype=torch.float64, requires_grad=True) for n in (queries, keys))
    normed = nn.functional.layer_norm(query, (width,)) if norm_add else query
    weights = module.in_proj_weight_q, module.in_proj_weight_kv, module.out_proj_weight
    expected = torch.zeros_like(query)
    if query.numel() and keys:
        expected = exact.attention([normed, key], weights, [None] * 3, heads)
    still, _ = module(query, key, key, is_training=False)
    torch.testing.assert_close(still, query + expected if norm_add else expected)
    dropped, _ = module(query, key, key)
    assert dropped.shape == query.shape
    for output in (still, dropped):
        gradients = torch.autograd.grad(output.sum(), [query, key, *module.parameters()])
        assert all(gradient.isfinite().all() for gradient in (output, *gradients))


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_residual_keeps_its_dtype_under_autocast(impl: str) -> None:
    module = SelfMultiheadAttn(WIDTH, HEADS, dropout=0.1, include_norm_add=True, impl=impl)
    x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, _ = module(x, x, x)
    assert output.dtype == torch.float32
    assert torch.autograd.grad(output.sum(), x)[0].isfinite().all()


def test_transposed_input() -> None:
    module = SelfMultiheadAttn(WIDTH, HEADS, impl="default")
    fast = SelfMultiheadAttn(WIDTH, HEADS)
    fast.load_state_dict(module.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH).transpose(0, 1)
    expected, _ = fast(x.contiguous(), None, None)
    for each in (module, fast):
        torch.testing.assert_close(each(x, None, None)[0], expected)


@pytest.mark.parametrize("route", routes(interpreter=False))
@pytest.mark.parametrize("impl", ["fast", "default"])
def test_compiled_without_graph_breaks(route: Route, impl: str) -> None:
    module = SelfMultiheadAttn(WIDTH, HEADS, bias=True, include_norm_add=True, impl=impl).to(route.device)
    x = torch.randn(LENGTH, BATCH, WIDTH, device=route.device, requires_grad=True)
    mask = make_mask("padding", LENGTH, LENGTH, BATCH, route.device).tensor
    inputs = (x, *module.parameters())
    backend = "inductor" if route.device == "cuda" else "aot_eager"
    with _library.implementation(route.implementation):
        torch._dynamo.reset()
        expected, _ = module(x, x, x, key_padding_mask=mask)
        wanted = torch.autograd.grad(expected.sin().sum(), inputs)
        compiled, _ = torch.compile(module, fullgraph=True, backend=backend)(x, x, x, key_padding_mask=mask)
        gradients = torch.autograd.grad(compiled.sin().sum(), inputs)
    # The generated code sums in another order.
    for actual, each in zip((compiled, *gradients), (expected, *wanted), strict=True):
        torch.testing.assert_close(actual, each, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("impl", ["fast", "default"])
def test_compiled_with_dropout(impl: str) -> None:
    module = EncdecMultiheadAttn(WIDTH, HEADS, dropout=0.5, include_norm_add=True, impl=impl)
    x, key = (torch.randn(n, BATCH, WIDTH, requires_grad=True) for n in (LENGTH, KEYS))
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    output, _ = compiled(x, key, key, attn_mask="causal")
    assert not torch.equal(output, compiled(x, key, key, attn_mask="causal")[0])
    gradients = torch.autograd.grad(output.sum(), [x, key, *module.parameters()])
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("time_mask", [False, True])
def test_functions_by_name(time_mask: bool) -> None:
    """Each function, called with upstream's positional arguments, equals its module."""
    x, kv = (torch.randn(n, BATCH, WIDTH, dtype=torch.float64, requires_grad=True) for n in (LENGTH, LENGTH))
    mask = make_mask("time" if time_mask else "padding", LENGTH, LENGTH, BATCH, "cpu")
    given = arguments(mask)
    for norm_add in (False, True):
        fast = with_random_parameters(SelfMultiheadAttn(WIDTH, HEADS, include_norm_add=norm_add)).double()
        encdec = with_random_parameters(EncdecMultiheadAttn(WIDTH, HEADS, include_norm_add=norm_add)).double()
        w, o = fast.in_proj_weight, fast.out_proj_weight
        wq, wkv, wo = encdec.in_proj_weight_q, encdec.in_proj_weight_kv, encdec.out_proj_weight
        scale = (WIDTH // HEADS) ** -0.5
        head = (time_mask, True, HEADS)
        if norm_add:
            norm = fast.lyr_nrm_gamma_weights, fast.lyr_nrm_beta_weights
            other_norm = encdec.lyr_nrm_gamma_weights, encdec.lyr_nrm_beta_weights
            ours = [fast_self_attn_norm_add_func(*head, x, *norm, w, o, mask.tensor, 0.0)]
            others = [fast_encdec_attn_norm_add_func(*head, x, kv, *other_norm, wq, wkv, wo, mask.tensor, 0.0)]
        else:
            none = (None, None)
            ours = [
                fast_self_attn_func(*head, x, w, o, *none, mask.tensor, False, 0.0),
                self_attn_func(*head, scale, x, w, o, *none, mask.tensor, False, 0.0),
            ]
            others = [
                fast_encdec_attn_func(*head, x, kv, wq, wkv, wo, mask.tensor, 0.0),
                encdec_attn_func(*head, scale, x, kv, wq, wkv, wo, None, *none, mask.tensor, 0.0),
            ]
        for output in ours:
            expected, _ = fast(x, x, x, **given)
            assert_right(output, expected, [x, *fast.parameters()])
        for output in others:
            expected, _ = encdec(x, kv, kv, **given)
            assert_right(output, expected, [x, kv, *encdec.parameters()])


def test_a_functions_graph_can_be_used_twice_with_retain_graph() -> None:
    x = torch.randn(LENGTH, BATCH, WIDTH, requires_grad=True)
    module = SelfMultiheadAttn(WIDTH, HEADS)
    weights = module.in_proj_weight, module.out_proj_weight, None, None
    output = fast_self_attn_func(False, True, HEADS, x, *weights, None, False, 0.0)
    first = torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert_equal_bits(torch.autograd.grad(output.sum(), x), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output.sum(), x)
