"""Split models in four processes: with replicas, with layers and stages split at once, and with experts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from apex.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, MoeHybridParallelPlugin, TorchDDPPlugin
from apex.transformer import parallel_state
from apex.transformer.context_parallel import get_batch_on_this_cp_rank
from apex.transformer.testing.standalone_gpt import GPTModel
from apex.transformer.testing.standalone_transformer_lm import TransformerConfig
from tests.booster.hybrid_checks import equality
from tests.booster.problem import booster as make
from tests.booster.process_checks import ended
from tests.parallel.processes import Check


class Mixture(nn.Module):
    """A model of a dense weight that all ranks share and an expert; the gradient of both is x."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.dense = nn.Parameter(torch.zeros(2))
        self.expert = nn.Parameter(torch.full((2,), float(rank)))
        self.expert.allreduce = False

    def forward(self, x: Tensor) -> Tensor:
        return (x * (self.dense + self.expert)).sum()


def experts(rank: int) -> None:
    """Train two experts on two ranks each: gradients are summed over both ranks and divided by four."""
    gradients = (1 + 3) / 4, (2 + 4) / 4
    norm = (2 * (2.5**2 + gradients[0] ** 2 + gradients[1] ** 2)) ** 0.5
    saved = "experts.pt"  # in the folder of the run
    for zero_stage in (0, 1, 2):
        with ended():
            booster = make(
                plugin=MoeHybridParallelPlugin(1, 1, 2, precision="fp32", max_norm=1e9, zero_stage=zero_stage)
            )
            mixture = Mixture(rank)
            optimizer = torch.optim.SGD(mixture.parameters(), lr=1.0, momentum=0.5)
            model, optimizer, *_ = booster.boost(mixture, optimizer)
            assert mixture.expert.tolist() == [float(rank % 2)] * 2  # of the first rank that holds this expert
            booster.backward(model(torch.full((2,), rank + 1.0)), optimizer)
            optimizer.step()
            assert mixture.dense.tolist() == [-2.5] * 2
            assert mixture.expert.tolist() == [rank % 2 - gradients[rank % 2]] * 2
            assert float(optimizer.get_grad_norm()) == pytest.approx(norm)
            booster.save_optimizer(optimizer, saved)
            state = torch.load(saved)["state"]
            assert state[0]["momentum_buffer"].tolist() == [2.5] * 2
            assert state[1]["momentum_buffer"].tolist() == [gradients[0]] * 2 + [gradients[1]] * 2
            optimizer.zero_grad()
            booster.load_optimizer(optimizer, saved)
            booster.backward(model(torch.full((2,), rank + 1.0)), optimizer)
            assert float(optimizer.clip_grad_by_norm(1e9)) == pytest.approx(norm)
            optimizer.step()
            assert mixture.expert.tolist() == [rank % 2 - 2.5 * gradients[rank % 2]] * 2
            if zero_stage:
                with pytest.raises(RuntimeError, match=r"booster.save_optimizer"):
                    optimizer.unwrap().sharded_state_dict()
            dist.barrier()
    with ended():
        for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin()):
            refused = Mixture(rank)
            with pytest.raises(ValueError, match=r"parameter 1 of shape \(2,\) is an expert.*HybridParallelPlugin"):
                make(plugin=plugin).boost(refused, torch.optim.SGD(refused.parameters(), lr=1.0))
            assert refused.expert.tolist() == [float(rank)] * 2


def _stepped(booster: Any, model: Any, optimizer: Any, words: Tensor) -> None:
    """Train a GPT for two steps on this process's part of the words."""
    part = get_batch_on_this_cp_rank({"words": words[:, :-1], "labels": words[:, 1:]})
    for _ in range(2):
        loss = model(part["words"], labels=part["labels"], reduction="mean")
        loss.backward() if booster is None else booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def context(mode: str, **options: Any) -> Check:
    """Return a check that a GPT whose sequences are split over two processes trains as one process does.

    Without ZeRO it has experts, whose loss is a mean over sequences.
    """
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    experts = {"num_moe_experts": 4, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.5}
    layers = {} if options else {"activation": "swiglu", "moe_ffn_hidden_size": 16, **experts}
    config = TransformerConfig(vocab_size=32, max_position_embeddings=16, **sizes, **layers)  # type: ignore[arg-type]

    def check(rank: int) -> None:
        words = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(1))
        with ended():
            parallel_state.initialize_model_parallel()
            alone = GPTModel(config=config)
            _stepped(None, alone, torch.optim.SGD(alone.parameters(), lr=0.5), words)
        with ended():
            plugin = HybridParallelPlugin(
                precision="fp32", enable_sequence_parallelism=True, sequence_parallelism_mode=mode, sp_size=2, **options
            )
            assert plugin.sp_group.size() == 2
            replicas, replica = plugin.data_place()
            gpt = GPTModel(config=config)
            booster = make(plugin=plugin)
            model, optimizer, *_ = booster.boost(gpt, torch.optim.SGD(gpt.parameters(), lr=0.5))
            exchanges = {each.cp_comm_type for each in gpt.modules() if hasattr(each, "cp_comm_type")}
            assert exchanges == {{"ring_attn": "p2p", "all_to_all": "a2a"}[mode]}
            _stepped(booster, model, optimizer, words.chunk(replicas)[replica])
            for (name, one), other in zip(gpt.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)
            with pytest.raises(ValueError, match="no attention of the model has cp_comm_type"):
                booster.boost(nn.Linear(2, 2))

    return check


CHECKS: dict[str, Check] = {
    "tensor": equality("fp32", tp_size=2),
    "tensor zero": equality("fp16_naive", tp_size=2, zero_stage=1),
    "pipeline": equality("fp16", pp_size=2),
    "pipeline zero": equality("fp16_apex", pp_size=2, zero_stage=1),
    "pipelines outside": equality("fp32", pp_size=2, dp_outside=False),
    "both": equality("bf16", tp_size=2, pp_size=2),
    "four stages": equality("fp8", pp_size=4),
    "experts": experts,
    "ring of keys": context("ring_attn"),
    "exchange of heads": context("all_to_all", zero_stage=1),
}
