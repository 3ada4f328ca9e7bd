"""Which tasks a run goes without, and what it makes of a backend that cannot tell."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from swegym_tutorial.trust import keep, trust_in
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


def test_every_split_whose_name_begins_with_held_out_is_measured_one_after_the_other(tmp_path):
    source = tmp_path / "own.jsonl"
    rows = [json.loads(line) for line in BUNDLED.read_text(encoding="utf-8").splitlines()[:6]]
    named = ["held-out-b", "train", "held-out", "held-out-a", "held-outside", "held-out-b"]
    source.write_text(
        "".join(json.dumps({**row, "split": split}) + "\n" for row, split in zip(rows, named, strict=True))
    )
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
