"""Held-out evaluation: how many of fresh attempts a policy resolves, and on which tasks.

Uses the same attempts and grading as training; knows nothing of updates.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from .attempts import AttemptRunner, Identity, Workers
from .config import TrainingConfig
from .events import RunFolder
from .halt import Halt, Stopped
from .rollout import Sampler
from .tasks import Task


@dataclass(frozen=True)
class Evaluation:
    """Graded attempts of one policy. Attempts that infrastructure faults took are counted apart."""

    label: str
    split: str
    rewards: dict[str, list[float]]  # instance_id -> the rewards of its graded attempts
    lost: int

    @property
    def attempts(self) -> int:
        return sum(map(len, self.rewards.values()))

    @property
    def resolved(self) -> int:
        return round(sum(map(sum, self.rewards.values())))

    @property
    def rate(self) -> float:
        return self.resolved / self.attempts if self.attempts else math.nan

    def pass_at(self, k: int) -> float:
        """Estimate the chance that one of k attempts resolves a task (arXiv:2107.03374), averaged over tasks.

        Raises ValueError where no task has k graded attempts.
        """
        values = []
        for rewards in self.rewards.values():
            n, c = len(rewards), round(sum(rewards))
            if n >= k:
                values.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
        if not values:
            raise ValueError(f"pass@{k} needs at least {k} graded attempts a task")
        return sum(values) / len(values)


def evaluate_splits(
    tasks: Sequence[Task],
    sampler: Sampler,
    runner: AttemptRunner,
    folder: RunFolder,
    config: TrainingConfig,
    *,
    label: str,
    halt: Halt,
    job: str = "base",
    version: int = 0,
    done: Container[str] = (),
) -> Iterator[Evaluation]:
    """Measure a policy on one split after the other, but those that are done, and yield what each came to.

    tasks: those of a split side by side. label: "before" or "after" training. Raises as `evaluate` does.
    """
    first = 0
    for split, group in itertools.groupby(tasks, key=lambda task: task.split):
        of_split = list(group)
        if split not in done:
            if halt.is_set():
                raise Stopped
            folder.log("phase", name=f"evaluating the {split} split {label} training")
            yield evaluate(
                of_split,
                sampler,
                runner,
                folder,
                attempts=config.evaluation_attempts,
                workers=config.rollout_workers,
                label=label,
                halt=halt,
                job=job,
                version=version,
                first=first,
            )
        first += len(of_split)


def evaluate(
    tasks: Sequence[Task],
    sampler: Sampler,
    runner: AttemptRunner,
    folder: RunFolder,
    *,
    attempts: int,
    workers: int,
    label: str,
    halt: Halt,
    job: str = "base",
    version: int = 0,
    first: int = 0,
) -> Evaluation:
    """Make `attempts` attempts at each task, `workers` at once, and log the `evaluation` event.

    tasks: of one split; first: the number of the first one, where other splits are measured under the same label.
    Raises Stopped when the run is told to stop, and what a worker raised.
    """
    phase = f"evaluation-{label}"
    rewards: dict[str, list[float]] = defaultdict(list)
    errors: list[BaseException] = []
    mine = halt.child()  # an attempt that raises ends the others
    lock, left, done = threading.Lock(), len(tasks) * attempts, threading.Event()
    lost = 0

    def one(task: Task, identity: Identity) -> None:
        nonlocal left, lost
        try:
            rollout = runner.rollout(task, sampler, identity, mine)
            episode = runner.grade(task, rollout, identity, mine) if rollout is not None else None
        except BaseException as error:
            errors.append(error)
            done.set()
            return
        with lock:
            if episode is None:
                lost += 1
            else:
                rewards[task.instance_id].append(episode.reward)
            left -= 1
            if left == 0:
                done.set()

    folder.log("evaluation_start", label=label, job=job, split=tasks[0].split, attempts=left)
    pool = Workers(workers, phase)
    for attempt in range(attempts):  # by attempts, so that the tasks' sandboxes are made evenly
        for number, task in enumerate(tasks, start=first):
            identity = Identity(phase, job, number, attempt, task.instance_id, version)
            pool.submit(lambda task=task, identity=identity: one(task, identity))  # type: ignore[misc]
    try:
        while not done.wait(0.2) and not halt.is_set():
            pass
    finally:
        mine.set()
        pool.close()
    if halt.is_set():
        raise Stopped
    if errors:
        raise errors[0]
    result = Evaluation(label, tasks[0].split, dict(rewards), lost)
    folder.log(
        "evaluation",
        label=label,
        job=job,
        split=result.split,
        policy_version=version,
        attempts=result.attempts,
        resolved=result.resolved,
        lost=lost,
        tasks={task: [len(values), round(sum(values))] for task, values in sorted(rewards.items())},
    )
    return result
