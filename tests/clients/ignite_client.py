"""pytorch-ignite: supervised training with `amp_mode="apex"`."""

import torch
from checks import falls, run
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError

from apex import amp
from apex.optimizers import FusedAdam


def check_supervised_trainer() -> str:
    """`create_supervised_trainer(..., amp_mode="apex")` with gradient accumulation, at O1 and O2"""
    outcomes = []
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        inputs = torch.randn(64, 8)
        batches = [(part, part[:, :2] * 2) for part in inputs.split(16)]
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        optimizer = FusedAdam(model.parameters(), lr=2e-2)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        loss_function = torch.nn.MSELoss()
        trainer = create_supervised_trainer(
            model, optimizer, loss_function, device="cpu", amp_mode="apex", gradient_accumulation_steps=2
        )
        losses = []
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine, to=losses: to.append(engine.state.output))
        trainer.run(batches, max_epochs=15)
        evaluator = create_supervised_evaluator(model, metrics={"mse": MeanSquaredError()}, device="cpu")
        assert evaluator.run(batches).metrics["mse"] < losses[0]
        outcomes.append(f"{level}: {falls(losses, 'iterations')}")
        amp.shutdown()
    return "; ".join(outcomes)


run(__name__, "pytorch-ignite")
