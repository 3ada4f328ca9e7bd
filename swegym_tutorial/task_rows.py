"""The Task record, and the JSON rows that hold one: ours, the 293-task file's, SWE-Gym's own.

Knows the forms and what each field may be; nothing of where rows come from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .swegym_tasks import ACTIVATE, image_of

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
TEST_LISTS = ["FAIL_TO_PASS", "PASS_TO_PASS"]
OPTIONAL = ["version", "hints_text", "created_at", "environment_setup_commit"]  # other files leave some out
REQUIRED = [name for name in INSTANCE_FIELDS if name not in OPTIONAL]
PARSERS = ("pytest", "swegym")
LONGEST_ID = 200  # bytes: a file name has 255


class TaskError(ValueError):
    """A task or a file of tasks is malformed or can't be had; the text says where and what is missing."""


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


def read_tasks(data: bytes, name: str) -> list[Task]:
    """Return the tasks in the bytes of a JSONL file, or of a JSON file that holds one list of rows.

    name: what the file is called in errors. Raises TaskError that names the line and the field.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TaskError(f"{name} is not UTF-8: {error}") from None
    return [task_of_row(row, where) for row, where in _rows(text, name)]


def _rows(text: str, name: str) -> Iterator[tuple[Any, str]]:
    if text.lstrip().startswith("["):
        for n, row in enumerate(_json(text, name), 1):
            yield row, f"{name}, row {n}"
        return
    for n, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _json(line, f"{name}, line {n}"), f"{name}, line {n}"


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TaskError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise TaskError(f"{where}: not JSON of tasks: it is nested too deeply") from None


def task_of_row(row: Any, where: str) -> Task:
    """Build a Task from one row; `where` names it in errors. Three forms are known, and further fields ignored:

        {"instance": {SWE-Gym's fields}, "split": ..., how it is tested}
        {"metadata": {"instance": {SWE-Gym's fields}, "split": ...}, "prompt": ..., ...}
        {SWE-Gym's fields, "split": ..., how it is tested}

    How it is tested: `files` (path -> text at base_commit) and `test_command`; or `image`, `setup` and
    `test_command`; or nothing: then it is a SWE-Gym task, with SWE-Gym's image and parser, and `image` or `setup`
    may still name others.
    """
    instance, about = _parts(row, where)
    if missing := [name for name in REQUIRED if instance.get(name) is None]:
        raise TaskError(f"{where}: the instance lacks {', '.join(missing)}")
    texts = {name: _text(instance, name, where) for name in INSTANCE_FIELDS if name not in TEST_LISTS}
    name = texts["instance_id"]
    if not re.fullmatch(r"\w[\w.+-]*", name) or len(name.encode()) > LONGEST_ID:
        raise TaskError(
            f"{where}: 'instance_id' names folders, so letters, digits and _.+- only, at most {LONGEST_ID}, "
            f"not {name[: 2 * LONGEST_ID]!r}"
        )
    if about.get("instance_id", name) != name:
        raise TaskError(f"{where}: 'instance_id' is {about['instance_id']!r} and, in the instance, {name!r}")
    if about.get("split", "train") is None:
        raise TaskError(f"{where}: field 'split' must be a text, not NoneType")
    testing = _testing(texts, about, where)
    commit = texts["base_commit"]
    if not re.fullmatch(r"[0-9a-fA-F]{7,64}", commit) and (commit or not testing["files"]):
        empty = ' ("" where a task brings its files)' if testing["files"] else ""
        raise TaskError(f"{where}: 'base_commit' must be a git commit in hexadecimal{empty}, not {commit!r}")
    told: dict[str, Any] = {**texts, **testing}
    task = Task(
        **told,
        fail_to_pass=_ids(instance, "FAIL_TO_PASS", where),
        pass_to_pass=_ids(instance, "PASS_TO_PASS", where),
        split=_text(about, "split", where) or "train",
    )
    if task.files:  # a task of one's own, not one of a data set that is as it is
        _check_solvable(task, where)
    return task


def _check_solvable(task: Task, where: str) -> None:
    """Refuse what shows without a run that a task has nothing to solve, or cannot be solved."""
    if not task.fail_to_pass:
        raise TaskError(
            f"{where}: field 'FAIL_TO_PASS' is empty: it lists the tests that a patch has to make pass"
        )
    for name, tests in zip(TEST_LISTS, (task.fail_to_pass, task.pass_to_pass), strict=True):
        if not all(test.strip() for test in tests):
            raise TaskError(f"{where}: field {name!r} holds an empty test id")
    if both := set(task.fail_to_pass) & set(task.pass_to_pass):
        raise TaskError(
            f"{where}: field 'PASS_TO_PASS' holds {min(both)!r}, which 'FAIL_TO_PASS' holds too: a test fails or "
            "passes at base_commit"
        )
    if not task.patch.strip():
        raise TaskError(f"{where}: field 'patch' is empty: the gold patch shows that the task can be solved")


def _parts(row: Any, where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a row says of the instance, and what it says beside that."""
    if not isinstance(row, dict):
        raise TaskError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    metadata = row.get("metadata")
    about = {**row, **metadata} if isinstance(metadata, dict) else row
    instance = about.get("instance")
    if isinstance(instance, dict):
        return instance, about
    if instance is None and any(name in row for name in REQUIRED):
        return row, row
    raise TaskError(f"{where}: field 'instance' is missing")


def _testing(texts: Mapping[str, str], about: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return how a task is tested: the Task's fields from test_command on."""
    command, image = _text(about, "test_command", where), _text(about, "image", where)
    files = _files(about, where)
    parser = _text(about, "parser", where) or ("pytest" if command or files else "swegym")
    if parser not in PARSERS:
        raise TaskError(f"{where}: field 'parser' must be {' or '.join(PARSERS)}, not {parser!r}")
    if parser == "swegym":
        if command or files:
            extra = "test_command" if command else "files"
            raise TaskError(
                f"{where}: the parser swegym brings its own test command, so {extra!r} cannot go with it"
            )
        image = image or _swegym_image(texts, where)
    elif not command or bool(files) == bool(image):
        raise TaskError(
            f"{where}: fields 'test_command' and 'files', or 'test_command' and 'image', say how a task is "
            "tested; one is missing, or one too many"
        )
    if image and not re.fullmatch(r"\w[\w./:@-]*", image, re.ASCII):
        raise TaskError(f"{where}: field 'image' must name a container image, not {image!r}")
    setup = ACTIVATE if parser == "swegym" and about.get("setup") is None else _text(about, "setup", where)
    return {"test_command": command, "parser": parser, "image": image, "setup": setup, "files": files}


def _files(about: Mapping[str, Any], where: str) -> Mapping[str, str]:
    """Return path -> text. No path may lead out of the repository, or into git's own folder: git obeys what is there."""
    files = about.get("files") or {}
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise TaskError(f"{where}: field 'files' must map paths to texts")
    for path, text in files.items():
        parts = path.split("/")
        above = ("/".join(parts[:n]) for n in range(1, len(parts)))
        if (
            {"", ".", "..", ".git"} & {part.lower() for part in parts}
            or "\0" in path
            or any(a in files for a in above)
        ):
            raise TaskError(
                f"{where}: field 'files' has {path!r}, which is no path of a file in the repository"
            )
        _check_characters(path + text, "files", where)
    return files


def _swegym_image(texts: Mapping[str, str], where: str) -> str:
    if not texts["version"]:
        raise TaskError(
            f"{where}: neither 'files' nor 'image' with 'test_command' stands beside the instance, so this is a "
            "SWE-Gym task; and its field 'version' is empty, by which swegym finds its test command"
        )
    try:
        return image_of(texts["instance_id"])
    except ValueError as error:
        raise TaskError(f"{where}: field 'instance_id': {error}") from None


def _text(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return a text as it is, line endings included; "" where it is missing or null."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TaskError(f"{where}: field {name!r} must be a text, not {type(value).__name__}")
    _check_characters(value, name, where)
    return value


def _check_characters(text: str, name: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TaskError(f"{where}: field {name!r} holds half of a character (a lone surrogate)") from None


def _ids(instance: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = instance[name]
    if isinstance(value, str):  # some copies of the data set hold the list as a JSON text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise TaskError(f"{where}: field {name!r} is a text that is no JSON list") from None
    if not isinstance(value, list) or not all(isinstance(i, str) for i in value):
        raise TaskError(f"{where}: field {name!r} must be a list of test ids")
    _check_characters("".join(value), name, where)
    return tuple(value)
