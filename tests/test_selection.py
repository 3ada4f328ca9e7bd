"""Which tasks a run goes without, and what it makes of a backend that cannot tell."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swegym_tutorial import TrainingConfig, load_tasks, selection
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.connect import RunError
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.sandbox import SandboxError
from swegym_tutorial.selection import Selection, all_held_out
from swegym_tutorial.tasks import BUNDLED, GIT_ENV, TaskError, wrong_files
from swegym_tutorial.trust import Trust, keep, trust_in
from swegym_tutorial.validation import Status, Validation


class Own:
    """A backend of somebody's, of which only missing() is asked."""

    def __init__(self, missing: Callable[[Any], Any]) -> None:
        self.missing = missing


def raising(error: BaseException) -> Callable[[Any], Any]:
    def missing(tasks: Any) -> Any:
        raise error

    return missing


@pytest.fixture
def folder(tmp_path) -> Iterator[RunFolder]:
    opened = RunFolder(tmp_path / "run")
    opened.open()
    yield opened
    opened.close()


def events(folder: RunFolder, name: str) -> list[dict]:
    return [event for event in EventReader(folder.path).read() if event["event"] == name]


@pytest.fixture
def chosen(folder) -> Selection:
    return Selection(TrainingConfig.laptop(), folder, load_tasks()[:3], [])


@pytest.mark.parametrize(
    "missing, kind, told",
    [
        (raising(SandboxError("no service")), SandboxError, "^no service$"),
        (
            raising(PolicyError("not the server's")),
            RunError,
            r"Own.missing\(tasks\) failed with PolicyError: not",
        ),
        (raising(KeyError("image")), RunError, r"Own.missing\(tasks\) failed with KeyError: 'image'"),
        (lambda: 0, RunError, r"Own.missing\(tasks\) failed with TypeError: .*argument"),
        (
            lambda tasks: None,
            RunError,
            r"Own.missing\(tasks\) gave None: it returns a dict, instance_id -> why",
        ),
        (lambda tasks: [tasks[0].instance_id], RunError, r"gave \['.*: it returns a dict"),
        (lambda tasks: {tasks[0].instance_id: None}, RunError, r"gave {'.*: None}: it returns a dict"),
    ],
)
def test_what_is_wrong_with_an_own_backend_is_told_as_that(missing, kind, told, chosen):
    with pytest.raises(kind, match=told):
        chosen.leave_out_missing(Own(missing), Halt())


def test_a_backend_that_does_not_answer_is_waited_for_no_longer_than_the_limit_or_a_stop(chosen, monkeypatch):
    over = threading.Event()
    silent = Own(lambda tasks: over.wait(60))
    monkeypatch.setattr(selection, "IMAGES_TIMEOUT", 0.3)
    with pytest.raises(SandboxError, match=r"Own.missing\(tasks\) did not return within"):
        chosen.leave_out_missing(silent, Halt())
    halt = Halt()
    halt.set()
    with pytest.raises(Stopped):
        chosen.leave_out_missing(silent, halt)
    over.set()


def test_what_an_own_backend_lacks_is_left_out_with_its_reason(chosen, folder):
    first = chosen.train[0].instance_id
    chosen.leave_out_missing(Own(lambda tasks: {first: "no image"}), Halt())
    assert len(chosen.train) == 2 and events(folder, "tasks_left_out")[0]["tasks"] == {first: "no image"}


def test_tasks_whose_files_are_another_commits_are_left_out_with_the_reason(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "cache"))
    good, *others = load_tasks()[:4]
    wrong, unsaid, outside = (replace(task, instance_id=f"me__own-{n}") for n, task in enumerate(others))
    wrong = replace(wrong, base_commit="deadbeef")
    unsaid = replace(unsaid, base_commit="")
    outside = replace(outside, files={**outside.files, "../x": "x"})
    tasks, made = [good, wrong, unsaid, outside], []
    monkeypatch.setattr(selection, "wrong_files", lambda task: made.append(task) or wrong_files(task))
    chosen = Selection(TrainingConfig.laptop(), folder, tasks, [])
    chosen.leave_out_invalid(trust_in(tasks))
    chosen.leave_out_missing(Own(lambda tasks: {}), Halt())
    assert chosen.train == [good, unsaid] and made == [wrong, unsaid, outside]  # none that was validated
    (told,) = events(folder, "tasks_left_out")
    assert re.search(
        r"me__own-0: the files give commit \w{40}, not base_commit deadbeef", told["tasks"][wrong.instance_id]
    )
    assert "'../x' lies outside" in told["tasks"][outside.instance_id]

    # One that goes on has the same ones.
    again = Selection(TrainingConfig.laptop(), folder, tasks, [])
    again.leave_out_invalid(trust_in(tasks))
    again.leave_out_missing(Own(lambda tasks: {}), Halt())
    assert again.train == [good, unsaid] and not again.missing


@pytest.fixture
def three_splits(folder) -> Selection:
    """A training task, and two of each of three held-out splits."""
    names = ("held-out", "held-out-a", "held-out-b")
    train, *others = load_tasks()[:7]
    held_out = [replace(task, split=names[n // 2]) for n, task in enumerate(others)]
    return Selection(TrainingConfig.laptop(), folder, [train], held_out)


@pytest.mark.parametrize("lost", ["held-out", "held-out-b"])
def test_a_held_out_split_of_which_nothing_is_left_is_told_and_the_others_are_measured(
    lost, three_splits, folder
):
    missing = {
        task.instance_id: f"no image {n}"
        for n, task in enumerate(three_splits.held_out)
        if task.split == lost
    }
    three_splits.leave_out_missing(Own(lambda tasks: missing), Halt())
    left = [split for split in ("held-out", "held-out-a", "held-out-b") if split != lost]
    assert [task.split for task in three_splits.held_out] == [left[0]] * 2 + [left[1]] * 2
    (note,) = events(folder, "note")
    assert note["text"] == (
        f"the split {lost} is not measured, the others are: no task of it can be opened: {min(missing.values())}"
    )
    (left_out,) = events(folder, "tasks_left_out")
    assert left_out["tasks"] == missing and left_out["splits"] == [lost]


def test_a_split_that_loses_its_tasks_for_several_reasons_is_told_when_the_last_one_goes(
    three_splits, folder
):
    broken, lacking = (task.instance_id for task in three_splits.held_out[2:4])
    three_splits.leave_out_invalid(Trust(not_valid={broken: "not valid: broken"}))
    assert not events(folder, "note")  # one is left
    three_splits.leave_out_missing(Own(lambda tasks: {lacking: "no image"}), Halt())
    (note,) = events(folder, "note")
    assert "the split held-out-a is not measured" in note["text"] and "opened: no image" in note["text"]
    assert [event["splits"] for event in events(folder, "tasks_left_out")] == [[], ["held-out-a"]]


def test_a_split_that_keeps_a_task_is_no_split_that_is_gone(three_splits, folder):
    first = three_splits.held_out[0].instance_id
    three_splits.leave_out_missing(Own(lambda tasks: {first: "no image"}), Halt())
    assert len(three_splits.held_out) == 5 and not events(folder, "note")


def test_a_run_that_loses_all_of_its_held_out_splits_ends(three_splits, folder):
    missing = {task.instance_id: "no image" for task in three_splits.held_out}
    with pytest.raises(RunError, match="none of the 6 held-out tasks can be opened: no image"):
        three_splits.leave_out_missing(Own(lambda tasks: missing), Halt())
    (left_out,) = events(folder, "tasks_left_out")
    assert left_out["splits"] == ["held-out", "held-out-a", "held-out-b"]


def with_splits(source: Path, *named: str) -> list[dict]:
    """Write an own task file, a bundled task for each split; returns the bundled rows."""
    rows = [json.loads(line) for line in BUNDLED.read_text(encoding="utf-8").splitlines()[: len(named)]]
    lines = (json.dumps({**row, "split": split}) + "\n" for row, split in zip(rows, named, strict=True))
    source.write_text("".join(lines))
    return rows


@pytest.mark.parametrize(
    "named, told",
    [
        (["held-out2"], "the tasks of the split held-out2 are neither"),
        (["held-outside", "test"], "the tasks of the split held-outside and of the split test are neither"),
        (["held-out-new"], ""),
    ],
)
def test_splits_that_a_run_does_not_look_for_are_told(named, told, folder, tmp_path):
    source = tmp_path / "own.jsonl"
    with_splits(source, "train", "held-out", *named)
    config = TrainingConfig.laptop(tasks=str(source))
    train = load_tasks(config.tasks)
    Selection(config, folder, train, []).tell_unused()  # nothing is measured: nothing to be told
    assert not events(folder, "note")
    Selection(config, folder, train, all_held_out(config)).tell_unused()
    notes = [event["text"] for event in events(folder, "note")]
    assert len(notes) == bool(told) and all(note.startswith(told) for note in notes)
    assert all("measures held-out and each split whose name begins with held-out-" in note for note in notes)


def test_a_split_that_is_trained_on_is_not_called_unused(folder, tmp_path):
    source = tmp_path / "own.jsonl"
    with_splits(source, "dev", "held-out")
    config = TrainingConfig.laptop(tasks=str(source))
    chosen = load_tasks(config.tasks, split="dev")  # as `TrainingRun(tasks=...)` is given
    Selection(config, folder, chosen, all_held_out(config)).tell_unused()
    assert not events(folder, "note")


def test_held_out_and_each_split_that_is_called_held_out_and_more_is_measured_one_after_the_other(tmp_path):
    source = tmp_path / "own.jsonl"
    named = ["held-out-b", "train", "held-out", "held-out-a", "held-outside", "held-out-b"]
    rows = with_splits(source, *named)
    config = TrainingConfig.laptop(tasks=str(source))
    found = all_held_out(config)
    assert [task.split for task in found] == ["held-out", "held-out-b", "held-out-b", "held-out-a"]
    few = all_held_out(replace(config, evaluation_tasks=1))
    assert [task.split for task in few] == ["held-out", "held-out-b", "held-out-a"]
    source.write_text(json.dumps({**rows[0], "split": "held-out-a"}) + "\n")
    with pytest.raises(TaskError, match="no task of the split 'held-out'"):
        all_held_out(config)


def test_a_run_without_a_task_of_the_right_files_ends_with_the_reason(folder, task, monkeypatch, tmp_path):
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "cache"))
    wrong = replace(task, instance_id="me__own-0", base_commit="deadbeef")
    found = Validation(wrong, Status.BROKEN, "its files are another commit's")
    keep(found, "local", print)
    config = TrainingConfig.laptop(only_valid=False)  # known, and used all the same
    chosen = Selection(config, folder, [task], [wrong])
    chosen.leave_out_invalid(trust_in([task, wrong]))
    with pytest.raises(
        RunError, match=r"none of the 1 held-out tasks can be opened: .*not base_commit deadbeef"
    ):
        chosen.leave_out_missing(Own(lambda tasks: {}), Halt())


def test_a_git_that_fails_says_nothing_of_a_task(task, monkeypatch):
    wrong = replace(task, base_commit="deadbeef")
    assert wrong_files(task) == wrong_files(replace(task, files={})) == "" != wrong_files(wrong)
    monkeypatch.setitem(GIT_ENV, "PATH", "/nowhere")
    assert wrong_files(wrong) == ""
