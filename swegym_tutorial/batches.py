"""What a job counts and remembers: which task a group gets, how attempts make a group and groups a batch, and the
checkpoint that a resumed job goes on from.

Knows nothing of threads' work, servers or sandboxes.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .events import EventReader
from .grading import Episode
from .minibatch import Fate, Group
from .tasks import Task

WORK = ("sampling", "tools", "grading")


class NoLearningSignal(RuntimeError):
    """Too many groups in a row were of no use; the text names the solve rates or the faults."""


def task_at(tasks: Sequence[Task], seed: int, job: int, number: int) -> Task:
    """Return the task of a job's group: each pass over the tasks is a shuffle that seed, job and pass decide."""
    rounds, index = divmod(number, len(tasks))
    order = list(range(len(tasks)))
    random.Random(f"{seed} {job} {rounds}").shuffle(order)
    return tasks[order[index]]


class CheckpointError(RuntimeError):
    """A checkpoint's file cannot be read; the text names it."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `TrainingJob` wrote after its last step. Raises CheckpointError."""
    fields = {"step", "policy_version", "checkpoint", "sampler", "next_group", "unfinished_groups", "seed"}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        missing = fields - saved.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    if missing:
        raise CheckpointError(f"the checkpoint {path} lacks {', '.join(sorted(missing))}")
    return saved


@dataclass
class Batch:
    """What came in while one batch filled."""

    began: float
    kept: list[Group] = field(default_factory=list)
    references: dict[int, list[Any]] = field(default_factory=dict)  # group number -> futures, one an episode
    fates: Counter[Fate] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))  # spent in attempts


class Assembly:
    """Collects the attempts of one group."""

    def __init__(self, number: int, task: Task, version: int, size: int) -> None:
        self.number = number
        self.task = task
        self.version = version
        self._episodes: list[Episode | None] = [None] * size
        self._open = size
        self._lock = threading.Lock()

    def put(self, attempt: int, episode: Episode | None) -> Group | None:
        """Note an attempt's end (None: lost); returns the group when it was the last one."""
        with self._lock:
            self._episodes[attempt] = episode
            self._open -= 1
            if self._open:
                return None
        graded = tuple(e for e in self._episodes if e is not None)
        return Group(
            self.number, self.task.instance_id, self.version, graded, len(self._episodes) - len(graded)
        )


def why_fruitless(events: Path, job: str, count: int) -> str:
    """Say what a job's groups were like so far, and what went wrong, from the log."""
    rewards: dict[str, list[float]] = {}
    faults: Counter[str] = Counter()
    for event in EventReader(events).read():
        if event.get("job") == job and event["event"] in ("group", "group_failed"):
            rewards.setdefault(event["instance_id"], []).extend(event["rewards"])
        if event.get("job") == job and event["event"] == "attempt_fault":
            faults[event["reason"]] += 1
    rates = sorted((float(np.mean(values)), task) for task, values in rewards.items() if values)
    text = f"{job}: {count} groups in a row had no mixed rewards, so there is nothing to learn from. "
    if faults:
        text += "Commonest faults: " + "; ".join(f"{n} x {why}" for why, n in faults.most_common(3)) + ". "
    text += "Solve rates: " + ", ".join(f"{task} {rate:.2f}" for rate, task in rates[:12]) + ". "
    return text + "Choose tasks that the policy sometimes solves, or raise max_fruitless_groups."
