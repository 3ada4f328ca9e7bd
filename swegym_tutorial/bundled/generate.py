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
from .families import PRACTISED, UNPRACTISED, Family
from .issues import KEPT_PHRASINGS, PHRASINGS
from .repository import files_of
from .world import Part, World, make_world, names_of

SEED = 101
TEST_COMMAND = "python -m pytest -rA -q --no-header -p no:cacheprovider"
CREATED = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Split:
    """One split: whose names, which families and phrasings, and how many tasks of each family."""

    name: str
    part: Part
    families: tuple[Family, ...]
    phrasings: tuple[str, ...]
    tasks: int


SPLITS = (
    Split("train", Part.TRAIN, PRACTISED, PHRASINGS, 4),
    Split("held-out", Part.HELD_OUT, PRACTISED, PHRASINGS, 4),  # other names, that is other instances
    Split("held-out-phrasings", Part.HELD_OUT, PRACTISED, KEPT_PHRASINGS, 2),  # other sentences, too
    Split("held-out-families", Part.HELD_OUT, UNPRACTISED, PHRASINGS, 10),  # other families of bugs
)


@dataclass(frozen=True)
class Draft:
    """A world that is to become a task, and the name it goes by."""

    split: str
    name: str
    world: World


def drafts(seed: int) -> Iterator[Draft]:
    """Yield the drafts of all splits. No two of them share a target's name or a repository's.

    Every other task of a family has a twin.
    """
    number = 0
    targets = {}
    for part in (Part.TRAIN, Part.HELD_OUT):
        names = names_of(part)
        targets[part] = iter(random.Random(f"{seed} {part}").sample(names, len(names)))
    for split in SPLITS:
        rng = random.Random(f"{seed} {split.name}")
        for i in range(split.tasks * len(split.families)):
            number += 1
            family = split.families[i % len(split.families)]
            world = make_world(
                rng,
                family,
                names_of(split.part),
                next(targets[split.part]),
                phrasings=split.phrasings,
                twin=(i // len(split.families)) % 2 == 1,
                families=PRACTISED,
            )
            yield Draft(
                split.name, f"{'-'.join(module.name for module in world.modules)}-{number:02d}", world
            )


def row_of(draft: Draft) -> dict[str, Any]:
    """Return a draft's line of the file: makes its repository with git in a temporary folder."""
    world, module = draft.world, draft.world.module
    files = files_of(world, draft.name)
    tested = [f"{module.tests_path}::test_{f.name}" for f in module.functions]
    failing = [f"{module.tests_path}::test_{f.name}" for f in world.buggy]
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
        "FAIL_TO_PASS": failing,
        "PASS_TO_PASS": [test for test in tested if test not in failing],
        "environment_setup_commit": commit,
    }
    return {
        "split": draft.split,
        "instance": instance,
        "test_command": TEST_COMMAND,
        "parser": "pytest",
        "files": files,
    }


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
