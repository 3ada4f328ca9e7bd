"""What a job counts: which task a group gets, how attempts make a group, and groups a batch.

Knows nothing of servers or sandboxes.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .calls import PolicyError
from .config import TrainingConfig
from .events import scan
from .grading import Episode
from .minibatch import Fate, Group, fate_of, prepare_minibatch
from .policy import Update
from .rollout import RecordingLost, Rollout
from .sampler import PolicySampler, Reference
from .tasks import Task

if TYPE_CHECKING:
    from tinker import types

WORK = ("sampling", "tools", "grading")
_PREPARING = threading.Lock()  # by one client after another: with its arrays a minibatch has half a gigabyte


class NoLearningSignal(RuntimeError):
    """Too many groups in a row were of no use; the text names the solve rates or the faults."""


@lru_cache(maxsize=64)
def _order(count: int, seed: int, job: int, rounds: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed} {job} {rounds}").shuffle(order)
    return order


def task_at(tasks: Sequence[Task], seed: int, job: int, number: int) -> Task:
    """Return the task of a job's group: each pass over the tasks is a shuffle that seed, job and pass decide."""
    rounds, index = divmod(number, len(tasks))
    return tasks[_order(len(tasks), seed, job, rounds)[index]]


@dataclass
class Batch:
    """What came in while one batch filled."""

    began: float  # by time.monotonic(), as `filled`
    filled: float | None = None  # when the last group was in
    kept: list[Group] = field(default_factory=list)
    references: dict[int, list[Reference]] = field(
        default_factory=dict
    )  # group number -> one of each episode
    fates: Counter[Fate] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    lost: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))  # spent in attempts
    useless: int = 0  # groups in a row whose rewards were all equal

    def room(self, config: TrainingConfig) -> int:
        """Return how many more groups it may take; 0: it is full."""
        missing = config.groups_per_batch - len(self.kept)
        most = config.max_groups_per_batch
        if most is None or missing <= 0:
            return max(0, missing)
        left = most - self.fates.total()
        return min(missing, left) if left > 0 else int(not self.kept)

    def take(self, group: Group, fate: Fate) -> None:
        self.fates[fate] += 1
        self.lost += group.lost
        self.rewards += group.rewards.tolist()
        for episode in group.episodes:
            self.seconds["sampling"] += episode.rollout.sampling_seconds
            self.seconds["tools"] += episode.rollout.tool_seconds
            self.seconds["grading"] += 0.0 if episode.verdict.shared else episode.verdict.seconds
        if fate is Fate.KEPT:
            self.kept.append(group)
        if fate is not Fate.FAILED:
            self.useless = self.useless + 1 if fate is Fate.UNIFORM else 0

    def minibatch(self, places: Sequence[int], kl_coef: float, log: Callable[..., None]) -> list[types.Datum]:
        """Return the minibatch of the kept groups at these places; it is empty where none of it can be read back.

        Raises PolicyError, Stopped.
        """
        numbers = [self.kept[place].number for place in places]
        for each in itertools.chain.from_iterable(self.references[number] for number in numbers):
            with contextlib.suppress(PolicyError, RecordingLost):  # of a lost attempt; else it comes again
                each.result()
        with _PREPARING:
            groups = [self.read_back(place, log) for place in places]
            references = [[each.result() for each in self.references[number]] for number in numbers]
            return prepare_minibatch(groups, references, kl_coef)

    def read_back(self, place: int, log: Callable[..., None]) -> Group:
        """Return the kept group at a place with its arrays, wherever they are; turns and patches are left out.

        An attempt whose recording cannot be read is lost to an infrastructure fault: logged, counted, and left out of
        the group from now on.
        """
        group, whole, there = self.kept[place], [], []
        for n, episode in enumerate(group.episodes):
            try:
                rollout = replace(episode.rollout.whole(), turns=(), patch=b"")
            except RecordingLost as error:
                log("attempt_fault", **error.key, reason=f"RecordingLost: {error}", tries=1)
                continue
            whole.append(replace(episode, rollout=rollout))
            there.append(n)
        if missing := len(group.episodes) - len(there):
            group = replace(
                group, episodes=tuple(group.episodes[n] for n in there), lost=group.lost + missing
            )
            self.kept[place], self.lost = group, self.lost + missing
            if references := self.references.get(group.number):
                self.references[group.number] = [references[n] for n in there]
        return replace(group, episodes=tuple(whole))

    def result(self, step: int, version: int, update: Update, now: float) -> dict[str, Any]:
        """Return the fields of the step's event. now: when it was published, by time.monotonic().

        The batch's seconds are shared out: filling until the last group is in, then what is left of training on it, and
        publishing it. trainer_seconds are those from the first minibatch's submission, which may lie in the filling.
        """
        assert self.filled is not None
        kept = [reward for group in self.kept for reward in group.rewards.tolist()]
        return {
            "step": step,
            "policy_version": version,
            "reward_mean": float(np.mean(self.rewards)),
            "reward_mean_kept": float(np.mean(kept or self.rewards)),
            "checkpoint": update.checkpoint,
            "attempts": len(self.rewards),
            "lost": self.lost,
            "trained_groups": [group.number for group in self.kept],
            "groups": {fate: self.fates[fate] for fate in Fate},
            "batch_seconds": round(now - self.began, 3),
            "fill_seconds": round(self.filled - self.began, 3),
            "train_seconds": round(now - self.filled - update.publish_seconds, 3),
            "publish_seconds": round(update.publish_seconds, 3),
            "trainer_seconds": round(update.train_seconds, 3),
            "work_seconds": {kind: round(self.seconds[kind], 3) for kind in WORK},
            "minibatches": update.minibatches,
            "metrics": update.metrics,
        }


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


class References:
    """The log-probabilities under the base model of the groups that can be trained on. Safe for many threads."""

    def __init__(
        self, base: PolicySampler | None, config: TrainingConfig, job: str, log: Callable[..., None]
    ) -> None:
        """base: None where nobody needs them."""
        self._base, self._config, self._job, self._log = base, config, job, log
        self._asked: dict[int, list[Reference]] = {}  # of groups that no batch has taken yet

    def ask(self, group: Group) -> None:
        """Ask for those of a complete group, unless it has no learning signal: the trainer may be about to take it.

        When all answers are there, a `reference` event tells the seconds.
        """
        if self._base is None:
            return
        if fate_of(group, group.policy_version, self._config.min_group_size) is not Fate.KEPT:
            return
        asked, answers = time.monotonic(), itertools.count(1)

        def answered() -> None:
            if next(answers) == len(group.episodes):
                seconds = round(time.monotonic() - asked, 4)
                version = group.policy_version
                self._log(
                    "reference", job=self._job, group=group.number, policy_version=version, seconds=seconds
                )

        self._asked[group.number] = [
            self._base.logprobs(_of(episode.rollout), answered) for episode in group.episodes
        ]

    def take(self, group: Group) -> list[Reference]:
        """Return what was asked of a group, one of each episode, and forget it."""
        return self._asked.pop(group.number, [])


def _of(rollout: Rollout) -> np.ndarray | Rollout:
    """Return what the base is asked about: an attempt that is on disk stays there."""
    return rollout if rollout.read is not None else rollout.tokens


def why_fruitless(events: Path, job: str, count: int) -> str:
    """Say what a job's groups were like so far, and what went wrong, from the log."""
    rewards: dict[str, list[float]] = {}
    faults: Counter[str] = Counter()
    unknown, validate = frozenset[str](), ""
    for event in scan(events, ("tasks_trusted", "group", "group_failed", "attempt_fault")):
        if event["event"] == "tasks_trusted" and "validate" in event:
            unknown, validate = frozenset(event["never_validated"]), event["validate"]
        if event.get("job") != job:
            continue
        if event["event"] == "attempt_fault":
            faults[event["reason"]] += 1
        else:
            rewards.setdefault(event["instance_id"], []).extend(event["rewards"])
    rates = sorted((float(np.mean(values)), task) for task, values in rewards.items() if values)
    text = f"{job}: {count} groups in a row had no mixed rewards, so there is nothing to learn from. "
    if faults:
        text += "Commonest faults: " + "; ".join(f"{n} x {why}" for why, n in faults.most_common(3)) + ". "
    text += "Solve rates: " + ", ".join(f"{task} {rate:.2f}" for rate, task in rates[:12]) + ". "
    if count := len(unknown & rewards.keys()):
        text += (
            f"{count} of these {len(rewards)} tasks were never validated: `{validate}` finds those that no patch can "
            "solve, for a mistyped test id, say. "
        )
    return text + "Choose tasks that the policy sometimes solves, or raise max_fruitless_groups."
