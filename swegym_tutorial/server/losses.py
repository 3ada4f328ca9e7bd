"""The three losses, token by token, on tensors of shape (tokens,).

Each is summed by its caller and never averaged: how a batch is normalised is the client's choice, made in its
weights or advantages. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .records import LossName, TrainBatch, UserError


@dataclass(frozen=True)
class LossInputs:
    """The arrays of several data behind each other; those that the loss doesn't use are None."""

    weights: torch.Tensor | None
    logprobs: torch.Tensor | None
    advantages: torch.Tensor | None


def token_losses(batch: TrainBatch, logprobs: torch.Tensor, given: LossInputs) -> torch.Tensor:
    """Return each token's loss under the policy's logprobs, float32 (tokens,). Raises UserError as `_ratio` does."""
    if batch.loss is LossName.CROSS_ENTROPY:
        return -logprobs if given.weights is None else -logprobs * given.weights
    ratio, advantages = _ratio(logprobs, given)
    plain = ratio * advantages
    if batch.loss is LossName.IMPORTANCE_SAMPLING:
        return -plain
    return -torch.minimum(plain, ratio.clamp(batch.clip_low, batch.clip_high) * advantages)


def clipped_tokens(batch: TrainBatch, logprobs: torch.Tensor, given: LossInputs) -> int:
    """Count the tokens from which ppo's clipping takes the gradient."""
    ratio, advantages = _ratio(logprobs, given)
    above = (ratio > batch.clip_high) & (advantages > 0)
    below = (ratio < batch.clip_low) & (advantages < 0)
    return int((above | below).sum())


def _ratio(logprobs: torch.Tensor, given: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the policy's probability over the sampled one, and the advantages.

    Raises UserError where the ratio overflows: a clipped loss would be finite then, but not its gradient.
    """
    assert given.logprobs is not None and given.advantages is not None
    ratio = torch.exp(logprobs - given.logprobs)
    if not torch.isfinite(ratio).all():
        raise UserError(
            "the probability ratio is not finite: logprobs lie too far below those of the policy, "
            "or its weights have diverged"
        )
    return ratio, given.advantages
