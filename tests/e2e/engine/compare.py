"""How far one engine's log-probabilities are from those of a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def difference(
    tables: Sequence[np.ndarray], reference: Sequence[np.ndarray], batch: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Of tables [tokens - 1, vocabulary] of log-probabilities: how a prompt's own tokens moved, and the divergence.

    ``worst`` and ``mean`` are absolute differences of the log-probability of the token that follows, in nats;
    ``kl`` the mean Kullback-Leibler divergence from the reference's distribution; ``top1`` the share of positions
    with the same most likely token.
    """
    moved, divergence, same = [], [], []
    for table, other, prompt in zip(tables, reference, batch, strict=True):
        if not len(other):
            continue
        followers = np.asarray(prompt[1:])
        rows = np.arange(len(followers))
        ours, theirs = table.astype(np.float64), other.astype(np.float64)
        moved.append(np.abs(ours[rows, followers] - theirs[rows, followers]))
        divergence.append((np.exp(theirs) * (theirs - ours)).sum(-1))
        same.append(ours.argmax(-1) == theirs.argmax(-1))
    flat = np.concatenate(moved)
    return {
        "worst": float(flat.max()),
        "mean": float(flat.mean()),
        "kl": float(np.concatenate(divergence).mean()),
        "top1": float(np.concatenate(same).mean()),
        "positions": len(flat),
    }


def continuations(texts: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of greedy continuations: how many are the same, how long they agree, and the difference until then."""
    lengths, moved = [], []
    for text, other in zip(texts, reference, strict=True):
        pairs = list(zip(text["tokens"], other["tokens"], strict=True))
        agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        lengths.append(agree / len(pairs))
        moved += [abs(a - b) for a, b in zip(text["logprobs"][:agree], other["logprobs"][:agree], strict=True)]
    return {
        "same": sum(length == 1 for length in lengths),
        "of": len(lengths),
        "agreed": float(np.mean(lengths)),
        "worst": max(moved, default=None),
        "mean": float(np.mean(moved)) if moved else None,
    }
