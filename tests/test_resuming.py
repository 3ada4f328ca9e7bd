"""What a run that goes on finds in the log of its earlier parts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from conftest import FINAL

from swegym_tutorial import TrainingConfig, TrainingRun, load_tasks
from swegym_tutorial.attempts import AttemptRunner
from swegym_tutorial.evaluate import evaluate_splits
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Grader
from swegym_tutorial.halt import Halt
from swegym_tutorial.resuming import begin_log, measured_before, was_evaluated
from swegym_tutorial.rollout import Sample
from swegym_tutorial.summary import RunSummary
from swegym_tutorial.tasks import Task
from swegym_tutorial.words import held_out, held_out_splits

SPLITS = ("held-out", "held-out-a", "held-out-b")
CONFIG = TrainingConfig.laptop(evaluation_attempts=2, rollout_workers=1, grading_workers=1)


@pytest.fixture
def folder(tmp_path):
    opened = RunFolder(tmp_path / "run")
    opened.open()
    yield opened
    opened.close()


def events(folder: RunFolder, *names: str) -> list[dict]:
    return [event for event in EventReader(folder.path).read() if event["event"] in names]


def held_out_tasks() -> list[Task]:
    """One of each split."""
    return [replace(task, split=split) for task, split in zip(load_tasks()[:3], SPLITS, strict=True)]


def measured(folder: RunFolder) -> set[str]:
    return measured_before(folder, held_out_tasks(), CONFIG.evaluation_attempts)


def test_a_new_folder_has_nothing_measured(tmp_path, folder):
    assert measured(RunFolder(tmp_path / "none")) == measured(folder) == set()


def test_only_what_was_measured_of_the_base_in_a_run_counts(folder):
    folder.log("evaluation_start", label="before", job="base", split="held-out-b", attempts=2)
    folder.log("evaluation", label="before", job="base", split="held-out", attempts=2, resolved=0)
    folder.log("evaluation", label="after", job="train-job0", split="held-out-a", attempts=2, resolved=1)
    folder.log("evaluation", label="held-out-c-20261130-080000", job="base", split="held-out-c", attempts=2)
    assert measured(folder) == {"held-out"}


def test_only_what_was_measured_of_the_same_tasks_as_often_counts(folder):
    """Else "before" would be of other attempts than "after": evaluation_tasks may change, and a task may be missing."""
    first, second = (replace(task, split="held-out") for task in load_tasks()[:2])
    names = [first.instance_id, second.instance_id]

    def measure(lost: int = 0, **tasks: list[int]) -> None:
        graded = sum(attempts for attempts, _ in tasks.values())
        fields = {"job": "base", "split": "held-out", "attempts": graded, "resolved": 0, "lost": lost}
        folder.log("evaluation", label="before", **fields, tasks=tasks)

    measure(**{name: [2, 0] for name in names})
    assert measured_before(folder, [first, second], 2) == {"held-out"}
    assert measured_before(folder, [first], 2) == measured_before(folder, [first, second], 4) == set()
    assert measured_before(folder, [first, replace(second, instance_id="me__own-1")], 2) == set()
    assert measured_before(folder, [first], 4) == set()  # as many attempts, but others
    measure(lost=3, **{names[1]: [1, 0]})
    assert measured_before(folder, [first, second], 2) == {"held-out"}  # whatever faults took
    measure(**{names[0]: [2, 0]})
    assert measured_before(folder, [first, second], 2) == set()  # the last one is what is shown
    assert measured_before(folder, [first], 2) == {"held-out"}


def test_a_line_that_a_kill_has_cut_tells_of_no_measuring(folder):
    for split in ("held-out", "held-out-a"):
        folder.log("evaluation", label="before", job="base", split=split, attempts=2, resolved=0)
    whole = folder.events.read_bytes()
    folder.events.write_bytes(whole[:-20])
    assert measured(folder) == {"held-out"}


def test_the_start_tells_the_settings_and_after_a_kill_what_was_under_way(folder):
    begin_log(folder, CONFIG, run="first-1", reward=None, evaluate=True, resumed=False)
    key = {"phase": "evaluation-before", "job": "base", "group": 0, "attempt": 0}
    folder.log("rollout_start", **key, instance_id="me__own-1", policy_version=0)
    begin_log(folder, CONFIG, run="first-2", reward="half", evaluate=False, resumed=True)
    first, unfinished, second = events(folder, "run_start", "attempt_unfinished")
    assert unfinished["event"] == "attempt_unfinished" and unfinished["instance_id"] == "me__own-1"
    fields = ("run", "reward", "evaluate", "resumed")
    assert [first[name] for name in fields] == ["first-1", None, True, False]
    assert [second[name] for name in fields] == ["first-2", "half", False, True]
    for name in ("preset", "steps", "clients", "groups_per_batch"):
        assert first[name] == second[name] == getattr(CONFIG, name)


class Resigned:
    """A policy that gives up at once, for any number of threads."""

    def __init__(self, chat) -> None:
        self.tokens = chat.encode(FINAL) + chat.stop_tokens

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        return Sample(self.tokens, [-0.5] * len(self.tokens), True)


def killed_in(folder: RunFolder, split: str) -> None:
    """Cut the log as a kill leaves it that comes when a split's first attempt has begun."""
    lines = folder.events.read_bytes().splitlines(keepends=True)
    at = next(
        n
        for n, line in enumerate(lines)
        if b'"evaluation_start"' in line and b'"%s"' % split.encode() in line
    )
    began = next(n for n in range(at, len(lines)) if b'"rollout_start"' in lines[n])
    folder.events.write_bytes(b"".join(lines[: began + 1]) + lines[began + 1][:30])


def test_a_run_that_was_killed_in_its_second_split_measures_that_and_the_third(tmp_path, chat, sandboxes):
    tasks = held_out_tasks()

    def part(n: int) -> list[str]:
        """One part of a run, as far as its training; returns the splits that it measures."""
        folder = RunFolder(tmp_path / "run")
        folder.open()
        begin_log(folder, CONFIG, run=f"run-{n}", reward=None, evaluate=True, resumed=n > 0)
        runner = AttemptRunner(chat, sandboxes, Grader(sandboxes, CONFIG), folder, CONFIG)
        results = evaluate_splits(
            tasks, Resigned(chat), runner, folder, CONFIG, label="before", halt=Halt(), done=measured(folder)
        )
        found = [result.split for result in results]
        folder.close()
        return found

    folder = RunFolder(tmp_path / "run")
    assert part(0) == list(SPLITS)
    begun = events(folder, "rollout_start")
    killed_in(folder, "held-out-a")
    assert measured(folder) == {"held-out"}
    assert part(1) == ["held-out-a", "held-out-b"]
    assert [e["split"] for e in events(folder, "evaluation")] == list(SPLITS)
    (unfinished,) = events(folder, "attempt_unfinished")
    assert unfinished["group"] == 1 and unfinished["instance_id"] == tasks[1].instance_id
    # The attempts are those of a run that was never killed: numbers, and so folders and seeds.
    fields = ("phase", "job", "group", "attempt", "instance_id", "policy_version")
    again = {tuple(e[name] for name in fields) for e in events(folder, "rollout_start")}
    assert again == {tuple(e[name] for name in fields) for e in begun}
    # And whoever reads the log sees each split once, in the order of the tasks.
    summary = RunSummary()
    summary.update(EventReader(folder.path).read())
    assert held_out_splits(summary) == list(SPLITS) and summary.unfinished == 1
    assert [held_out(summary, split)[0].attempts for split in SPLITS] == [2, 2, 2]
    assert measured(folder) == set(SPLITS) and part(2) == []


def test_a_run_that_was_killed_in_its_first_evaluation_is_resumed_with_it(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open()
    folder.log("run_start", steps=1, clients=1)
    assert not was_evaluated(folder.path)
    folder.log("evaluation_start", label="trial", job="base", split="train", attempts=2)
    assert not was_evaluated(folder.path)
    folder.log("evaluation_start", label="before", job="base", split="held-out", attempts=2)
    folder.close()
    assert was_evaluated(folder.path)


def test_a_run_that_was_killed_before_its_first_evaluation_is_resumed_with_it(folder):
    begin_log(folder, CONFIG, run="first-1", reward=None, evaluate=True, resumed=False)
    assert was_evaluated(folder.events)
    begin_log(folder, CONFIG, run="first-2", reward=None, evaluate=False, resumed=True)
    assert not was_evaluated(folder.events)  # it was told not to


@pytest.mark.parametrize("evaluate", [True, False])
def test_who_resumes_a_run_and_says_nothing_of_measuring_has_it_as_it_was(tmp_path, evaluate):
    config = TrainingConfig.laptop()
    folder = RunFolder(tmp_path)
    folder.open()
    begin_log(folder, config, run="first-1", reward=None, evaluate=evaluate, resumed=False)
    folder.close()
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert bool(TrainingRun(config, tmp_path, resume=True)._tasks.held_out) is evaluate
    assert TrainingRun(config, tmp_path, resume=True, evaluate=True)._tasks.held_out
    assert not TrainingRun(config, tmp_path, resume=True, evaluate=False)._tasks.held_out
    assert not TrainingRun(config, tmp_path / "new")._tasks.held_out
