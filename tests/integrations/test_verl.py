"""verl's linear_cross_entropy: log-probabilities and entropies as vectors, with their gradients."""

import pytest
import torch
from torch.nn import functional

from apex.integrations import verl


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_log_probs_and_entropies(reduction: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, 7, (2, 3), generator=generator)
    log_probs, entropy = verl.linear_cross_entropy(hidden, weight, labels, 0.7, reduction, None)
    p = functional.linear(hidden, weight).div(0.7).log_softmax(-1).view(6, 7)
    own = p.gather(-1, labels.view(6, 1))[:, 0]
    expected = {"none": own, "sum": own.sum(), "mean": own.mean()}[reduction], -(p.exp() * p).sum(-1)
    torch.testing.assert_close((log_probs, entropy), expected)
    found = torch.autograd.grad(log_probs.sum() + 2 * entropy.sum(), (hidden, weight))
    wanted = torch.autograd.grad(expected[0].sum() + 2 * expected[1].sum(), (hidden, weight))
    torch.testing.assert_close(found, wanted)


def test_an_unknown_reduction_is_refused() -> None:
    with pytest.raises(ValueError, match="reduction 'max' is not known; use none, sum, mean"):
        verl.linear_cross_entropy(torch.ones(1, 2), torch.ones(3, 2), torch.zeros(1).long(), 1.0, "max")
