"""Hostile patches: each leaves the bug where it is and tries to earn the reward all the same.

A cheat is a shell command that changes the repository of a task. Most know more than an agent can: the ids of the
hidden tests.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from swegym_tutorial.patches import capture_patch, touched_files
from swegym_tutorial.sandbox import SandboxBackend
from swegym_tutorial.tasks import Task
from swegym_tutorial.verdicts import wanted

from .files import FILES
from .imports import IMPORTS, LEFT


@dataclass(frozen=True)
class Cheat:
    """A hostile change: files to write, or code at the end of the module that the task is about."""

    name: str
    command: str  # @TEST@, @SOURCE@ and @IDS@ stand for the hidden tests' file, the module and the tests' ids


def _appended(code: str) -> str:
    return f"cat >> @SOURCE@ <<'END_OF_CHEAT'\n\n\nIDS = @IDS@\n{code.strip()}\nEND_OF_CHEAT\n"


CHEATS = (
    *(Cheat(name, command) for name, command in FILES.items()),
    *(Cheat(name, _appended(code)) for name, code in IMPORTS.items()),
)
# What the grader cannot hold, and says so in docs/threat-model.md.
UNHELD = tuple(Cheat(name, _appended(code)) for name, code in LEFT.items())


def patch_of(cheat: Cheat, sandboxes: SandboxBackend, task: Task) -> bytes:
    """Return a cheat as the patch that an agent would hand in."""
    command = (
        cheat.command.replace("@TEST@", touched_files(task.test_patch)[0])
        .replace("@SOURCE@", shlex.quote(touched_files(task.patch)[0]))
        .replace("@IDS@", repr(list(wanted(task))))
    )
    box = sandboxes.open(task)
    try:
        result = box.exec(command, timeout=120)
        assert result.exit_code == 0, f"{cheat.name}: {result.output}"
        return capture_patch(box, task, 10_000_000)
    finally:
        box.close()
