"""megatron-core: its layer norms, its gradient clipping and its optimizers on apex."""

import torch
from checks import falls, run
from megatron.core import optimizer
from megatron.core.fusions import fused_layer_norm
from megatron.core.optimizer import clip_grads
from megatron.core.transformer.transformer_config import TransformerConfig

import amp_C
import apex


def check_layer_norms() -> str:
    """`FusedLayerNorm`, persistent (`FastLayerNormFN`) and not (`FusedLayerNormAffineFunction`), with its options"""
    assert fused_layer_norm.HAVE_FUSED_LAYER_NORM
    assert fused_layer_norm.HAVE_PERSIST_LAYER_NORM
    count = 0
    for hidden, persist in ((1024, True), (96, False)):
        for zero_centered in (False, True):
            for memory_efficient in (False, True):
                config = TransformerConfig(
                    num_layers=1, hidden_size=hidden, num_attention_heads=1, persist_layer_norm=persist,
                    layernorm_zero_centered_gamma=zero_centered, memory_efficient_layer_norm=memory_efficient,
                )  # fmt: skip
                norm = fused_layer_norm.FusedLayerNorm(config, hidden)
                assert norm.persist_layer_norm == persist
                x = torch.randn(4, 2, hidden, requires_grad=True)
                y = norm(x)
                assert y._base is None
                grads = torch.autograd.grad(y.square().sum() + y.sum(), [x, norm.weight, norm.bias])
                weight = torch.ones(hidden, requires_grad=True)
                bias = torch.zeros(hidden, requires_grad=True)
                expected = torch.nn.functional.layer_norm(x, (hidden,), weight, bias, norm.eps)
                expected_grads = torch.autograd.grad(expected.square().sum() + expected.sum(), [x, weight, bias])
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-3)
                count += 1
    return f"{count} configurations: outputs and gradients equal PyTorch's"


def check_optimizers() -> str:
    """`megatron.core.optimizer`'s Adam and SGD, and the functions of `amp_C` in `clip_grads`"""
    assert optimizer.Adam is apex.optimizers.FusedAdam
    assert optimizer.SGD is apex.optimizers.FusedSGD
    assert clip_grads.l2_norm_impl is amp_C.multi_tensor_l2norm
    assert clip_grads.multi_tensor_scale_impl is amp_C.multi_tensor_scale
    inputs = torch.randn(64, 8)
    model = torch.nn.Linear(8, 2)
    adam = optimizer.Adam(model.parameters(), lr=5e-2, weight_decay=0.0)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :2])
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return falls(losses)


def check_gradient_norm() -> str:
    """`clip_grads.get_grad_norm_fp32` and `clip_grad_by_total_norm_fp32` in a process group"""
    if not torch.cuda.is_available():
        return "not run: megatron-core puts its overflow flag on a GPU"
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parameters = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in (5, 7)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in parameters]
    expected = torch.cat(gradients).norm().item()
    norm = clip_grads.get_grad_norm_fp32(gradients, grad_stats_parallel_group=torch.distributed.group.WORLD)
    assert abs(norm - expected) < 1e-5 * expected
    clip_grads.clip_grad_by_total_norm_fp32(parameters, 1.0, norm)
    assert abs(torch.cat([parameter.grad for parameter in parameters]).norm().item() - 1.0) < 1e-4
    torch.distributed.destroy_process_group()
    return f"norm {norm:.4f}, clipped to 1"


run(__name__, "megatron-core")
