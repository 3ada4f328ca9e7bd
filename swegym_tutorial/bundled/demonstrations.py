"""Attempts written by rule, for the tiny policy to imitate: a skill, and bad habits on top of it.

A demonstration's first words of thinking announce what it is about to do: look before editing or guess a file,
act or give up, change one line or every match, run the tests or be done, repair what they show or leave it. The
skill (the right command, copied from issue and output) is always shown without fault; only the habits vary, so that
reinforcement learning has habits to change and not a skill to teach. Knows the client's rendering of a
conversation; nothing of models or optimizers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import TrainingConfig
from ..rollout import Chat
from ..sandbox import CommandResult
from ..tasks import Task
from ..tools import observation
from .families import FAMILIES, Family
from .repository import CHECK, checked, shown_source
from .world import MODULES, Function, Part, World, make_world, names_of

SHOWN_CHARS = TrainingConfig.laptop().observation_chars
NAMES = names_of(Part.DEMONSTRATIONS)


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does the good thing, where it comes to it."""

    look: float  # searches for the function before it edits
    act: float  # goes on to an edit after it has looked
    line: float  # names the line, and does not replace in the whole file
    test: float  # runs the tests after its edit
    repair: float  # mends what they show


CLEAN = Habits(look=0.9, act=0.95, line=0.8, test=0.8, repair=0.95)  # to learn the skill from
SHIPPED = Habits(look=0.42, act=0.9, line=0.75, test=0.4, repair=0.8)  # what the policy ends up with
CAREFUL = Habits(look=1.0, act=1.0, line=1.0, test=1.0, repair=1.0)


@dataclass(frozen=True)
class Step:
    """One turn, and what the policy is shown after it; None after the last."""

    turn: str
    shown: str | None


@dataclass(frozen=True)
class Demonstration:
    """One attempt at one world."""

    world: World
    steps: tuple[Step, ...]
    resolves: bool


def call(thought: str, command: str) -> str:
    """Return the text of a turn that runs a command, without the token that ends it."""
    form = f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
    return f"{thought}\n</think>\n\n{form}"


def answer(thought: str, text: str) -> str:
    """Return the text of a turn that ends the attempt."""
    return f"{thought}\n</think>\n\n{text}"


DONE = Step(answer("Done.", "Fixed the bug."), None)
GIVE_UP = Step(answer("Fine.", "No change needed."), None)
LEAVE_IT = Step(answer("Not mine.", "Another test fails."), None)


class Attempt:
    """A demonstrator at work: the files as its edits leave them, and the steps so far."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.texts = world.sources(fixed=False)
        self.steps: list[Step] = []

    def look(self) -> None:
        """Search for the function that the issue names: the output is its file and its lines."""
        module = self.world.module
        output = shown_source(module, self.world.target, self.texts[module.path])
        command = f'git grep -nW --heading "def {self.world.target.name}("'
        self._ran("Look first.", command, 0, output)

    def fix(self) -> None:
        """Replace the wrong fragment in its line."""
        self._edit("Fix the line.", self.world.target, self.world.bug, self.world.target.fragment)

    def replace_all(self) -> None:
        """Replace the fragment wherever it stands in the file, which breaks the sibling."""
        old, new, path = self.world.bug, self.world.target.fragment, self.world.module.path
        lines = self.texts[path].split("\n")
        self.texts[path] = "\n".join(line.replace(old, new, 1) for line in lines)
        self._ran("Replace all.", f"sed -i 's/{old}/{new}/' {path}", 0, "")

    def check(self) -> Function | None:
        """Run the visible tests; returns the function that fails."""
        failing, output = checked(self.world, self.texts)
        self._ran("Run the tests.", CHECK, 1 if failing else 0, output)
        return failing

    def repair(self, failing: Function) -> None:
        """Exchange the two fragments in the line of the function that fails: a twin's bug, or damage of its own."""
        found = {self.world.bug, self.world.target.fragment} - {failing.fragment}
        self._edit("Repair that line.", failing, found.pop(), failing.fragment)

    def guess(self, rng: random.Random) -> None:
        """Edit a file without having looked for the function: often one that does not even exist."""
        right = self.world.target.fragment
        wrong = rng.choice([each for each in self.world.target.family.fragments if each != right])
        path = f"src/{rng.choice(MODULES)}.py"
        there = path in self.texts
        output = "" if there else f"sed: can't read {path}: No such file or directory\n"
        self._ran("Guess the file.", f"sed -i 's/{wrong}/{right}/' {path}", 0 if there else 2, output)

    def _edit(self, thought: str, function: Function, old: str, new: str) -> None:
        module = self.world.module
        number = module.line(function)
        lines = self.texts[module.path].split("\n")
        lines[number - 1] = lines[number - 1].replace(old, new, 1)
        self.texts[module.path] = "\n".join(lines)
        self._ran(thought, f"sed -i '{number}s/{old}/{new}/' {module.path}", 0, "")

    def _ran(self, thought: str, command: str, exit_code: int, output: str) -> None:
        result = CommandResult(exit_code, output, timed_out=False, truncated_bytes=0, seconds=0.0)
        self.steps.append(Step(call(thought, command), observation(result, SHOWN_CHARS)))

    def ended(self, last: Step) -> Demonstration:
        resolves = self.texts == self.world.sources(fixed=True)
        return Demonstration(self.world, (*self.steps, last), resolves)


def attempt_at(rng: random.Random, world: World, habits: Habits) -> Demonstration:
    """Draw an attempt at a world."""
    attempt = Attempt(world)
    if rng.random() >= habits.look:
        attempt.guess(rng)
        return attempt.ended(DONE)
    attempt.look()
    if rng.random() >= habits.act:
        return attempt.ended(GIVE_UP)
    if rng.random() >= habits.line:
        attempt.replace_all()
    else:
        attempt.fix()
    if rng.random() >= habits.test:
        return attempt.ended(DONE)
    failing = attempt.check()
    if failing is not None:
        if rng.random() >= habits.repair:
            return attempt.ended(LEAVE_IT)
        attempt.repair(failing)
    return attempt.ended(DONE)


def demonstrate(rng: random.Random, habits: Habits, families: Sequence[Family] = FAMILIES) -> Demonstration:
    """Draw a world and an attempt at it. No name in it occurs in a bundled task."""
    return attempt_at(rng, make_world(rng, rng.choice(families), NAMES), habits)


def prompt_tokens(chat: Chat, issue: str) -> list[int]:
    """Return the first turn's prompt, as an attempt at a task with this issue has it."""
    return chat.prompt(Task("demonstration", "demonstration", "", issue, "", "", (), ()))


def encode(chat: Chat, demonstration: Demonstration) -> tuple[list[int], list[bool]]:
    """Return the tokens, encoded piece by piece as the client does it, and which of them the policy says."""
    tokens = prompt_tokens(chat, demonstration.world.issue)
    said = [False] * len(tokens)
    for step in demonstration.steps:
        turn = chat.encode(step.turn) + chat.stop_tokens
        shown = [] if step.shown is None else chat.observations([step.shown], stopped=True)
        tokens += turn + shown
        said += [True] * len(turn) + [False] * len(shown)
    return tokens, said
