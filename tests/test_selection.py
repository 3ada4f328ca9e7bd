"""Which tasks a run goes without, and what it makes of a backend that cannot tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from swegym_tutorial import TrainingConfig, load_tasks, selection
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.connect import RunError
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.halt import Halt, Stopped
from swegym_tutorial.sandbox import SandboxError
from swegym_tutorial.selection import Selection


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
