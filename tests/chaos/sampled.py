"""What must hold of the groups that steps are made of: who sampled them, when, under which policy, at which task.

Each check returns what it found wrong, in words.
"""

from __future__ import annotations

from collections import defaultdict

from swegym_tutorial.config import TrainingConfig

from .history import LOST, SEEN, Event, History, parts, training_attempts


def versions_go_on(events: list[Event], job: str) -> list[str]:
    """What a resumed part samples, it samples under its checkpoint's policy or a newer one."""
    found = []
    for part in parts(events):
        least = 0
        for event in part:
            if event.get("job") != job:
                continue
            if event["event"] == "resumed":
                least = event["step"] + 1
            elif event["event"] == "rollout_start" and event["policy_version"] < least:
                found.append(
                    f"{job}: group {event['group']} was begun under version {event['policy_version']} after a "
                    f"resume at version {least}"
                )
    return found


def groups_fresh(told: History, config: TrainingConfig) -> list[str]:
    """No step was trained on a group of a policy that was too old for it, or that was not yet published."""
    found = []
    for step in told.steps:
        for group in step.groups:
            age = step.number - group["policy_version"]  # a step trains the policy of its own number
            if age < 0 or (group["fate"] == "kept" and age > config.max_staleness):
                found.append(
                    f"{told.job} step {step.number}: group {group['group']} is of version {group['policy_version']}"
                )
    return found


def groups_agree(events: list[Event], config: TrainingConfig) -> list[str]:
    """A group's line tells of one attempt each, all made by the part that logged it and under one policy."""
    found = []
    for part in parts(events):
        ends: defaultdict[tuple[str, int], dict[int, Event]] = defaultdict(dict)
        for event in training_attempts(part, "episode"):
            ends[event["job"], event["group"]][event["attempt"]] = event
        for event in (e for e in part if e["event"] in SEEN):
            about = f"{event['job']}: group {event['group']}"
            mine = ends[event["job"], event["group"]]
            if sorted(mine) != list(range(config.group_size)):
                found.append(f"{about} has a fate, and ends of its attempts {sorted(mine)} only")
            rewards = [mine[n]["reward"] for n in sorted(mine) if mine[n]["outcome"] != LOST]
            if rewards != event["rewards"] or len(mine) - len(rewards) != event["lost"]:
                found.append(
                    f"{about} has the rewards {event['rewards']} and {event['lost']} lost, its attempts {rewards}"
                )
            versions = {each["policy_version"] for each in mine.values()}
            if mine and versions != {event["policy_version"]}:
                found.append(f"{about} is of version {event['policy_version']}, its attempts of {versions}")
    return found


def tasks_stay(events: list[Event]) -> list[str]:
    """A group's number decides its task, whichever part starts it."""
    tasks: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for event in training_attempts(events, "rollout_start"):
        tasks[event["job"], event["group"]].add(event["instance_id"])
    for event in (e for e in events if e["event"] in SEEN):
        tasks[event["job"], event["group"]].add(event["instance_id"])
    return [
        f"{job}: group {number} had the tasks {sorted(names)}"
        for (job, number), names in tasks.items()
        if len(names) > 1
    ]
