"""What an attempt's commands tell of its habits: five questions, each answered only where it came up.

    look    had it read or searched anything, in an earlier turn, when it first tried to edit? Or by its end, if it never did
    act     did it change a file at all?
    line    did each edit, tried or done, name its lines, and not replace every match in a file?
    check   did it run tests after a change?
    repair  when those failed, did it change a file again?

Reads commands, their exit codes and what tests printed, so that a habit is what usually goes with it and no proof: a
program of the model's own that edits is not seen, a new file is a change like another (but not one that is called
repro.py or the like), and a replacement that happens to match one line still goes through the whole file. An editor whose
lines can't be read off its command (`patch`, Python, a file written anew) leaves `line` open. An attempt that a limit
ended is asked the same questions as one that ended by itself. Knows nothing of rewards and models.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from .command_kinds import Result, edits, looks, names_lines, runs_tests, tests_failed
from .shell_text import Simple, simple_commands


class Habit(StrEnum):
    """The habits, in the order in which an attempt comes to them."""

    LOOK = "look"
    ACT = "act"
    LINE = "line"
    CHECK = "check"
    REPAIR = "repair"


MEANINGS: Mapping[Habit, str] = {
    Habit.LOOK: "looks before it edits",
    Habit.ACT: "changes a file before it stops",
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


class Turn(Protocol):
    """A turn of an attempt: rollout.Turn is one, and so is a recorded one that was read back."""

    @property
    def commands(self) -> tuple[str, ...]: ...

    @property
    def results(self) -> Sequence[Result]: ...


def habits_of(turns: Iterable[Turn]) -> dict[str, bool]:
    """Return habit -> whether an attempt has it, without those that never came up. Of an attempt that ran nothing
    only "act" is told."""
    reader = _Reader()
    for turn in turns:
        reader.read(turn)
    found = reader.found
    return {str(habit): found[habit] for habit in Habit if habit in found}


class _Reader:
    """Goes through an attempt, and knows what was found until here."""

    def __init__(self) -> None:
        self.found: dict[Habit, bool] = {Habit.ACT: False}
        self._looked = self._tried = self._failed = False  # failed: the last tests after a change

    def read(self, turn: Turn) -> None:
        looked, ran = self._looked, False
        for command, result in zip(turn.commands, turn.results, strict=False):
            looked, ran = self._command(simple_commands(command), result) or looked, True
        self._looked = looked  # only now: what a turn has shown was not known when it was written
        if ran and not self._tried:
            self.found[Habit.LOOK] = looked

    def _command(self, simples: Sequence[Simple], result: Result) -> bool:
        """Take in one command; returns whether it reads or searches."""
        tested = any(runs_tests(simple) and tests_failed(simple, result) is not None for simple in simples)
        looked = False
        for simple in simples:
            if edits(simple):
                self._edit(
                    simple, _went_well(simple, result) or (simple.decides and not simple.last and tested)
                )
            elif runs_tests(simple):
                self._test(tests_failed(simple, result))
            elif looks(simple):
                looked = True
        return looked

    def _edit(self, simple: Simple, done: bool) -> None:
        found = self.found
        if not self._tried:
            found[Habit.LOOK] = self._looked
        self._tried = True
        lines = names_lines(simple)
        if lines is not None:
            found[Habit.LINE] = found.get(Habit.LINE, True) and lines
        if done:
            found[Habit.ACT] = True
            found.setdefault(Habit.CHECK, False)
            if self._failed:
                found[Habit.REPAIR] = True
            self._failed = False

    def _test(self, failed: bool | None) -> None:
        if failed is None or not self.found[Habit.ACT]:
            return
        self.found[Habit.CHECK] = True
        self._failed = failed
        if failed:
            self.found.setdefault(Habit.REPAIR, False)


def _went_well(simple: Simple, result: Result) -> bool:
    """Whether it did, as far as the exit code can tell."""
    return result.exit_code == 0 or not simple.decides


def rates(episodes: Iterable[Mapping[str, bool]]) -> dict[str, tuple[int, int]]:
    """Return habit -> (how often it was there, how often it came up), over some attempts."""
    counts: dict[str, tuple[int, int]] = {}
    for habits in episodes:
        for name, there in habits.items():
            had, of = counts.get(name, (0, 0))
            counts[name] = (had + bool(there), of + 1)
    return {habit: counts[habit] for habit in map(str, Habit) if habit in counts}
