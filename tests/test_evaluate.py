"""Measuring a policy on several held-out splits, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.attempts import Identity, sampling_seed
from swegym_tutorial.evaluate import Evaluation, evaluate_splits
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.tasks import Task

SPLITS = ("held-out", "held-out-a", "held-out-b")
ATTEMPTS = 2


@dataclass
class Graded:
    """Of a graded attempt, what an evaluation asks for."""

    reward: float


class Runner:
    """Attempts without sandboxes: remembers which it made, and resolves what it is told to."""

    def __init__(self, reward: Callable[[Task, Identity], float | None] = lambda task, identity: 1.0) -> None:
        """reward: of each attempt, None where a fault takes it; may raise."""
        self.reward = reward
        self.made: list[tuple[str, Identity]] = []  # of each attempt its split
        self._lock = threading.Lock()

    def rollout(self, task, sampler, identity, halt):
        with self._lock:
            self.made.append((task.split, identity))
        return None if (reward := self.reward(task, identity)) is None else Graded(reward)

    def grade(self, task, rollout, identity, halt):
        return rollout

    def numbers(self) -> dict[str, list[int]]:
        """split -> the numbers of its tasks."""
        return {split: sorted({i.group for of, i in self.made if of == split}) for split in dict(self.made)}


@pytest.fixture
def tasks() -> list[Task]:
    """Three of held-out, one of held-out-a, two of held-out-b."""
    splits = ("held-out", "held-out", "held-out", "held-out-a", "held-out-b", "held-out-b")
    return [replace(task, split=split) for task, split in zip(load_tasks()[:6], splits, strict=True)]


@pytest.fixture
def folder(tmp_path) -> Iterator[RunFolder]:
    opened = RunFolder(tmp_path / "run")
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def measure(tasks, folder) -> Callable[..., Iterator[Evaluation]]:
    config = TrainingConfig.laptop(evaluation_attempts=ATTEMPTS, rollout_workers=2)
    sampler = None  # which the runner does not ask
    return partial(evaluate_splits, tasks, sampler, folder=folder, config=config, label="before", halt=Halt())


def told(folder: RunFolder) -> list[tuple[str, str]]:
    """The events of the log in their order, and which split each is of."""
    return [(e["event"], e.get("split") or e["name"]) for e in EventReader(folder.path).read()]


def of_split(split: str) -> list[tuple[str, str]]:
    phase = f"evaluating the {split} split before training"
    return [("phase", phase), ("evaluation_start", split), ("evaluation", split)]


def test_splits_are_measured_one_after_the_other_with_numbers_that_go_on(measure, folder, tasks):
    runner = Runner(lambda task, identity: float(task.split == "held-out" and identity.attempt == 0))
    results = list(measure(runner=runner))
    assert [(r.label, r.split, r.attempts, r.resolved, r.lost) for r in results] == [
        ("before", "held-out", 6, 3, 0),
        ("before", "held-out-a", 2, 0, 0),
        ("before", "held-out-b", 4, 0, 0),
    ]
    assert told(folder) == [event for split in SPLITS for event in of_split(split)]
    assert runner.numbers() == {"held-out": [0, 1, 2], "held-out-a": [3], "held-out-b": [4, 5]}
    assert {(i.phase, i.job, i.policy_version) for _, i in runner.made} == {("evaluation-before", "base", 0)}
    for _, identity in runner.made:
        assert tasks[identity.group].instance_id == identity.instance_id
    # No two attempts share a folder, or what they are sampled with.
    assert len({(i.group, i.attempt) for _, i in runner.made}) == len(tasks) * ATTEMPTS
    assert len({sampling_seed(0, i) for _, i in runner.made}) == len(tasks) * ATTEMPTS


@pytest.mark.parametrize("done", [{"held-out"}, {"held-out-a"}, {"held-out", "held-out-b"}, set(SPLITS)])
def test_splits_that_are_done_are_passed_over_and_the_others_keep_their_numbers(measure, folder, done):
    runner = Runner()
    left = [split for split in SPLITS if split not in done]
    assert [result.split for result in measure(runner=runner, done=done)] == left
    assert told(folder) == [event for split in left for event in of_split(split)]
    whole = {"held-out": [0, 1, 2], "held-out-a": [3], "held-out-b": [4, 5]}
    assert runner.numbers() == {split: whole[split] for split in left}


def test_a_halt_between_two_splits_leaves_the_first_ones_result(measure, folder):
    runner, halt = Runner(), Halt()
    measuring = measure(runner=runner, halt=halt)
    assert next(measuring).split == "held-out"
    halt.set()
    with pytest.raises(Stopped):
        next(measuring)
    assert told(folder) == of_split("held-out") and set(runner.numbers()) == {"held-out"}


def test_a_halt_within_a_split_leaves_no_result_of_it(measure, folder):
    halt = Halt()
    runner = Runner(lambda task, identity: halt.set() if task.split == "held-out-a" else 1.0)
    results = []
    with pytest.raises(Stopped):
        results.extend(measure(runner=runner, halt=halt))
    assert [result.split for result in results] == ["held-out"]  # which is kept
    assert told(folder) == of_split("held-out") + of_split("held-out-a")[:2]
    assert set(runner.numbers()) == {"held-out", "held-out-a"}


def test_attempts_that_faults_took_are_counted_apart_in_their_split(measure, folder, tasks):
    lost = tasks[4].instance_id
    runner = Runner(lambda task, identity: None if identity.instance_id == lost else 1.0)
    results = list(measure(runner=runner))
    assert [(r.attempts, r.resolved, r.lost) for r in results] == [(6, 6, 0), (2, 2, 0), (2, 2, 2)]
    assert results[2].rate == 1.0 and lost not in results[2].rewards
    last = [e for e in EventReader(folder.path).read() if e["event"] == "evaluation"][-1]
    assert last["lost"] == 2 and last["tasks"] == {tasks[5].instance_id: [2, 2]}


def test_what_an_attempt_raises_ends_the_measuring(measure, folder):
    def failing(task: Task, identity: Identity) -> float:
        if task.split == "held-out-a":
            raise OSError(28, "No space left on device")
        return 1.0

    runner = Runner(failing)
    with pytest.raises(OSError, match="No space left"):
        list(measure(runner=runner))
    assert told(folder) == of_split("held-out") + of_split("held-out-a")[:2]
    assert "held-out-b" not in runner.numbers()


def test_another_policy_is_measured_under_its_own_name_with_the_same_seeds(measure, folder):
    before, after = Runner(), Runner()
    list(measure(runner=before))
    list(measure(runner=after, label="after", job="train-job1", version=7))
    assert {(i.phase, i.job, i.policy_version) for _, i in after.made} == {
        ("evaluation-after", "train-job1", 7)
    }
    seeds = [sorted((sampling_seed(0, i), i.instance_id) for _, i in r.made) for r in (before, after)]
    assert seeds[0] == seeds[1]
    events = [e for e in EventReader(folder.path).read() if e["event"] == "evaluation"]
    assert [(e["label"], e["job"], e["policy_version"]) for e in events[3:]] == [
        ("after", "train-job1", 7)
    ] * 3
