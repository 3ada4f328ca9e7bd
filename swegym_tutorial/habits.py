"""What an attempt's commands tell of its habits: five questions, each answered only where it came up.

    look    did it read or search before its first edit?
    line    did each of its edits name lines, and not replace every match in a file?
    check   did it run tests after an edit?
    repair  when those failed, did it edit again?
    act     did it edit at all?

Reads the text of commands and their exit codes, so that a habit is what usually goes with it and no proof: a
program of its own that edits is not seen. Knows nothing of rewards and models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol


class Habit(StrEnum):
    """The habits, in the order in which an attempt comes to them."""

    LOOK = "look"
    ACT = "act"
    LINE = "line"
    CHECK = "check"
    REPAIR = "repair"


MEANINGS: Mapping[Habit, str] = {
    Habit.LOOK: "looks before it edits",
    Habit.ACT: "doesn't stop before an edit",
    Habit.LINE: "changes one line and not every match",
    Habit.CHECK: "runs the tests after an edit",
    Habit.REPAIR: "repairs what they show",
}


IN_SHORT: Mapping[Habit, str] = {
    Habit.LOOK: "looks first",
    Habit.ACT: "edits",
    Habit.LINE: "one line only",
    Habit.CHECK: "runs the tests",
    Habit.REPAIR: "repairs",
}


class Result(Protocol):
    @property
    def exit_code(self) -> int: ...


class Turn(Protocol):
    """A turn of an attempt: rollout.Turn is one, and so is a recorded one that was read back."""

    @property
    def commands(self) -> tuple[str, ...]: ...

    @property
    def results(self) -> tuple[Result, ...]: ...


_START = r"(?:^|[;&|(]\s*|\n\s*)"  # of a command within a line
_LOOK = re.compile(
    _START
    + r"(?:git\s+(?:grep|show|diff|log)|grep|rg|ack|cat|nl|head|tail|less|more|view|awk|find|ls|sed\s+-n)\b"
)
_SED = re.compile(
    _START + r"sed\s+(?:-[-\w]+\s+)*?(?:-i\S*|--in-place\S*)\s+(?:-e\s+)?(?P<script>'[^']*'|\"[^\"]*\"|\S+)"
)
_EDIT = re.compile(
    _START
    + r"(?:perl\s+-\S*i|ed\s|patch\b|git\s+apply\b|tee\b|apply_patch\b|str_replace)|(?<![0-9&])>>?\s*(?!/dev/|&)[\w./]"
)
_PYTHON_WRITES = re.compile(r"\bpython\S*\b.*(?:\.write\(|write_text\(|\bopen\([^)]*['\"][wa]\b)", re.DOTALL)
_ADDRESSED = re.compile(r"^['\"]?\s*(?:\d|/.+?/\s*[,sicadIC{])")
_TESTS = re.compile(
    r"\b(?:pytest|unittest|doctest|tox|nox|check\.py|runtests\S*|manage\.py\s+test|make\s+(?:test|check))\b"
)


def habits_of(turns: Iterable[Turn]) -> dict[str, bool]:
    """Return habit -> whether an attempt has it, without those that never came up.

    An attempt that never edits has "act" false, and "look" where it ran anything.
    """
    looked = edited = False
    found: dict[Habit, bool] = {}
    failed = False  # the last tests after an edit
    for command, result in _ran(turns):
        if _edits(command):
            if not edited:
                found[Habit.LOOK] = looked
            found[Habit.LINE] = found.get(Habit.LINE, True) and _names_lines(command)
            found.setdefault(Habit.CHECK, False)
            if failed:
                found[Habit.REPAIR] = True
            edited, failed = True, False
        elif _LOOK.search(command):
            looked = True
        if edited and _TESTS.search(command):
            found[Habit.CHECK] = True
            failed = result.exit_code != 0
            if failed:
                found.setdefault(Habit.REPAIR, False)
    found[Habit.ACT] = edited
    if not edited and looked:
        found[Habit.LOOK] = True
    return {str(habit): found[habit] for habit in Habit if habit in found}


def _ran(turns: Iterable[Turn]) -> Iterable[tuple[str, Result]]:
    for turn in turns:
        yield from zip(turn.commands, turn.results, strict=False)


def _edits(command: str) -> bool:
    return bool(_SED.search(command) or _EDIT.search(command) or _PYTHON_WRITES.search(command))


def _names_lines(command: str) -> bool:
    """Whether no `sed` in it replaces in a whole file; an editor of another kind is taken to be careful."""
    return all(_ADDRESSED.match(found["script"]) for found in _SED.finditer(command))


def rates(episodes: Iterable[Mapping[str, bool]]) -> dict[str, tuple[int, int]]:
    """Return habit -> (how often it was there, how often it came up), over some attempts."""
    counts: dict[str, tuple[int, int]] = {}
    for habits in episodes:
        for name, there in habits.items():
            had, of = counts.get(name, (0, 0))
            counts[name] = (had + bool(there), of + 1)
    return {habit: counts[habit] for habit in map(str, Habit) if habit in counts}
