"""Makes the frozen set of bundled tasks: `python -m swegym_tutorial.bundled.generate`.

Each task is a small real repository in the fields of a SWE-Gym instance, with its text and how it is tested.
The same seed gives the same file, byte for byte. Knows nothing of policies or sandboxes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..tasks import BUNDLED, GIT_ENV, Task, materialise
from .world import FAMILIES, Part, World, make_world, names_of

SEED = 101
TASKS_PER_FAMILY = 8  # in each split
TEST_COMMAND = "python -m pytest -rA -q --no-header -p no:cacheprovider"
CREATED = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Draft:
    """A world that is to become a task, and the name it goes by."""

    split: Part
    name: str
    world: World


def drafts(seed: int) -> Iterator[Draft]:
    """Yield the drafts of both splits. No two of them share a target's name or a repository's."""
    number = 0
    for split in (Part.TRAIN, Part.HELD_OUT):
        rng = random.Random(f"{seed} {split}")
        names = names_of(split)
        targets = rng.sample(names, TASKS_PER_FAMILY * len(FAMILIES))
        for i, target in enumerate(targets):
            number += 1
            world = make_world(rng, FAMILIES[i % len(FAMILIES)], names, target)
            modules = "-".join(sorted(module.name for module in world.modules))
            yield Draft(split, f"{modules}-{number:02d}", world)


def row_of(draft: Draft) -> dict[str, Any]:
    """Return a draft's line of the file: makes its repository with git in a temporary folder."""
    world, module = draft.world, draft.world.module
    files = _files(draft)
    tested = [f"{module.tests_path}::test_{f.name}" for f in module.functions]
    target = f"{module.tests_path}::test_{world.target.name}"
    task = Task(
        f"bundled__{draft.name}", f"bundled/{draft.name}", "", world.issue, "", "", (), (), files=files
    )
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder) / "repository"
        commit = materialise(task, repository)
        gold = _diff(repository, {module.path: world.sources(fixed=True)[module.path]})
        hidden = _diff(repository, {module.tests_path: module.tests()})
    instance = {
        "repo": task.repo,
        "instance_id": task.instance_id,
        "base_commit": commit,
        "version": "1.0",
        "problem_statement": task.problem_statement,
        "hints_text": "",
        "created_at": CREATED,
        "patch": gold,
        "test_patch": hidden,
        "FAIL_TO_PASS": [target],
        "PASS_TO_PASS": [test for test in tested if test != target],
        "environment_setup_commit": commit,
    }
    return {
        "split": draft.split,
        "instance": instance,
        "test_command": TEST_COMMAND,
        "parser": "pytest",
        "files": files,
    }


def _files(draft: Draft) -> dict[str, str]:
    """Return path -> text at the base commit, sorted: the target has its bug and no test."""
    modules = sorted(draft.world.modules, key=lambda module: module.name)
    contents = [f"- `{m.path}`: {', '.join(f.name for f in m.functions)}\n" for m in modules]
    readme = [f"# {draft.name}\n\n", "A small package of plain functions:\n\n", *contents]
    files = {
        ".gitignore": "__pycache__/\n.pytest_cache/\n",
        "README.md": "".join([*readme, "\nRun the tests with `python -m pytest`.\n"]),
        "src/__init__.py": "",
        **draft.world.sources(fixed=False),
        **{m.tests_path: m.tests(left_out=draft.world.target.name) for m in modules},
    }
    return dict(sorted(files.items()))


def _diff(repository: Path, changed: Mapping[str, str]) -> str:
    """Return git's diff of some files' new texts against the commit, and undo them."""
    for path, text in changed.items():
        (repository / path).write_text(text, encoding="utf-8", newline="")
    diff = _git(repository, "diff", "--no-color", "--no-ext-diff", "HEAD")
    _git(repository, "checkout", "-q", "--", ".")
    return diff


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=repository, env=GIT_ENV, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def generate(output: Path, seed: int = SEED) -> int:
    """Write the tasks of a seed as JSON lines, and return how many there are."""
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(row_of, drafts(seed)))
    with output.open("w", encoding="utf-8", newline="\n") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
    return len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled tasks.")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, default=BUNDLED)
    arguments = parser.parse_args()
    print(f"{generate(arguments.output, arguments.seed)} tasks in {arguments.output}")


if __name__ == "__main__":
    main()
