"""From graded attempts to what the trainer takes: groups, advantages, and one Datum an attempt.

Group-relative policy optimisation (GRPO, arXiv:2402.03300) with dynamic sampling (DAPO, arXiv:2503.14476): an
attempt's advantage is its reward against its group's mean, and groups whose rewards are all equal carry none.
Knows nothing of sandboxes, servers or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from .grading import Episode
from .token_ids import model_input, shared

if TYPE_CHECKING:
    from tinker import types

Item = TypeVar("Item")
EPSILON = 1e-6  # added to the standard deviation


class Fate(StrEnum):
    """What became of a group."""

    KEPT = "kept"  # mixed rewards, fresh enough: trained on
    UNIFORM = "uniform"  # all rewards equal: no learning signal
    STALE = "stale"  # sampled too many publications ago
    FAILED = "failed"  # too few attempts survived infrastructure faults


@dataclass(frozen=True)
class Group:
    """Attempts at one task under one policy version. `episodes` holds the graded ones only."""

    number: int  # counts the job's groups; decides the task
    task_id: str
    policy_version: int
    episodes: tuple[Episode, ...]
    lost: int = 0  # attempts that infrastructure faults took, after retries

    @property
    def rewards(self) -> np.ndarray:
        """float64, one an episode."""
        return np.array([episode.reward for episode in self.episodes], dtype=np.float64)


def fate_of(group: Group, version: int, min_group_size: int, max_staleness: int = 1) -> Fate:
    """Decide what becomes of a group when the trainer stands at policy `version`.

    max_staleness: publications that it may be old.
    """
    if len(group.episodes) < min_group_size:
        return Fate.FAILED
    rewards = group.rewards
    if rewards.min() == rewards.max():
        return Fate.UNIFORM
    return Fate.STALE if version - group.policy_version > max_staleness else Fate.KEPT


def without_tokens(group: Group) -> Group:
    """Return a group that is not to be trained on without what takes memory: rewards and times are left."""
    episodes = tuple(replace(each, rollout=each.rollout.bare()) for each in group.episodes)
    return replace(group, episodes=episodes)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Return (r - mean) / (std + 1e-6) within one group, std with n - 1; zeros for a single attempt.

    rewards: float, shape (attempts,). Returns float64 of the same shape.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.size < 2:
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON)


def token_advantages(
    mask: np.ndarray,
    logprobs: np.ndarray,
    advantage: float,
    generated: int,
    reference: np.ndarray | None,
    kl_coef: float,
) -> np.ndarray:
    """Return each token's weight in the loss: (advantage - kl_coef * (logprob - reference)) / generated.

    mask, logprobs, reference: shape (tokens,); 0 on tokens that were not sampled. generated: the sampled
    tokens of the whole minibatch, so that long attempts count by their length. Returns float32 (tokens,).
    """
    nothing, count = np.float32(0), max(generated, 1)
    if reference is None:
        return np.where(mask, np.float32(advantage / count), nothing)
    weights = np.subtract(logprobs, reference, dtype=np.float32)
    weights *= -kl_coef / count
    weights += advantage / count
    return np.where(mask, weights, nothing)


def prepare_minibatch(
    groups: Sequence[Group], references: Sequence[Sequence[np.ndarray]] | None = None, kl_coef: float = 0.0
) -> list[types.Datum]:
    """Return one Datum an episode: inputs tokens[:-1]; targets, logprobs and advantages shifted by one.

    references: for each group and episode the base model's log-probability of every token, shape (tokens,);
    needed where kl_coef > 0. Raises ValueError where it is missing or its shape is wrong; RecordingLost where an
    attempt is on disk alone and cannot be read back, which a `Batch` does before, losing it.
    """
    if kl_coef and references is None:
        raise ValueError("kl_coef > 0 needs the reference log-probabilities of every episode")
    generated = sum(episode.rollout.sampled_tokens for group in groups for episode in group.episodes)
    data = []
    for g, group in enumerate(groups):
        for e, (episode, advantage) in enumerate(zip(group.episodes, advantages(group.rewards), strict=True)):
            rollout = episode.rollout.whole()
            reference = references[g][e] if references is not None and kl_coef else None
            if reference is not None and reference.shape != rollout.mask.shape:
                raise ValueError(
                    f"{reference.shape[0]} reference log-probabilities for {rollout.mask.shape[0]} tokens"
                )
            weights = token_advantages(
                rollout.mask, rollout.logprobs, float(advantage), generated, reference, kl_coef
            )
            data.append(datum(rollout.tokens, rollout.logprobs, weights))
    return data


def datum(tokens: np.ndarray, logprobs: np.ndarray, weights: np.ndarray) -> types.Datum:
    """Return one trajectory as the trainer takes it: inputs tokens[:-1]; the rest shifted by one to match.

    tokens: integers; logprobs, weights: float32; all of shape (tokens,).
    """
    from tinker import types

    return types.Datum(
        model_input=model_input(shared(tokens[:-1])),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(tokens[1:].astype(np.int64)),
            "logprobs": types.TensorData.from_numpy(logprobs[1:]),
            "advantages": types.TensorData.from_numpy(weights[1:]),
        },
    )


def split_evenly(groups: Sequence[Item], minibatch_groups: int) -> list[list[Item]]:
    """Split a batch into the fewest minibatches of at most minibatch_groups groups, of nearly equal sizes.

    Each minibatch is normalised by its own tokens, so that a last one of a single group would weigh too much.
    """
    count = -(-len(groups) // minibatch_groups)
    bounds = np.linspace(0, len(groups), count + 1).round().astype(int) if count else np.array([0])
    return [list(groups[a:b]) for a, b in pairwise(bounds)]
