"""Tasks in words for people: one line each, or one in full. Knows nothing of where they come from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .task_rows import Task

NOTHING: Mapping[str, str] = {}
SHOWN_TESTS = 20  # of each list; a SWE-Gym task can have thousands
# Lines that tell nothing alone: empty ones, code fences, a traceback's head.
HEAD = re.compile(
    r"[\s#*]*((`{3,}|~{3,})[\w-]*|traceback( \(most recent call last\))?[:\s*]*)?", re.IGNORECASE
)


def listing(
    tasks: Sequence[Task], width: int | None = None, states: Mapping[str, str] = NOTHING
) -> list[str]:
    """Return a line a task: split, id, state, the issue's first line that tells something, cut to `width` columns (None: not cut).

    states: what validation has found, by id; "-" stands for nothing.
    """
    splits = max((len(task.split) for task in tasks), default=0)
    names = max((len(task.instance_id) for task in tasks), default=0)
    lines = []
    for task in tasks:
        issue = _first_line(printable(task.problem_statement).strip())
        line = f"{task.split:{splits}}  {task.instance_id:{names}}  {states.get(task.instance_id, '-'):6}  {issue}".rstrip()
        lines.append(line if width is None or len(line) <= width else f"{line[: max(0, width - 3)]}...")
    return lines


def _first_line(issue: str) -> str:
    lines = issue.split("\n")
    return next((line.strip() for line in lines if not HEAD.fullmatch(line)), lines[0])


def describe(task: Task) -> str:
    """Return a task in full: issue, gold patch, hidden tests, where it runs and how it is tested."""
    about = [f"{task.repo} at {task.base_commit[:12]}" if task.base_commit else task.repo]
    about += [f"version {task.version}" if task.version else "", f"split {task.split}"]
    return "\n".join(
        [
            f"{task.instance_id}  ({', '.join(filter(None, about))})",
            f"\nIssue\n{printable(task.problem_statement).rstrip()}",
            f"\nGold patch\n{printable(task.patch).rstrip()}",
            f"\nTest patch\n{printable(task.test_patch).rstrip()}",
            f"\nRepository: {_repository(task)}",
            *([f"Environment: {task.setup}"] if task.setup else []),
            f"Tested with: {_tested_with(task)}",
            *_tests("FAIL_TO_PASS", task.fail_to_pass),
            *_tests("PASS_TO_PASS", task.pass_to_pass),
        ]
    )


def printable(text: str) -> str:
    """Return text from outside for a terminal: plain line ends, and no control characters but tabs."""
    lines = text.replace("\r\n", "\n")
    return "".join(
        c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\N{REPLACEMENT CHARACTER}"
        for c in lines
    )


def _repository(task: Task) -> str:
    if task.files:
        return f"{len(task.files)} files that the task brings"
    return f"/testbed in the image {task.image}"


def _tested_with(task: Task) -> str:
    if task.parser == "swegym":
        return f"swegym's own test command for {task.repo} {task.version}"
    return task.test_command


def _tests(name: str, ids: Sequence[str]) -> list[str]:
    more = [f"  ... and {len(ids) - SHOWN_TESTS:,} more"] if len(ids) > SHOWN_TESTS else []
    return [f"{name} ({len(ids):,})", *(f"  {printable(i)}" for i in ids[:SHOWN_TESTS]), *more]
