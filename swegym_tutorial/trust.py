"""What validation has found out about tasks, kept in the cache folder, and what a run makes of it.

One JSON file a task, named by its id and by a key of all that it is: a task that changes loses its record. Knows
nothing of how tasks are tried (validation.py) or trained on.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .download import cache_folder
from .events import write_atomically
from .tasks import Task, load_tasks

if TYPE_CHECKING:
    from .config import TrainingConfig
    from .grading import Grader
    from .sandbox import SandboxBackend
    from .validation import Validation

VALID, BROKEN, FLAKY = "valid", "broken", "flaky"
NOT_VALID = "not valid: "  # how the reason begins for which a run leaves a task out


@dataclass(frozen=True)
class Record:
    """What is known of one task. The statuses are of the tests in its lists: id -> PASSED, FAILED, ..."""

    instance_id: str
    key: str
    status: str  # valid | broken | flaky
    why: str  # "" where it is valid
    tries: int
    sandbox: str  # the kind that it was tried in
    when: str  # in UTC
    package: str  # version
    base_seconds: float  # of the tests on base, the tries' mean
    gold_seconds: float  # of grading the gold patch
    told: int  # tests that told a result with the gold patch, listed or not
    base: Mapping[str, str] = field(default_factory=dict)
    gold: Mapping[str, str] = field(default_factory=dict)


def key_of(task: Task) -> str:
    """Return a hash of all that a verdict on a task depends on."""
    parts = [task.base_commit.strip().lower(), task.patch, task.test_patch, task.test_command, task.image]
    parts += [task.setup, task.parser, task.repo.lower(), task.version]
    told = [parts, sorted(task.fail_to_pass), sorted(task.pass_to_pass), sorted(task.files.items())]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def folder() -> Path:
    return cache_folder() / "validations"


def _path(task: Task) -> Path:
    return folder() / f"{task.instance_id}-{key_of(task)[:16]}.json"


def record_of(validation: Validation, sandbox: str) -> Record:
    """Return what is worth keeping of a task's tries, which ended just now in a sandbox of that kind."""
    v = validation
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    about = (v.task.instance_id, key_of(v.task), str(v.status), v.why, v.tries, sandbox, when, __version__)
    seconds = (round(v.base_seconds, 3), round(v.gold_seconds, 3))
    return Record(*about, *seconds, v.told, dict(v.base), dict(v.gold))


def keep(validation: Validation, sandbox: str, warn: Callable[[str], None]) -> None:
    """Keep what is known of a task, instead of what was known before; `warn` is told where that cannot be."""
    if validation.status not in (VALID, BROKEN, FLAKY):
        return  # the sandbox failed: that says nothing
    path = _path(validation.task)
    text = json.dumps(asdict(record_of(validation, sandbox)), indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text + "\n")
    except OSError as error:
        warn(
            f"what is known of {validation.task.instance_id} could not be kept: {error}. Name a folder that can "
            "be written to with the environment variable SWEGYM_TUTORIAL_CACHE"
        )


def recall(task: Task) -> Record | None:
    """Return what is known of a task, None where that is nothing, or nothing that can be read."""
    try:
        told: dict[str, Any] = json.loads(_path(task).read_text(encoding="utf-8"))
        record = Record(**{name: told[name] for name in Record.__dataclass_fields__})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    sound = record.key == key_of(task) and record.status in (VALID, BROKEN, FLAKY)
    return record if sound and isinstance(record.gold, dict) else None


def recall_all(tasks: Iterable[Task]) -> dict[str, Record]:
    """Return what is known: instance_id -> record."""
    found = {task.instance_id: recall(task) for task in tasks}
    return {name: record for name, record in found.items() if record is not None}


@dataclass(frozen=True)
class Trust:
    """What a run needs to know of its tasks."""

    not_valid: Mapping[str, str] = field(default_factory=dict)  # instance_id -> why
    flaky: frozenset[str] = frozenset()  # instance_ids
    gold: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # valid task -> test -> status
    told: Mapping[str, int] = field(default_factory=dict)  # valid task -> tests that told a result with gold
    never_validated: tuple[str, ...] = ()  # instance_ids; none of the bundled, whose own tests validate them


def trust_in(tasks: Sequence[Task]) -> Trust:
    """Look up what is known of tasks."""
    known = recall_all(tasks)
    unknown = [task for task in tasks if task.instance_id not in known and key_of(task) not in _bundled()]
    return Trust(
        not_valid={
            name: f"{NOT_VALID}{record.status}: {record.why}"
            for name, record in known.items()
            if record.status != VALID
        },
        flaky=frozenset(name for name, record in known.items() if record.status == FLAKY),
        gold={name: record.gold for name, record in known.items() if record.status == VALID},
        told={name: record.told for name, record in known.items() if record.status == VALID},
        never_validated=tuple(task.instance_id for task in unknown),
    )


def make_grader(sandboxes: SandboxBackend, config: TrainingConfig, trust: Trust) -> Grader:
    """Return the grader of a run, which heeds what validation has found."""
    from .grading import Grader

    return Grader(
        sandboxes,
        config,
        gold=trust.gold,
        told=trust.told,
        flaky=trust.flaky,
        share_verdicts=config.share_verdicts,
        grade_empty_patches=config.grade_empty_patches,
    )


@cache
def _bundled() -> frozenset[str]:
    return frozenset(key_of(task) for task in load_tasks("bundled", split=None))


def table_path(source: str) -> Path:
    """Return where the table of a source's tasks goes by default."""
    return folder() / f"table-{re.sub(r'[^a-zA-Z0-9.-]+', '-', source).strip('-')[-60:]}.md"


def table_text(validations: Sequence[Validation], sandbox: str, times: int) -> str:
    """Return the findings as a table in Markdown, what is not valid first."""
    counts = {status: sum(v.status == status for v in validations) for status in _statuses(validations)}
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines = [
        f"# {told}",
        "",
        f"{len(validations)} tasks, {times} tries each, sandbox {sandbox}, swegym_tutorial {__version__}, "
        f"{time.strftime('%Y-%m-%d %H:%M')}",
        "",
        "| task | state | tries | base, s | gold, s | tests told | why |",
        "|---|---|--:|--:|--:|--:|---|",
    ]
    for v in sorted(validations, key=lambda v: v.valid):
        why = " ".join(v.why.split()).replace("|", "\\|")
        seconds = f"{v.base_seconds:.2f} | {v.gold_seconds:.2f}"
        lines.append(f"| {v.task.instance_id} | {v.status} | {v.tries} | {seconds} | {v.told} | {why} |")
    return "\n".join(lines) + "\n"


def _statuses(validations: Sequence[Validation]) -> list[str]:
    found = {str(v.status) for v in validations}
    return [status for status in (VALID, BROKEN, FLAKY, "unchecked") if status in found]
