"""What an attempt's commands tell of its habits: five questions, each answered only where it came up.

    look    had it read or searched anything, in an earlier command, when it first tried to edit?
    act     did it change a file at all?
    line    did each edit, tried or done, name its lines, and not replace every match in a file?
    check   did it run tests after a change?
    repair  when those failed, did it change a file again?

Reads commands, their exit codes and what tests printed, so that a habit is what usually goes with it and no proof: a
program of the model's own that edits is not seen. An editor whose lines can't be read off its command (`patch`, Python, a file
written anew) leaves `line` open. An attempt that a limit ended is asked the same questions as one that ended by itself.
Knows nothing of rewards and models.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from .shell_text import Simple, name_of, simple_commands


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


class Result(Protocol):
    @property
    def exit_code(self) -> int: ...
    @property
    def output(self) -> str: ...
    @property
    def timed_out(self) -> bool: ...


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
        for command, result in zip(turn.commands, turn.results, strict=False):
            reader.read(command, result)
    found = reader.found
    return {str(habit): found[habit] for habit in Habit if habit in found}


class _Reader:
    """Goes through an attempt, and knows what was found until here."""

    def __init__(self) -> None:
        self.found: dict[Habit, bool] = {Habit.ACT: False}
        self._looked = self._tried = self._failed = False  # failed: the last tests after a change

    def read(self, command: str, result: Result) -> None:
        looked = self._looked
        for simple in simple_commands(command):
            if _edits(simple):
                self._edit(simple, done=not (simple.last and result.exit_code))
            elif _tests(simple):
                self._test(simple, result)
            elif _looks(simple):
                looked = True
        self._looked = looked  # only now: what this command has shown was not known when it was written
        if not self._tried:
            self.found[Habit.LOOK] = looked

    def _edit(self, simple: Simple, done: bool) -> None:
        found = self.found
        if not self._tried:
            found[Habit.LOOK] = self._looked
        self._tried = True
        names_lines = _names_lines(simple)
        if names_lines is not None:
            found[Habit.LINE] = found.get(Habit.LINE, True) and names_lines
        if done:
            found[Habit.ACT] = True
            found.setdefault(Habit.CHECK, False)
            if self._failed:
                found[Habit.REPAIR] = True
            self._failed = False

    def _test(self, simple: Simple, result: Result) -> None:
        failed = _failed(simple, result)
        if failed is None or not self.found[Habit.ACT]:
            return
        self.found[Habit.CHECK] = True
        self._failed = failed
        if failed:
            self.found.setdefault(Habit.REPAIR, False)


# What a command is, by its program and words.

_READERS = re.compile(
    r"[efz]?grep|rg|ag|ack|b?cat|nl|head|tail|less|more|view|g?awk|sed|find|ls|tree|wc|diff"
)
_GIT_READS = frozenset(("grep", "show", "diff", "log", "blame", "ls-files"))
# Their output is text for a file; that of other programs is a log, which is no edit wherever it goes.
_WRITERS = frozenset(
    ("", ":", "cat", "echo", "printf", "sed", "awk", "gawk", "perl", "head", "tail", "tr", "sort")
)
_PYTHON = re.compile(r"python[\d.]*")
_PYTHON_WRITES = re.compile(
    r"\.write(?:_text|_bytes|lines)?\(|\bopen\([^()]{0,200},\s{0,9}(?:mode=)?['\"][wax]|fileinput\."
)
_ELSEWHERE = ("/tmp", "/dev/", "/var/", "/proc/", "~", "$")  # targets that are not in the repository
_TEST_PROGRAMS = frozenset(("pytest", "py.test", "tox", "nox", "nosetests", "nose2", "trial"))
_TEST_MODULES = _TEST_PROGRAMS | {"unittest", "doctest", "nose", "test"}
_TEST_FILES = re.compile(r"(?:check|run_?tests?|test_\w+|\w+_tests?)\.(?:py|sh)|run_?tests?")
_NOT_RUN = frozenset((4, 5, 126, 127))  # pytest's for no tests, bash's for no program
_FAILURES = re.compile(r"\b[1-9]\d{0,6} (?:failed|errors?)\b|^(?:FAILED|ERROR)\b", re.MULTILINE)


def _edits(simple: Simple) -> bool:
    program, words = simple.program, simple.words
    if program in ("sed", "gsed"):
        return _in_place(words) or _writes(simple)
    if program == "perl":
        return any(re.match(r"-\w*i", word) for word in words[1:]) or _writes(simple)
    if program == "git":
        return words[1:2] in (("apply",), ("am",))
    if program in ("ed", "ex", "patch", "apply_patch", "str_replace"):
        return True
    if program == "tee":
        targets = [word for word in words[1:] if not word.startswith("-")]
        return _by_a_writer(simple) and any(map(_inside, targets))
    if program == "mv":
        return _inside(words[-1])
    if _PYTHON.fullmatch(program) and _PYTHON_WRITES.search(_python_text(simple)):
        return True
    return _writes(simple)


def _in_place(words: tuple[str, ...]) -> bool:
    options = [word for word in words[1:] if word.startswith("-")]
    return any(re.match(r"-(?!-)[nErsz]*i|--in-place", option) for option in options)


def _writes(simple: Simple) -> bool:
    return _by_a_writer(simple) and any(map(_inside, simple.writes))


def _by_a_writer(simple: Simple) -> bool:
    return simple.source in _WRITERS or bool(_PYTHON.fullmatch(simple.source) and not _tests(simple))


def _inside(target: str) -> bool:
    return not target.startswith(_ELSEWHERE)


def _python_text(simple: Simple) -> str:
    words = simple.words
    script = words[words.index("-c") + 1 :][:1] if "-c" in words else ()
    return "\n".join((*script, simple.document))


def _looks(simple: Simple) -> bool:
    if simple.program == "git":
        return simple.words[1:2] != () and simple.words[1] in _GIT_READS
    return bool(_READERS.fullmatch(simple.program))


def _tests(simple: Simple) -> bool:
    """Whether it runs tests. Not one that prints or installs what tests are run with."""
    program, words = simple.program, simple.words[1:]
    if _PYTHON.fullmatch(program):
        if "-m" in words:
            (module, *rest) = words[words.index("-m") + 1 :] or ("",)
            return module in _TEST_MODULES or (module in ("coverage", "django") and "test" in " ".join(rest))
        program, words = name_of(tuple(w for w in words if not w.startswith("-"))[:1]), words[1:]
    if program in ("make", "manage.py"):
        return bool({"test", "tests", "check"} & set(words))
    return program in _TEST_PROGRAMS or bool(_TEST_FILES.fullmatch(program))


def _failed(simple: Simple, result: Result) -> bool | None:
    """Whether tests failed, by the exit code where it is theirs, else by what was printed; None: they were not run."""
    if result.timed_out:
        return False
    if simple.last and not simple.piped:
        return None if result.exit_code in _NOT_RUN else result.exit_code != 0
    return bool(_FAILURES.search(result.output))


def _names_lines(simple: Simple) -> bool | None:
    """Whether a replacement names its lines, and does not go through a whole file; None: can't be told."""
    words = simple.words[1:]
    if simple.program == "perl":
        scripts = [word for word in words if re.match(r"\W*s\W", word)]
        return "$." in " ".join(scripts) if scripts else None
    if simple.program not in ("sed", "gsed") or not _in_place(simple.words):
        return None
    scripts = [after for word, after in itertools.pairwise(words) if word in ("-e", "--expression")]
    scripts += [word.partition("=")[2] for word in words if word.startswith("--expression=")]
    scripts = scripts or [word for word in words if not word.startswith("-")][:1]
    return all(map(_addressed, scripts)) if scripts else None


def _addressed(script: str) -> bool:
    """Whether a sed script begins with the address of a line, or of what stands in it."""
    script = script.lstrip()
    return script[:1] != "" and (script[0].isdigit() or script[0] in "$/\\") and not script.startswith("1,$")


def rates(episodes: Iterable[Mapping[str, bool]]) -> dict[str, tuple[int, int]]:
    """Return habit -> (how often it was there, how often it came up), over some attempts."""
    counts: dict[str, tuple[int, int]] = {}
    for habits in episodes:
        for name, there in habits.items():
            had, of = counts.get(name, (0, 0))
            counts[name] = (had + bool(there), of + 1)
    return {habit: counts[habit] for habit in map(str, Habit) if habit in counts}
