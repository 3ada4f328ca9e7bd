"""What must hold of a run folder, whatever happened to the run: each check returns what it found wrong, in words.

Pure functions over folders. `all_of` makes every check of one folder.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from swegym_tutorial.config import TrainingConfig
from swegym_tutorial.events import read_episode

from . import sampled
from .history import (
    LOST,
    Event,
    History,
    attempt_of,
    history,
    jobs,
    listed,
    parts,
    read_checkpoint,
    read_config,
    read_log,
    training_attempts,
)


def all_of(folder: Path, *, steps: int | None = None) -> list[str]:
    """Make every check. steps: how many each job must have done; None: as many as it has."""
    events, bad = read_log(folder)
    config = read_config(folder)
    found = [f"events.jsonl holds a line that is no event: {line[:120]!r}" for line in bad]
    found += attempts_ended(events)
    found += folders_readable(folder, events)
    found += nothing_half_written(folder)
    found += sampled.groups_agree(events, config)
    found += sampled.tasks_stay(events)
    for job in [f"train-job{n}" for n in range(config.clients)]:
        told = history(events, job)
        found += steps_contiguous(told, steps)
        found += batches_whole(told)
        found += groups_once(told)
        found += sampled.groups_fresh(told, config)
        found += sampled.versions_go_on(events, job)
        try:
            saved = read_checkpoint(folder, job)
        except (OSError, ValueError) as error:
            found.append(f"{job}: no checkpoint can be read: {type(error).__name__}: {error}")
            continue
        found += checkpoint_agrees(told, saved)
        found += groups_accounted(told, saved)
        found += cursors_ahead(events, job, saved)
        found += resumes_agree(events, job, saved)
    found += [f"a full batch never became a step: {lost}" for lost in lost_batches(events, config)]
    return found


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
        kept = [group["group"] for group in step.groups if group["fate"] == "kept"]
        if kept != step.done["trained_groups"]:
            found.append(
                f"{told.job} step {step.number}: it names the groups {step.done['trained_groups']}, and the log "
                f"shows {kept}"
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
    entries = listed(saved)
    numbers = [entry["step"] for entry in entries]
    if numbers != list(range(saved["step"], saved["step"] - len(numbers), -1)):
        found.append(f"{told.job}: the checkpoint's file lists the steps {numbers}")
    lines = {step.number: step.done["checkpoint"] for step in told.steps}
    for entry in entries:
        if entry["step"] >= 0 and lines.get(entry["step"]) != entry["checkpoint"]:
            found.append(
                f"{told.job} step {entry['step']}: its line names {lines.get(entry['step'])}, the checkpoint's "
                f"file {entry['checkpoint']}"
            )
    return found


def groups_accounted(told: History, saved: dict[str, Any]) -> list[str]:
    """Each group before a checkpoint's cursor is in one step, or is kept to be started anew: none gets lost.

    So it must be for each checkpoint that is listed.
    """
    found = []
    for entry in listed(saved):
        seen = {g["group"] for step in told.steps if step.number <= entry["step"] for g in step.groups}
        open_ones = set(entry["unfinished_groups"])
        about = f"{told.job}, checkpoint of step {entry['step']}"
        if lost := set(range(entry["next_group"])) - seen - open_ones:
            found.append(f"{about}: the groups {sorted(lost)} were started and have no fate")
        if twice := seen & open_ones:
            found.append(f"{about}: the groups {sorted(twice)} are in a step and are to be started anew")
        if beyond := {n for n in seen | open_ones if n >= entry["next_group"]}:
            found.append(f"{about}: the groups {sorted(beyond)} lie beyond its next, {entry['next_group']}")
    return found


def cursors_ahead(events: list[Event], job: str, saved: dict[str, Any]) -> list[str]:
    """What the part that made a step had begun before its training lies before the cursor of its checkpoint."""
    begun: dict[int, set[int]] = {}
    for part in parts(events):
        started: set[int] = set()
        for event in part:
            if event.get("job") != job:
                continue
            if event["event"] == "rollout_start" and event["phase"].startswith("run-"):
                started.add(event["group"])
            elif event["event"] == "training_start":
                begun[event["step"]] = set(started)
    found = []
    for entry in listed(saved):
        if beyond := {n for n in begun.get(entry["step"], ()) if n >= entry["next_group"]}:
            found.append(
                f"{job}, checkpoint of step {entry['step']}: the groups {sorted(beyond)} were begun before, and its "
                f"next is {entry['next_group']}"
            )
    return found


def resumes_agree(events: list[Event], job: str, saved: dict[str, Any]) -> list[str]:
    """A resume starts anew what its checkpoint names, and really starts it before anything newer."""
    named = {entry["checkpoint"]: entry["unfinished_groups"] for entry in listed(saved)}
    found = []
    for part in parts(events):
        resumed = [e for e in part if e["event"] == "resumed" and e["job"] == job]
        for event in resumed:
            told = named.get(event["checkpoint"], event["restarted"])
            if event["restarted"] != told:
                found.append(f"{job}: a resume starts {event['restarted']} anew, its checkpoint names {told}")
        wanted = {n for event in resumed for n in event["restarted"]}
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
    """Each attempt is begun once; each of an earlier part has its end or is marked as unfinished; none has two."""
    ends = Counter(
        attempt_of(e) for name in ("episode", "attempt_unfinished") for e in training_attempts(events, name)
    )
    begun = Counter(attempt_of(e) for e in training_attempts(events, "rollout_start"))
    found = [f"attempt {attempt} has {count} ends" for attempt, count in ends.items() if count > 1]
    found += [f"attempt {attempt} was begun {count} times" for attempt, count in begun.items() if count > 1]
    found += [f"attempt {attempt} ended and was never begun" for attempt in ends.keys() - begun.keys()]
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


def nothing_half_written(folder: Path) -> list[str]:
    """What a killed process was writing is gone: files get their names when they are whole."""
    left = [*folder.rglob(".*"), *folder.rglob("*.part")]
    return [f"{path.relative_to(folder)} was left half written" for path in sorted(left)]


def _place(folder: Path, event: Event) -> Path:
    name = f"g{event['group']:06d}-a{event['attempt']}"
    return folder / "episodes" / event["phase"] / event["job"] / name
