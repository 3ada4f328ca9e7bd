"""Attempts as earlier versions recorded them, to show that they are read, and what today's files are better by."""

from __future__ import annotations

from typing import Any

from swegym_tutorial.attempt_json import turns_to_json
from swegym_tutorial.rollout import Rollout


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """Return all of an attempt but its patch: log-probabilities to six decimals."""
    return {
        **turns_to_json(rollout),
        "tokens": rollout.tokens.tolist(),
        "mask": rollout.mask.astype(int).tolist(),
        "logprobs": [round(x, 6) for x in rollout.logprobs.tolist()],
    }
