"""The definitions, written a second time: loops over sequences, frames and tokens, differentiable by autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def joint(f: Tensor, g: Tensor, f_len: Tensor, g_len: Tensor, packed: bool) -> Tensor:
    """f + g of every pair, -1 in the padding or packed."""
    batches, frames, tokens, features = f.shape[0], f.shape[1], g.shape[1], f.shape[2]
    rows = []
    for b in range(batches):
        for t in range(frames):
            for u in range(tokens):
                if t < f_len[b] and u < g_len[b]:
                    rows.append(f[b, t] + g[b, u])
                elif not packed:
                    rows.append(torch.full((features,), -1.0, dtype=f.dtype))
    stacked = torch.stack(rows)
    return stacked if packed else stacked.reshape(batches, frames, tokens, features)


def losses(x: Tensor, label: Tensor, f_len: Tensor, y_len: Tensor, blank: int) -> Tensor:
    """-log of the summed probability of all alignments, from padded logits; node by node along the frames."""
    log_probabilities = x.log_softmax(-1)
    result = []
    for b in range(x.shape[0]):
        frames, labels = int(f_len[b]), int(y_len[b])
        reached: dict[tuple[int, int], Tensor] = {(0, 0): x.new_zeros(())}
        for t in range(frames):
            for u in range(labels + 1):
                ways = []
                if t > 0:
                    ways.append(reached[t - 1, u] + log_probabilities[b, t - 1, u, blank])
                if u > 0:
                    ways.append(reached[t, u - 1] + log_probabilities[b, t, u - 1, int(label[b, u - 1])])
                if ways:
                    reached[t, u] = torch.stack(ways).logsumexp(0)
        result.append(-(reached[frames - 1, labels] + log_probabilities[b, frames - 1, labels, blank]))
    return torch.stack(result)


def pack(padded: Tensor, f_len: Tensor, g_len: Tensor) -> Tensor:
    """The rows of the sequences without the padding."""
    lengths = zip(f_len.tolist(), g_len.tolist(), strict=True)
    return torch.cat([padded[b, :t, :u].reshape(t * u, -1) for b, (t, u) in enumerate(lengths)])
