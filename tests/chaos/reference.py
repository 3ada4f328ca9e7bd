"""A killed run against one with the same settings that nothing happened to: what differs, in words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from .history import Event, history, jobs, read_checkpoint, read_log

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # of metrics and weights that are computed again


def differences(folder: Path, reference: Path) -> list[str]:
    """Compare each job's steps, groups, rewards and metrics, and the adapter that came out."""
    ours, theirs = read_log(folder)[0], read_log(reference)[0]
    found = []
    for job in jobs(theirs):
        mine, other = history(ours, job), history(theirs, job)
        if len(mine.steps) != len(other.steps):
            found.append(f"{job}: {len(mine.steps)} steps, and {len(other.steps)} in the reference")
        for one, two in zip(mine.steps, other.steps, strict=False):
            found += [f"{job} step {one.number}: {text}" for text in _step_differs(one.done, two.done)]
            if [_key(group) for group in one.groups] != [_key(group) for group in two.groups]:
                found.append(f"{job} step {one.number}: its groups, tasks or rewards are not the reference's")
        if not same_weights(weights(folder, job), weights(reference, job)):
            found.append(f"{job}: the adapter's weights are not the reference's")
    return found


def _key(group: Event) -> tuple[Any, ...]:
    names = ("group", "instance_id", "policy_version", "fate", "rewards")
    return tuple(tuple(v) if isinstance(v := group[name], list) else v for name in names)


def _step_differs(one: Event, two: Event) -> list[str]:
    found = []
    for name in ("reward_mean", "reward_mean_kept", "minibatches", "groups"):
        if one[name] != two[name]:
            found.append(f"{name} is {one[name]}, not {two[name]}")
    mine, other = one["metrics"], two["metrics"]
    if mine.keys() != other.keys():
        return [*found, f"the metrics are {sorted(mine)}, not {sorted(other)}"]
    for name, value in other.items():
        if not math.isclose(mine[name], value, rel_tol=CLOSE["rtol"], abs_tol=CLOSE["atol"]):
            found.append(f"{name} is {mine[name]}, not {value}")
    return found


def weights(folder: Path, job: str) -> dict[str, np.ndarray]:
    """Return the tensors of a job's last checkpoint, optimizer state included, as its own local server kept them."""
    from safetensors.numpy import load_file

    model, kind, name = read_checkpoint(folder, job)["checkpoint"].removeprefix("tinker://").split("/")
    return load_file(folder / "server" / model.replace(":", "-") / kind / f"{name}.safetensors")


def same_weights(one: dict[str, np.ndarray], two: dict[str, np.ndarray], *, exactly: bool = False) -> bool:
    """Whether two checkpoints are close, or exactly: equal in every bit."""
    if one.keys() != two.keys():
        return False
    if exactly:
        return all(one[name].tobytes() == two[name].tobytes() for name in one)
    return all(
        one[name].shape == two[name].shape and np.allclose(one[name], two[name], **CLOSE) for name in one
    )
