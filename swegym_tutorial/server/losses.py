"""The three losses, token by token, on tensors of shape (tokens,).

Each is summed by its caller and never averaged: how a batch is normalised is the client's choice, made in its
weights or advantages. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .records import LossName, TrainBatch


@dataclass(frozen=True)
class LossInputs:
    """The arrays of several data behind each other; those that the loss doesn't use are None."""

    weights: torch.Tensor | None
    logprobs: torch.Tensor | None
    advantages: torch.Tensor | None


def token_losses(batch: TrainBatch, logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    """Return each token's loss under the policy's logprobs, float32 (tokens,)."""
    if batch.loss is LossName.CROSS_ENTROPY:
        return -logprobs if given.weights is None else -logprobs * given.weights
    assert given.logprobs is not None and given.advantages is not None
    ratio = torch.exp(logprobs - given.logprobs)
    plain = ratio * given.advantages
    if batch.loss is LossName.IMPORTANCE_SAMPLING:
        return -plain
    clipped = ratio.clamp(batch.clip_low, batch.clip_high) * given.advantages
    return -torch.minimum(plain, clipped)


def clipped_tokens(batch: TrainBatch, logprobs: torch.Tensor, given: LossInputs) -> int:
    """Count the tokens from which ppo's clipping takes the gradient."""
    assert given.logprobs is not None and given.advantages is not None
    ratio = torch.exp(logprobs - given.logprobs)
    above = (ratio > batch.clip_high) & (given.advantages > 0)
    below = (ratio < batch.clip_low) & (given.advantages < 0)
    return int((above | below).sum())
