"""What must hold of a run folder, whatever happened to the run: each check returns what it found wrong, in words.

Pure functions over folders. `all_of` makes every check of one folder; `differences` compares it with the folder of a
run with the same settings that nothing happened to.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from swegym_tutorial.config import TrainingConfig
from swegym_tutorial.events import read_episode

from .history import Event, History, attempt_of, history, jobs, parts, read_log, training_attempts

LOST = "infrastructure"  # the outcome of an attempt that was given up
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # of metrics and weights that are computed again


def all_of(folder: Path, *, steps: int | None = None) -> list[str]:
    """Make every check. steps: how many each job must have done; None: as many as it has."""
    events, bad = read_log(folder)
    config = read_config(folder)
    found = [f"events.jsonl holds a line that is no event: {line[:120]!r}" for line in bad]
    found += attempts_ended(events)
    found += folders_readable(folder, events)
    for job in jobs(events):
        told = history(events, job)
        saved = read_checkpoint(folder, job)
        found += steps_contiguous(told, steps)
        found += batches_whole(told)
        found += groups_once(told)
        found += checkpoint_agrees(told, saved)
        found += groups_accounted(events, told, saved)
    found += [f"a full batch never became a step: {lost}" for lost in lost_batches(events, config)]
    return found


def read_config(folder: Path) -> TrainingConfig:
    return TrainingConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))


def read_checkpoint(folder: Path, job: str) -> dict[str, Any]:
    return json.loads((folder / f"{job}-checkpoint.json").read_text(encoding="utf-8"))


# -- The history that the checkpoints tell ---------------------------------------------------------


def steps_contiguous(told: History, steps: int | None = None) -> list[str]:
    """Steps count from 0, each once in effect; so do the policy's versions."""
    numbers = [step.number for step in told.steps]
    found = []
    if numbers != list(range(len(numbers))):
        found.append(f"{told.job}: the steps in effect are {numbers}")
    versions = [step.done["policy_version"] for step in told.steps]
    if versions != list(range(1, len(versions) + 1)):
        found.append(f"{told.job}: the policy versions of the steps are {versions}")
    if steps is not None and len(numbers) != steps:
        found.append(f"{told.job}: {len(numbers)} of {steps} steps are done")
    return found


def batches_whole(told: History) -> list[str]:
    """Each step's line counts what the log shows of its batch."""
    found = []
    for step in told.steps:
        fates = Counter(group["fate"] for group in step.groups)
        said = {fate: count for fate, count in step.done["groups"].items() if count}
        if dict(fates) != said:
            found.append(f"{told.job} step {step.number}: it counts {said}, and the log shows {dict(fates)}")
        attempts = sum(len(group["rewards"]) for group in step.groups)
        if attempts != step.done["attempts"]:
            found.append(
                f"{told.job} step {step.number}: it counts {step.done['attempts']} attempts, and its groups "
                f"have {attempts}"
            )
    return found


def groups_once(told: History) -> list[str]:
    """No group is part of two steps, or twice of one."""
    seen: dict[int, int] = {}
    found = []
    for step in told.steps:
        for group in step.groups:
            if group["group"] in seen:
                before = seen[group["group"]]
                found.append(f"{told.job}: group {group['group']} is in step {before} and in {step.number}")
            seen[group["group"]] = step.number
    return found


def checkpoint_agrees(told: History, saved: dict[str, Any]) -> list[str]:
    """The checkpoint's file is the last step's, and each step that it lists has its line."""
    found = []
    if saved["step"] != told.last:
        found.append(f"{told.job}: the checkpoint is of step {saved['step']}, the last line of {told.last}")
    listed = [saved, *saved.get("earlier", [])]
    numbers = [entry["step"] for entry in listed]
    if numbers != list(range(saved["step"], saved["step"] - len(numbers), -1)):
        found.append(f"{told.job}: the checkpoint's file lists the steps {numbers}")
    lines = {step.number: step.done["checkpoint"] for step in told.steps}
    for entry in listed:
        if entry["step"] >= 0 and lines.get(entry["step"]) != entry["checkpoint"]:
            found.append(
                f"{told.job} step {entry['step']}: its line names {lines.get(entry['step'])}, the checkpoint's "
                f"file {entry['checkpoint']}"
            )
    return found


def groups_accounted(events: list[Event], told: History, saved: dict[str, Any]) -> list[str]:
    """Each group before the checkpoint's cursor is in one step, or is kept to be started anew: none gets lost.

    And what a resume starts anew is really started again by the part that it begins, where that part goes on to
    make a step.
    """
    seen = {group["group"] for step in told.steps for group in step.groups}
    open_ones = set(saved["unfinished_groups"])
    found = []
    if lost := set(range(saved["next_group"])) - seen - open_ones:
        found.append(f"{told.job}: the groups {sorted(lost)} were started and have no fate")
    if twice := seen & open_ones:
        found.append(f"{told.job}: the groups {sorted(twice)} are in a step and are to be started anew")
    started = {e["group"] for e in training_attempts(events, "rollout_start") if e["job"] == told.job}
    if never := seen - started:
        found.append(f"{told.job}: the groups {sorted(never)} have a fate and were never started")
    return found + _restarted(events, told.job)


def _restarted(events: list[Event], job: str) -> list[str]:
    found = []
    for part in parts(events):
        wanted = {
            n for e in part if e["event"] == "resumed" and e["job"] == job for n in e.get("restarted", [])
        }
        started = {e["group"] for e in training_attempts(part, "rollout_start") if e["job"] == job}
        later = [number for number in started if wanted and number > max(wanted)]
        if (missing := wanted - started) and later:
            found.append(
                f"{job}: a resume told that it starts {sorted(missing)} anew, and began {min(later)}"
            )
    return found


def lost_batches(events: list[Event], config: TrainingConfig) -> list[str]:
    """Name the batches that were full, so their training was begun, and that never became a step.

    Those that the end of the process or a stop took are not counted: they are filled anew.
    """
    found = []
    for job in jobs(events):
        told = history(events, job)
        for why, groups in [*told.dropped, ("the end of the log", told.pending)]:
            if why not in ("killed", "run_stopped") and is_full(groups, config):
                found.append(f"{job}: {[group['group'] for group in groups]}, dropped at {why}")
        for step in told.steps:
            for size in range(1, len(step.groups)):
                if is_full(step.groups[:size], config):
                    numbers = [group["group"] for group in step.groups[:size]]
                    found.append(f"{job}: {numbers}, and step {step.number} was made of more")
                    break
    return found


def is_full(groups: list[Event], config: TrainingConfig) -> bool:
    """Whether a batch of these groups is closed, so that its training begins."""
    kept = sum(group["fate"] == "kept" for group in groups)
    most = config.max_groups_per_batch
    return kept >= config.groups_per_batch or (most is not None and kept > 0 and len(groups) >= most)


# -- Attempts --------------------------------------------------------------------------------------


def attempts_ended(events: list[Event]) -> list[str]:
    """Each attempt of an earlier part has its end or is marked as unfinished; none has two."""
    ends = Counter(
        attempt_of(e) for name in ("episode", "attempt_unfinished") for e in training_attempts(events, name)
    )
    found = [f"attempt {attempt} has {count} ends" for attempt, count in ends.items() if count > 1]
    for part in parts(events)[:-1]:
        for event in training_attempts(part, "rollout_start"):
            if attempt_of(event) not in ends:
                found.append(
                    f"attempt {attempt_of(event)} was begun, and neither ended nor marked as unfinished"
                )
    return found


def lost_attempts(events: list[Event]) -> int:
    """Count the attempts that infrastructure faults took, after all tries."""
    return sum(event["outcome"] == LOST for event in training_attempts(events, "episode"))


def folders_readable(folder: Path, events: list[Event]) -> list[str]:
    """Each attempt's folder can be read and holds what the log tells of it, but for those deleted to save space."""
    bounded = any(event["event"] == "episodes_deleted" for event in events)
    found = []
    for event in training_attempts(events, "episode"):
        if event["outcome"] == LOST:
            continue
        place = _place(folder, event)
        if bounded and not place.exists():
            continue
        try:
            verdict = read_episode(place)["verdict"]
        except (OSError, ValueError, KeyError, EOFError) as error:
            found.append(f"{place.relative_to(folder)} cannot be read: {type(error).__name__}: {error}")
            continue
        if verdict["reward"] != event["reward"]:
            found.append(f"{place.relative_to(folder)} tells another reward than the log")
    graded = {_place(folder, event) for event in training_attempts(events, "episode")}
    ready = {_place(folder, event) for event in training_attempts(events, "rollout_ready")}
    for place in ready - graded:
        try:
            if place.exists() or not bounded:
                read_episode(place)
        except (OSError, ValueError, EOFError) as error:
            found.append(f"{place.relative_to(folder)} cannot be read: {type(error).__name__}: {error}")
    return found


def _place(folder: Path, event: Event) -> Path:
    name = f"g{event['group']:06d}-a{event['attempt']}"
    return folder / "episodes" / event["phase"] / event["job"] / name


# -- Against a run that nothing happened to ----------------------------------------------------------


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
