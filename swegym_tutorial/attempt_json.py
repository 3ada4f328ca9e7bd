"""An attempt and its verdict as they are recorded: plain JSON, without what is said twice.

Knows nothing of files.
"""

from __future__ import annotations

from typing import Any

from .grading import Verdict
from .rollout import Rollout


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    turns = [
        {
            "text": turn.text,
            "sampled_tokens": turn.sampled_tokens,
            "calls": [
                {
                    "command": command,
                    "exit_code": result.exit_code,
                    "output": result.output,
                    "timed_out": result.timed_out,
                    "truncated_bytes": result.truncated_bytes,
                    "seconds": round(result.seconds, 4),
                }
                for command, result in zip(turn.commands, turn.results, strict=True)
            ],
            "errors": list(turn.errors),
        }
        for turn in rollout.turns
    ]
    return {
        "instance_id": rollout.task_id,
        "ending": rollout.ending,
        "seconds": round(rollout.seconds, 4),
        "turns": turns,
        "tokens": rollout.tokens.tolist(),
        "mask": rollout.mask.astype(int).tolist(),
        "logprobs": [round(x, 6) for x in rollout.logprobs.tolist()],
    }


def verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome,
        "reward": verdict.reward,
        "tests": dict(verdict.tests),
        "detail": verdict.detail,
        "seconds": round(verdict.seconds, 4),
        "shared": verdict.shared,
        "plain": verdict.plain,  # by the printed output and SWE-Gym's rules alone
    }
