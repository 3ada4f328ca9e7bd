"""A task: a repository, an issue, and the hidden tests that tell whether a patch solves it.

`Task` has the fields of a SWE-Gym instance and, beside them, how it is tested. `load_tasks` reads the bundled
set or any JSONL file of the same form. Knows nothing of sandboxes, agents or rewards.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUNDLED = Path(__file__).parent / "bundled" / "tasks.jsonl"
INSTANCE_FIELDS = [
    "repo",
    "instance_id",
    "base_commit",
    "version",
    "problem_statement",
    "hints_text",
    "created_at",
    "patch",
    "test_patch",
    "FAIL_TO_PASS",
    "PASS_TO_PASS",
    "environment_setup_commit",
]


class TaskError(ValueError):
    """A task or a file of tasks is malformed; the text says where and what is missing."""


@dataclass(frozen=True)
class Task:
    """One SWE-Gym instance and how it is tested. The instance's field names are SWE-Gym's, in lower case."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str  # the gold patch: a solution, never shown to the agent
    test_patch: str  # the hidden tests, applied only when grading
    fail_to_pass: tuple[str, ...]  # test ids that fail at base_commit and must pass
    pass_to_pass: tuple[str, ...]  # test ids that pass at base_commit and must go on passing
    version: str = ""
    hints_text: str = ""
    created_at: str = ""
    environment_setup_commit: str = ""
    split: str = "train"
    test_command: str = ""  # run in the repository's root; the test files follow it
    parser: str = "pytest"  # how its output is read: pytest, or swegym, which brings its own test command
    image: str = ""  # the container image with the repository at /testbed; "" where the task brings `files`
    setup: str = ""  # shell code that activates the environment for the agent and the tests; "" for none
    files: Mapping[str, str] = field(default_factory=dict, repr=False)  # path -> text at base_commit


def load_tasks(
    source: str | os.PathLike[str] = "bundled",
    ids: Iterable[str] | None = None,
    split: str | None = "train",
) -> list[Task]:
    """Return the tasks of a source, in their order, or in that of `ids` where given.

    source: "bundled", or the path of a JSONL file whose lines have an `instance` with SWE-Gym's fields and
    beside it `split`, `test_command`, `parser` and `files` (path -> text of the repository at base_commit).
    split: "train", "held-out", or None for all; not looked at where ids are named.
    Raises TaskError for a malformed line (naming line and field), an unknown id or an empty selection.
    """
    path = BUNDLED if source == "bundled" else Path(source)
    if source == "swegym" and not path.is_file():
        raise TaskError(
            "the SWE-Gym tasks are not part of this release yet: name a JSONL file with --tasks FILE"
        )
    if not path.is_file():
        raise TaskError(f"no tasks at {path}: the source is 'bundled' or the path of a JSONL file")
    tasks = [task_from_row(line, f"{path.name}, line {n}") for n, line in _lines(path)]
    known = {task.instance_id: task for task in tasks}
    if len(known) < len(tasks):
        raise TaskError(f"{path.name} holds an instance_id twice")
    if ids is not None:
        wanted = list(ids)
        if unknown := [i for i in wanted if i not in known]:
            raise TaskError(f"{path.name} has no task {', '.join(unknown)}; `tasks list` names them all")
        return [known[i] for i in wanted]
    chosen = [task for task in tasks if split is None or task.split == split]
    if not chosen:
        splits = sorted({task.split for task in tasks})
        raise TaskError(f"{path.name} has no task of the split {split!r}; it has {splits}")
    return chosen


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    with path.open(encoding="utf-8", newline="\n") as lines:
        try:
            yield from ((n, line) for n, line in enumerate(lines, 1) if line.strip())
        except UnicodeDecodeError as error:
            raise TaskError(f"{path.name} is not UTF-8: {error}") from None


def task_from_row(line: str, where: str) -> Task:
    """Build a Task from one JSON line; `where` names the line in errors."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON: {error}") from None
    instance = row.get("instance") if isinstance(row, dict) else None
    if not isinstance(instance, dict):
        raise TaskError(f"{where}: field 'instance' is missing")
    if missing := [name for name in INSTANCE_FIELDS if name not in instance]:
        raise TaskError(f"{where}: 'instance' lacks {', '.join(missing)}")
    texts = {
        name: _text(instance, name, where)
        for name in INSTANCE_FIELDS
        if name not in ("FAIL_TO_PASS", "PASS_TO_PASS")
    }
    if not row.get("test_command") or not row.get("files"):
        raise TaskError(
            f"{where}: fields 'test_command' and 'files' say how a task is tested; one is missing"
        )
    files = row["files"]
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise TaskError(f"{where}: field 'files' must map paths to texts")
    for name in ("split", "test_command", "parser"):
        if not isinstance(row.get(name, ""), str):
            raise TaskError(f"{where}: field {name!r} must be a text")
    name = texts["instance_id"]
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise TaskError(
            f"{where}: 'instance_id' names folders, so letters, digits and _.+- only, not {name!r}"
        )
    return Task(
        **texts,
        fail_to_pass=_ids(instance, "FAIL_TO_PASS", where),
        pass_to_pass=_ids(instance, "PASS_TO_PASS", where),
        split=row.get("split", "train"),
        test_command=row["test_command"],
        parser=row.get("parser", "pytest"),
        files=files,
    )


def _text(instance: Mapping[str, Any], name: str, where: str) -> str:
    value = instance[name]
    if not isinstance(value, str):
        raise TaskError(f"{where}: field {name!r} must be a text, not {type(value).__name__}")
    return value


def _ids(instance: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = instance[name]
    if isinstance(value, str):  # some copies of the data set hold the list as a JSON text
        try:
            value = json.loads(value)
        except ValueError:
            raise TaskError(f"{where}: field {name!r} is a text that is no JSON list") from None
    if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
        raise TaskError(f"{where}: field {name!r} must be a list of test ids")
    return tuple(value)


GIT_ENV = {
    "GIT_AUTHOR_NAME": "maintainer",
    "GIT_AUTHOR_EMAIL": "maintainer@example.org",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00+0000",
    "GIT_COMMITTER_NAME": "maintainer",
    "GIT_COMMITTER_EMAIL": "maintainer@example.org",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00+0000",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "LC_ALL": "C.UTF-8",
    "PATH": os.environ.get("PATH", os.defpath),
}


def materialise(task: Task, folder: Path) -> str:
    """Write the task's repository into a new folder as one git commit, and return its hash.

    The same files give the same hash everywhere, so that base_commit is checked: raises TaskError where it
    differs. There is no other history in the repository, no remote, no reflog and no hook.
    """
    folder.mkdir(parents=True)
    for name, text in task.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TaskError(f"{task.instance_id}: file {name!r} lies outside the repository")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    script = (
        "git -c init.defaultBranch=main init -q --template= . && git config core.logAllRefUpdates false"
        " && git config core.autocrlf false && git add -A -f && git commit -q -m 'The state before the fix'"
        " && git checkout -q --detach && git branch -q -D main && git gc -q && git rev-parse HEAD"
    )
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=GIT_ENV, capture_output=True, text=True)
    if done.returncode:
        raise TaskError(f"{task.instance_id}: git could not make the repository: {done.stderr.strip()}")
    commit = done.stdout.strip()
    if task.base_commit and commit != task.base_commit:
        raise TaskError(
            f"{task.instance_id}: the files give commit {commit}, not base_commit {task.base_commit}"
        )
    return commit
