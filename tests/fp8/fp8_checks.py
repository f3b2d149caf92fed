"""Checks of float8 layers that run in two processes."""

from __future__ import annotations

import copy
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from apex import fp8
from apex.fp8.gather import GatheredWeight
from apex.transformer import parallel_state, tensor_parallel
from apex.transformer.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def tensor_parallel_layers(rank: int) -> None:
    """Split layers in float8 are close to the whole in float32, forward and backward, with sequence parallelism too."""
    parallel_state.initialize_model_parallel(2)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    try:
        for sequence in (False, True):
            torch.manual_seed(1)
            first, second = torch.randn(128, 64) / 8, torch.randn(64, 128) / 11
            options = {"bias": False, "sequence_parallel_enabled": sequence}
            layers = nn.Sequential(
                ColumnParallelLinear(
                    64, 128, gather_output=False, no_async_tensor_model_parallel_allreduce=sequence, **options
                ),
                RowParallelLinear(128, 64, input_is_parallel=True, **options),
            )
            with torch.no_grad():
                layers[0].weight.copy_(first.chunk(2, 0)[rank])
                layers[1].weight.copy_(second.chunk(2, 1)[rank])
            assert not any(row.reason for row in fp8.convert(layers, smallest_weight=0, emulate=True))
            whole = torch.randn(32, 64)
            x = (whole.chunk(2, 0)[rank] if sequence else whole).clone().requires_grad_()
            hidden, _ = layers[0](x)
            output, _ = layers[1](hidden)
            output.sum().backward()
            wide = whole.clone().requires_grad_()
            w1, w2 = first.clone().requires_grad_(), second.clone().requires_grad_()
            expected = F.linear(F.linear(wide, w1), w2)
            expected.sum().backward()
            mine = expected.chunk(2, 0)[rank] if sequence else expected
            dx = wide.grad.chunk(2, 0)[rank] if sequence else wide.grad
            for name, found, exact in (
                ("output", output, mine),
                ("dx", x.grad, dx),
                ("dw1", layers[0].weight.grad, w1.grad.chunk(2, 0)[rank]),
                ("dw2", layers[1].weight.grad, w2.grad.chunk(2, 1)[rank]),
            ):
                error = float((found - exact).norm() / exact.norm())
                assert error < 0.1, (sequence, name, error)
                assert error > 0, (sequence, name)
            fp8.revert(layers)
            again, _ = layers[1](layers[0](x)[0])
            torch.testing.assert_close(again, mine, rtol=1e-4, atol=1e-4)
    finally:
        parallel_state.destroy_model_parallel()


def fully_sharded(rank: int) -> None:
    """Check that float8 products under FSDP2 equal one process's, and that its checkpoint is ordinary."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    fp8.convert(model, "rowwise", smallest_weight=0, emulate=True)
    alone = copy.deepcopy(model)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    x = torch.randn(32, 64)
    expected, found = alone(x), model(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, msg=name)
    whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).load_state_dict(whole)


def gathered_in_float8(rank: int) -> None:
    """Check that weights gathered as float8 blocks give the bits of weights that are gathered and then cast.

    The first weight has shards of 128 rows, the second of 64, which are gathered as usual. If weights are gathered in
    bfloat16, they are rounded twice; float8 blocks are cast from float32.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for dtype in (None, torch.bfloat16):
        results = []
        for gathers in (False, True):
            torch.manual_seed(1)
            model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
            options = {"float8_all_gather": gathers, "power_of_2": True}
            fp8.convert(model, "blockwise", smallest_weight=0, emulate=True, **options)
            kinds = {}
            for layer in (model[0], model[2]):
                layer.register_forward_hook(lambda layer, *_, kinds=kinds: kinds.update({layer: type(layer.weight)}))
            for layer in (model[0], model[2], model):
                fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            x = torch.randn(128, 128, generator=torch.Generator().manual_seed(rank))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                for _ in range(3):
                    loss = model(x).float().square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            reasons = {str(each.message) for each in told if "gathered" in str(each.message)}
            assert len(reasons) == gathers, reasons
            assert all("128 x 256 is gathered in torch." in reason and "2 ranks" in reason for reason in reasons)
            assert (kinds[model[0]] is GatheredWeight, kinds[model[2]] is GatheredWeight) == (gathers, False)
            usual = model(x[:5]).detach()  # too few rows for float8
            state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)).load_state_dict(state)
            assert all(type(tensor) is torch.Tensor for tensor in state.values())
            results.append([loss.detach(), *state.values()])
            assert usual.isfinite().all()
        for usual, gathered in zip(*results, strict=True):
            if dtype is None:
                assert torch.equal(gathered, usual)
        torch.testing.assert_close(results[1][0], results[0][0], rtol=0.02, atol=0)


CHECKS = {check.__name__: check for check in (tensor_parallel_layers, fully_sharded, gathered_in_float8)}
