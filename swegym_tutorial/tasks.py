"""The sources of tasks and the choice among them, and a task's files as a git repository.

A task is a repository, an issue, and the hidden tests that tell whether a patch solves it; the record is
defined in task_rows.py. Knows nothing of sandboxes, agents or rewards.
"""

from __future__ import annotations

import difflib
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from .download import DownloadError
from .swegym_tasks import ROWS, TRAINING_IDS, swegym_file
from .task_rows import INSTANCE_FIELDS, Task, TaskError, read_tasks

__all__ = ["BUNDLED", "GIT_ENV", "INSTANCE_FIELDS", "Task", "TaskError", "load_tasks", "materialise"]

BUNDLED = Path(__file__).parent / "bundled" / "tasks.jsonl"


def load_tasks(
    source: str | os.PathLike[str] = "bundled",
    ids: Iterable[str] | None = None,
    split: str | None = "train",
    repos: Iterable[str] | None = None,
) -> list[Task]:
    """Return the tasks of a source, in their order, or in that of `ids` where given.

    source: SOURCE or SOURCE:CHOICE. SOURCE is "bundled", "swegym", or the path of a JSONL or JSON file (its forms:
    task_rows.task_of_row). CHOICE is "all", or ids and repositories with commas between, in the order wanted:

        bundled                          the tasks that come with the package
        swegym                           the 31 tasks of the published run, in its order
        swegym:all                       all 293 tasks of the file that they are from
        swegym:getmoto/moto              all of a repository
        swegym:dask__dask-9212,dask__dask-7894,getmoto/moto
        own.jsonl    own.jsonl:me/mine   a file, or a choice from it

    SWE-Gym's file is downloaded once (see swegym_tasks.py); from then on no network is used.
    ids: exactly these, whatever their split and the choice. repos: of all that, only these repositories'. Upper
    and lower case are the same in ids and repositories.
    split: "train", "held-out", another that the rows name, or None for all of the choice. Rows say theirs. In
    SWE-Gym's file all are for training, so there the choice is the training split, and what it leaves is held out.
    Raises TaskError for a malformed row (naming line and field), an unknown id or repository, an empty selection,
    and a download that fails.
    """
    swegym, name, choice, tasks = _source(source)
    chosen = _chosen(tasks, choice or (",".join(TRAINING_IDS) if swegym else "all"), name)
    if swegym:
        trained = {task.instance_id for task in chosen}
        rest = [replace(task, split="held-out") for task in tasks if task.instance_id not in trained]
        chosen = [replace(task, split="train") for task in chosen]
        tasks = [*chosen, *rest]
    if ids is not None:
        found = [task for i in dict.fromkeys(ids) for task in _named(tasks, i, name)]
    else:
        found = tasks if swegym and split is not None else chosen
        found = [task for task in found if split is None or task.split == split]
    if repos is not None:
        wanted = {task.repo.lower() for repo in repos for task in _named(tasks, repo, name, repo=True)}
        found = [task for task in found if task.repo.lower() in wanted]
    if not found:
        raise TaskError(_why_empty(swegym, name, choice, chosen, split, ids is not None or repos is not None))
    return found


def _source(source: str | os.PathLike[str]) -> tuple[bool, str, str, list[Task]]:
    """Return whether a source is SWE-Gym's, its name in messages, the choice, and all of its tasks."""
    text = os.fspath(source)
    head, colon, choice = _split(text)
    if colon and not choice.strip(" ,"):
        raise TaskError(f"{text!r} names nothing behind the colon: name ids, repositories or all")
    if head == "swegym":
        return True, "the SWE-Gym file", choice, _swegym_tasks()
    path = BUNDLED if head == "bundled" else Path(head)
    if not path.is_file():
        raise TaskError(
            f"no tasks at {text}: a source is bundled, swegym, swegym:CHOICE, or the path of a JSONL file"
        )
    tasks = _distinct(read_tasks(path.read_bytes(), path.name), path.name)
    if not tasks:
        raise TaskError(f"{path.name} holds no tasks")
    return False, path.name, choice, tasks


def _split(source: str) -> tuple[str, str, str]:
    """Return what names the source, the colon or "", and the choice."""
    head, colon, choice = source.partition(":")
    if head in ("bundled", "swegym"):
        return head, colon, choice
    if not Path(source).is_file() and Path(source.rpartition(":")[0]).is_file():  # a path may hold colons
        return source.rpartition(":")
    return source, "", ""


def absolute_source(source: str) -> str:
    """Return a source that means the same in every working folder."""
    head, colon, choice = _split(source)
    return source if head in ("bundled", "swegym") else f"{Path(head).absolute()}{colon}{choice}"


def _swegym_tasks() -> list[Task]:
    """Return the tasks of SWE-Gym's file, downloaded first where it is not in the cache. Raises TaskError."""
    try:
        return _tasks_of_swegym_file(swegym_file(_tasks_of_swegym_file))
    except DownloadError as error:
        raise TaskError(str(error)) from error


def _tasks_of_swegym_file(data: bytes) -> list[Task]:
    """Return the tasks in the bytes of the 293-task file. Raises TaskError where the bytes are not that file."""
    tasks = _distinct(read_tasks(data, "the file"), "the file")
    if len(tasks) != ROWS:
        raise TaskError(f"it has {len(tasks)} tasks, not {ROWS}")
    if missing := set(TRAINING_IDS) - {task.instance_id for task in tasks}:
        raise TaskError(f"it lacks {', '.join(sorted(missing))}")
    return tasks


def _distinct(tasks: list[Task], name: str) -> list[Task]:
    ids = Counter(task.instance_id.lower() for task in tasks)
    if twice := [task.instance_id for task in tasks if ids[task.instance_id.lower()] > 1]:
        raise TaskError(f"{name} holds an instance_id twice: {twice[0]}")
    return tasks


def _chosen(tasks: list[Task], choice: str, name: str) -> list[Task]:
    """Return what the text behind a source's colon names, each task once."""
    if choice.strip().lower() == "all":
        return tasks
    items = [item.strip() for item in choice.split(",") if item.strip()]
    return list({t.instance_id: t for i in items for t in _named(tasks, i, name, repo="/" in i)}.values())


def _named(tasks: list[Task], wanted: str, name: str, *, repo: bool = False) -> list[Task]:
    """Return the tasks of a repository, or the one of an id. Raises TaskError where there is none."""
    names = [task.repo if repo else task.instance_id for task in tasks]
    found = [task for task, known in zip(tasks, names, strict=True) if known.lower() == wanted.lower()]
    if not found:
        kind, near = "repository" if repo else "task", difflib.get_close_matches(wanted, names, n=1)
        mend = f"did you mean {near[0]}?" if near else "`tasks list` names them all"
        raise TaskError(f"{name} has no {kind} {wanted}; {mend}")
    return found


def _why_empty(
    swegym: bool, name: str, choice: str, chosen: list[Task], split: str | None, narrowed: bool
) -> str:
    if swegym and split == "held-out" and not narrowed:
        return (
            f"swegym:{choice} trains on all {len(chosen)} tasks of the file, so that none is held out: choose "
            "fewer (swegym alone is the 31 of the published run)"
        )
    splits = ["train", "held-out"] if swegym else sorted({task.split for task in chosen})
    among = " among those" if narrowed else ""
    return f"{name} has no task of the split {split!r}{among}; it has {splits}"


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


class WrongFiles(TaskError):
    """A task's files are not the repository that it says they are, whatever machine makes it."""


def materialise(task: Task, folder: Path) -> str:
    """Write the task's repository into a new folder as one git commit, and return its hash.

    The same files give the same hash everywhere, so that base_commit is checked: raises WrongFiles where it
    differs, and TaskError where git fails. There is no other history in the repository, no remote, no reflog and no hook.
    """
    folder.mkdir(parents=True)
    for name, text in task.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise WrongFiles(f"{task.instance_id}: file {name!r} lies outside the repository")
        if ".git" in name.lower().split("/"):  # settings there are commands that our git would run
            raise WrongFiles(f"{task.instance_id}: file {name!r} lies in a git folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    script = (
        "git -c init.defaultBranch=main init -q --template= . && git config core.logAllRefUpdates false"
        " && git config core.autocrlf false && git add -A -f && git commit -q -m 'The state before the fix'"
        " && git checkout -q --detach && git branch -q -D main && git gc -q && git rev-parse HEAD"
        # No answer may lie in the history: nothing is there but what this one commit holds.
        f' && if test -n "$(git for-each-ref; git remote; ls .git/logs 2> {os.devnull})" -o '
        "$(git rev-list --objects HEAD | wc -l) -ne $(git cat-file --batch-all-objects --batch-check | wc -l); "
        "then echo 'its history shows more than one commit' >&2; exit 1; fi"
    )
    done = subprocess.run(["sh", "-c", script], cwd=folder, env=GIT_ENV, capture_output=True, text=True)
    if done.returncode:
        raise TaskError(f"{task.instance_id}: git could not make the repository: {done.stderr.strip()}")
    commit = done.stdout.strip()
    if not commit.startswith(task.base_commit.lower()):
        raise WrongFiles(
            f"{task.instance_id}: the files give commit {commit}, not base_commit {task.base_commit}: name that "
            'commit, or none ("")'
        )
    return commit


def wrong_files(task: Task) -> str:
    """Return in words why no machine can make the repository of a task's files; "" where nothing says so.

    Makes it once, in a temporary folder. What this machine's git or disk may be at fault for says nothing.
    """
    if not task.files:
        return ""
    with tempfile.TemporaryDirectory(prefix="swegym-") as folder:
        try:
            materialise(task, Path(folder, "repository"))
        except WrongFiles as error:
            return str(error)
        except (TaskError, OSError):
            pass
    return ""
