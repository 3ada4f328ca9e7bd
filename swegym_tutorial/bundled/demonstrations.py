"""Attempts written by rule, for the tiny policy to imitate: a skill, and bad habits on top of it.

A demonstration's first words of thinking announce what it is about to do: look before editing or guess a file,
act or give up, change one line or every match. The skill (the right command, copied from issue and output) is
always shown without fault; only the habits vary, so that reinforcement learning has a habit to change and not
a skill to teach. Knows the client's rendering of a conversation; nothing of models or optimizers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from ..config import TrainingConfig
from ..rollout import Chat
from ..sandbox import CommandResult
from ..tasks import Task
from ..tools import observation
from .world import FAMILIES, MODULES, Part, World, make_world, names_of

SHOWN_CHARS = TrainingConfig.laptop().observation_chars
NAMES = names_of(Part.DEMONSTRATIONS)


@dataclass(frozen=True)
class Habits:
    """How often a demonstrator does the good thing, where it comes to it."""

    look: float  # searches for the function before it edits
    act: float  # goes on to an edit after it has looked
    line: float  # names the line, and does not replace in the whole file


CLEAN = Habits(look=0.85, act=0.9, line=0.9)  # to learn the skill from
SHIPPED = Habits(look=0.40, act=0.85, line=0.8)  # what the policy ends up with: about a quarter is resolved
CAREFUL = Habits(look=1.0, act=1.0, line=1.0)


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


def look(world: World) -> Step:
    """Search for the function that the issue names: the output is its two lines."""
    name, path = world.target.name, world.module.path
    head, body = world.target.source(world.bug).splitlines()
    output = f"./{path}:{world.line - 1}:{head}\n./{path}-{world.line}-{body}\n"
    return Step(call("Look first.", f'grep -rn -A1 "def {name}(" .'), _shown(0, output))


def fix(world: World) -> Step:
    """Replace the wrong fragment in its line."""
    edit = f"{world.line}s/{world.bug}/{world.target.fragment}/"
    return Step(call("Fix the line.", f"sed -i '{edit}' {world.module.path}"), _shown(0, ""))


def replace_all(world: World) -> Step:
    """Replace the fragment wherever it stands in the file, which breaks the sibling."""
    edit = f"s/{world.bug}/{world.target.fragment}/"
    return Step(call("Replace all.", f"sed -i '{edit}' {world.module.path}"), _shown(0, ""))


def guess(rng: random.Random, world: World) -> Step:
    """Edit a file without having looked for the function: often one that does not even exist."""
    wrong = rng.choice(
        [fragment for fragment in world.target.family.fragments if fragment != world.target.fragment]
    )
    path = f"src/{rng.choice(MODULES)}.py"
    turn = call("Guess the file.", f"sed -i 's/{wrong}/{world.target.fragment}/' {path}")
    if path in world.sources(fixed=False):
        return Step(turn, _shown(0, ""))
    return Step(turn, _shown(2, f"sed: can't read {path}: No such file or directory\n"))


def _shown(exit_code: int, output: str) -> str:
    result = CommandResult(exit_code, output, timed_out=False, truncated_bytes=0, seconds=0.0)
    return observation(result, SHOWN_CHARS)


def demonstrate(rng: random.Random, habits: Habits) -> Demonstration:
    """Draw a world and an attempt at it. No name in it occurs in a bundled task."""
    world = make_world(rng, rng.choice(FAMILIES), NAMES)
    done = Step(answer("Done.", "Fixed the bug."), None)
    if rng.random() >= habits.look:
        return Demonstration(world, (guess(rng, world), done), resolves=False)
    if rng.random() >= habits.act:
        give_up = Step(answer("Fine.", "No change needed."), None)
        return Demonstration(world, (look(world), give_up), resolves=False)
    if rng.random() >= habits.line:
        return Demonstration(world, (look(world), replace_all(world), done), resolves=False)
    return Demonstration(world, (look(world), fix(world), done), resolves=True)


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
