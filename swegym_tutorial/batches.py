"""What a job counts: which task a group gets, how attempts make a group, and groups a batch.

Knows nothing of servers or sandboxes.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .calls import PolicyError
from .config import TrainingConfig
from .events import scan
from .grading import Episode
from .habits import rates
from .minibatch import Fate, Group, fate_of, prepare_minibatch
from .policy import Update
from .rollout import RecordingLost, Rollout
from .sampler import PolicySampler, Reference
from .tasks import Task

if TYPE_CHECKING:
    from tinker import types

WORK = ("sampling", "tools", "grading")
# By one client after another: with its arrays a minibatch has half a gigabyte. Nobody waits for a server under it.
_PREPARING = threading.Lock()


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
    min_group_size: int = 2  # of the config
    filled: float | None = None  # when the last group was in
    kept: list[Group] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # places in `kept` of which too little could be read back
    references: dict[int, list[Reference]] = field(default_factory=dict)  # kept group -> one of each episode
    fates: Counter[Fate] = field(default_factory=Counter)
    rewards: list[float] = field(default_factory=list)
    habits: list[Mapping[str, bool]] = field(default_factory=list)  # of the attempts, see habits.py
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

    def take(self, group: Group, fate: Fate, references: Sequence[Reference] = ()) -> None:
        """references: of each episode, where they are needed."""
        self.fates[fate] += 1
        self.lost += group.lost
        self.rewards += group.rewards.tolist()
        for episode in group.episodes:
            self.habits.append(episode.habits)
            self.seconds["sampling"] += episode.rollout.sampling_seconds
            self.seconds["tools"] += episode.rollout.tool_seconds
            self.seconds["grading"] += 0.0 if episode.verdict.shared else episode.verdict.seconds
        if fate is Fate.KEPT:
            self.kept.append(group)
            self.references[group.number] = list(references)
        if fate is not Fate.FAILED:
            self.useless = self.useless + 1 if fate is Fate.UNIFORM else 0

    def trained(self) -> list[Group]:
        """Return the kept groups without the dropped ones."""
        return [group for place, group in enumerate(self.kept) if place not in self.dropped]

    def minibatch(self, places: Sequence[int], kl_coef: float, log: Callable[..., None]) -> list[types.Datum]:
        """Return the minibatch of the kept groups at these places; it is empty where too little can be read back.

        Raises PolicyError, Stopped.
        """
        for place in places:
            self._await_references(place, log)
        with _PREPARING:
            read = [(place, self.read_back(place, log)) for place in places if place not in self.dropped]
            groups = [group for place, group in read if place not in self.dropped]
            references = [[each.result() for each in self.references[group.number]] for group in groups]
            return prepare_minibatch(groups, references, kl_coef)

    def _await_references(self, place: int, log: Callable[..., None]) -> None:
        """Wait for the answers; then their `result` is there at once. Raises PolicyError, Stopped."""
        lost = []
        for n, reference in enumerate(self.references[self.kept[place].number]):
            try:
                try:
                    reference.result()
                except PolicyError:  # an answer that is not finite, say: it is asked for anew
                    reference.result()
            except RecordingLost as error:
                _tell(error, log)
                lost.append(n)
        self._lose(place, lost)

    def read_back(self, place: int, log: Callable[..., None]) -> Group:
        """Return the kept group at a place with its arrays, wherever they are; turns and patches are left out.

        Attempts whose recordings cannot be read are lost.
        """
        whole, lost = [], []
        for n, episode in enumerate(self.kept[place].episodes):
            try:
                rollout = replace(episode.rollout.whole(), turns=(), patch=b"")
                whole.append(replace(episode, rollout=rollout))
            except RecordingLost as error:
                _tell(error, log)
                lost.append(n)
        self._lose(place, lost)
        return replace(self.kept[place], episodes=tuple(whole))

    def _lose(self, place: int, lost: Sequence[int]) -> None:
        """Leave attempts of a kept group out from now on; drop the group where no rule would keep what is left."""
        if not lost:
            return
        group = self.kept[place]
        for n in lost:
            self.rewards.remove(group.episodes[n].reward)
            self.habits.remove(group.episodes[n].habits)
        left = [n for n in range(len(group.episodes)) if n not in lost]
        episodes = tuple(group.episodes[n] for n in left)
        self.kept[place] = group = replace(group, episodes=episodes, lost=group.lost + len(lost))
        self.lost += len(lost)
        if references := self.references.get(group.number):
            self.references[group.number] = [references[n] for n in left]
        fate = fate_of(group, group.policy_version, self.min_group_size)
        if fate is not Fate.KEPT and place not in self.dropped:
            self.dropped.add(place)
            self.fates[Fate.KEPT] -= 1
            self.fates[fate] += 1

    def result(self, step: int, version: int, update: Update, now: float) -> dict[str, Any]:
        """Return the fields of the step's event. now: when it was published, by time.monotonic().

        The batch's seconds are shared out: filling until the last group is in, then what is left of training on it, and
        publishing it. trainer_seconds are those from the first minibatch's submission, which may lie in the filling.
        Lost attempts are in no mean; a mean is 0 where no attempt of the whole batch is left.
        """
        assert self.filled is not None
        trained = self.trained()
        kept = [reward for group in trained for reward in group.rewards.tolist()]
        return {
            "step": step,
            "policy_version": version,
            "reward_mean": float(np.mean(self.rewards or [0.0])),
            "reward_mean_kept": float(np.mean(kept or self.rewards or [0.0])),
            "checkpoint": update.checkpoint,
            "attempts": len(self.rewards),
            "lost": self.lost,
            "habits": rates(self.habits),
            "trained_groups": [group.number for group in trained],
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


def _tell(error: RecordingLost, log: Callable[..., None]) -> None:
    log("attempt_fault", **error.key, reason=f"RecordingLost: {error}", tries=1)


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
        self._made: dict[int, list[Reference]] = {}  # of groups that no batch has taken yet
        self._to_ask: dict[int, list[Reference]] = {}

    def expect(self, group: Group) -> None:
        """Make those of a complete group, unless it has no learning signal: the trainer may be about to take it.

        When all its answers are there, however often each was asked for, or are lost with their attempts, a
        `reference` event tells the seconds that took from now.
        """
        if self._base is None:
            return
        if fate_of(group, group.policy_version, self._config.min_group_size) is not Fate.KEPT:
            return
        number, version, size = group.number, group.policy_version, len(group.episodes)
        began, count = time.monotonic(), itertools.count(1)

        def settled() -> None:
            if next(count) == size:
                seconds = round(time.monotonic() - began, 4)
                self._log("reference", job=self._job, group=number, policy_version=version, seconds=seconds)

        made = [self._base.reference(_of(episode.rollout), settled) for episode in group.episodes]
        self._made[number] = self._to_ask[number] = made

    def ask(self, number: int) -> None:
        """Ask for those of a group that is expected, whether a batch has taken it by now or not. Raises Stopped.

        It may wait for the server: whoever needs them asks for what is not asked yet.
        """
        for reference in self._to_ask.pop(number, ()):
            reference.begin()

    def take(self, group: Group, fate: Fate) -> list[Reference]:
        """Return those of a group, one of each episode, and forget them; unless it is kept they are asked no more."""
        if fate is not Fate.KEPT:
            self._to_ask.pop(group.number, None)
        return self._made.pop(group.number, [])


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
