"""An attempt and its verdict as plain JSON, without what is said twice.

Knows nothing of files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .rollout import Ending, Rollout, Turn
from .sandbox import CommandResult
from .verdicts import Outcome, Verdict


def _finite(value: Any) -> Any:
    """Replace what JSON cannot say (NaN, infinities) by null, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def dumps(value: Any) -> str:
    """Return one line of valid JSON."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def turns_to_json(rollout: Rollout) -> dict[str, Any]:
    """Return all of an attempt but its patch and its arrays."""
    turns = [
        {
            "text": turn.text,
            "sampled_tokens": turn.sampled_tokens,
            "sampling_seconds": round(turn.sampling_seconds, 4),
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


def rollout_from_json(saved: Mapping[str, Any], patch: bytes) -> Rollout:
    """Return an attempt as it was recorded; earlier versions left out the seconds of sampling, which are 0 then.

    Raises KeyError, TypeError, ValueError, OverflowError where a field is missing or is not what is written there.
    """
    tokens = np.array(saved["tokens"], dtype=np.int32)
    mask = np.array(saved["mask"], dtype=bool)
    logprobs = np.array(saved["logprobs"], dtype=np.float32)  # what JSON could not say is nan
    if tokens.ndim != 1 or not tokens.shape == mask.shape == logprobs.shape:
        raise ValueError("tokens, mask and logprobs are not lists of the same length")
    if (tokens < 0).any():
        raise ValueError("there is a token id below 0")
    return Rollout(
        task_id=str(saved["instance_id"]),
        tokens=tokens,
        mask=mask,
        logprobs=logprobs,
        turns=tuple(_turn_from_json(turn) for turn in saved["turns"]),
        ending=Ending(saved["ending"]),
        patch=patch,
        seconds=_seconds(saved),
    )


def _turn_from_json(turn: Mapping[str, Any]) -> Turn:
    calls = turn["calls"]
    return Turn(
        text=str(turn["text"]),
        sampled_tokens=_field(turn, "sampled_tokens", int),
        commands=tuple(str(call["command"]) for call in calls),
        results=tuple(map(_result_from_json, calls)),
        errors=tuple(map(str, turn["errors"])),
        sampling_seconds=_seconds(turn, "sampling_seconds") if "sampling_seconds" in turn else 0.0,
        tool_seconds=sum(map(_seconds, calls)),
    )


def _result_from_json(call: Mapping[str, Any]) -> CommandResult:
    return CommandResult(
        exit_code=_field(call, "exit_code", int),
        output=_field(call, "output", str),
        timed_out=_field(call, "timed_out", bool),
        truncated_bytes=_field(call, "truncated_bytes", int),
        seconds=_seconds(call),
    )


def _field(saved: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """Return a field that people are shown as it is, so that it must be what they are told it is."""
    value = saved[name]
    if type(value) not in kinds:  # a bool is no number here
        raise TypeError(f"{name} is of type {type(value).__name__}, not {kinds[0].__name__}")
    return value


def _seconds(saved: Mapping[str, Any], name: str = "seconds") -> float:
    number = float(_field(saved, name, float, int))
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, no time")
    return number


def verdict_from_json(saved: Mapping[str, Any], log: str = "") -> Verdict:
    """Return a recorded verdict; log: what the tests printed. Raises as rollout_from_json does."""
    plain, outcome = saved.get("plain"), Outcome(saved["outcome"])
    reward = float(saved.get("reward", outcome is Outcome.RESOLVED))
    return Verdict(
        outcome=outcome,
        tests={str(test): str(status) for test, status in saved["tests"].items()},
        detail=str(saved["detail"]),
        log=log,
        seconds=_seconds(saved),
        shared=bool(saved["shared"]),
        plain=None if plain is None else Outcome(plain),
        own_reward=None if reward == (outcome is Outcome.RESOLVED) else reward,
    )
