"""The frozen set of bundled tasks: its form, that it is what the generator makes, and that each task is sound."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swegym_tutorial.bundled.families import FAMILIES, PRACTISED, UNPRACTISED
from swegym_tutorial.bundled.generate import SEED, SPLITS, drafts, generate
from swegym_tutorial.bundled.issues import KEPT_PHRASINGS, PHRASINGS
from swegym_tutorial.bundled.repository import ALL_PASS, CHECK, shown_source
from swegym_tutorial.bundled.world import MODULES, Part, World, names_of
from swegym_tutorial.tasks import BUNDLED, INSTANCE_FIELDS, Task, load_tasks, materialise

TASKS = load_tasks("bundled", split=None)
WORLDS = {f"bundled__{draft.name}": draft.world for draft in drafts(SEED)}
SPLIT_NAMES = [split.name for split in SPLITS]
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_generating_again_gives_the_shipped_file_and_another_seed_another(tmp_path):
    assert generate(tmp_path / "again.jsonl") == len(TASKS) == 120
    assert (tmp_path / "again.jsonl").read_bytes() == BUNDLED.read_bytes()
    generate(tmp_path / "other.jsonl", seed=7)
    assert (tmp_path / "other.jsonl").read_bytes() != BUNDLED.read_bytes()


def test_the_splits_are_of_the_families_and_phrasings_that_they_say():
    assert SPLIT_NAMES == ["train", "held-out", "held-out-phrasings", "held-out-families"]
    practised, unpractised = ({family.name for family in some} for some in (PRACTISED, UNPRACTISED))
    assert len(practised) >= 8 and unpractised and not practised & unpractised
    found = {split: [WORLDS[task.instance_id] for task in load_tasks(split=split)] for split in SPLIT_NAMES}
    for split, worlds in found.items():
        families = Counter(world.target.family.name for world in worlds)
        assert set(families) == (unpractised if split == "held-out-families" else practised)
        assert len(set(families.values())) == 1
        assert sum(world.twin is not None for world in worlds) * 2 == len(worlds)
    assert {split: len(worlds) for split, worlds in found.items()} == {
        "train": 40,
        "held-out": 40,
        "held-out-phrasings": 20,
        "held-out-families": 20,
    }


def frames(issue: str, phrasings: tuple[str, ...]) -> list[str]:
    """Return the phrasings that may have made an issue."""
    found = []
    for phrasing in phrasings:
        parts = re.split(r"\{\w+\}", phrasing)
        if re.fullmatch(".+".join(map(re.escape, parts)), issue, re.DOTALL):
            found.append(phrasing)
    return found


def test_kept_phrasings_are_in_one_split_only():
    for task in TASKS:
        kept = task.split == "held-out-phrasings"
        assert bool(frames(task.problem_statement, KEPT_PHRASINGS)) == kept, task.problem_statement
        assert bool(frames(task.problem_statement, PHRASINGS)) != kept, task.problem_statement
    used = {
        f for t in load_tasks(split="held-out-phrasings") for f in frames(t.problem_statement, KEPT_PHRASINGS)
    }
    assert used == set(KEPT_PHRASINGS)


def test_each_line_has_the_fields_of_a_swegym_instance():
    for line in BUNDLED.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert set(row) == {"split", "instance", "test_command", "parser", "files"}
        assert list(row["instance"]) == INSTANCE_FIELDS
        assert row["instance"]["FAIL_TO_PASS"] and row["instance"]["PASS_TO_PASS"]
        assert row["instance"]["environment_setup_commit"] == row["instance"]["base_commit"]


def functions_of(task: Task) -> set[str]:
    trees = [ast.parse(text) for path, text in task.files.items() if path.startswith("src/")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_no_function_repository_or_target_is_shared():
    train = load_tasks("bundled", split="train")
    held_out = [task for task in TASKS if task.split != "train"]
    functions = [set().union(*map(functions_of, tasks)) for tasks in (train, held_out)]
    assert functions[0] and functions[1] and not functions[0] & functions[1]
    for part, used in zip((Part.TRAIN, Part.HELD_OUT), functions, strict=True):
        assert used <= set(names_of(part))
    targets = {world.target.name for world in WORLDS.values()}
    assert len({task.repo for task in TASKS}) == len(targets) == len(TASKS)


def test_the_parts_of_the_names_are_disjoint_and_share_their_words():
    parts = [set(names_of(part)) for part in Part]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 10 * 40
    for part in parts:
        assert {word for name in part for word in name.split("_")} == {
            word for name in set().union(*parts) for word in name.split("_")
        }
    assert not set(MODULES) & {word for part in parts for name in part for word in name.split("_")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_one_fragment_of_a_family_gives_the_right_results(family):
    assert len({family.results(fragment) for fragment in family.fragments}) == len(family.fragments) >= 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_two_fragments_of_any_families_are_said_alike(family):
    said = [words for each in FAMILIES for all_words in each.fragments.values() for words in all_words]
    assert len(said) == len(set(said))
    assert all(len(words) >= 2 for words in family.fragments.values())


def shell(folder: Path, command: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, **options
    )


# What pytest says of base and gold in a sandbox is checked in test_validation.py; this takes a tenth of its time.
RUNNER = """
import importlib, sys
module = importlib.import_module(sys.argv[1][:-3].replace("/", "."))
for name, test in list(vars(module).items()):
    if name.startswith("test_"):
        try:
            test()
        except Exception:
            print("FAILED", f"{sys.argv[1]}::{name}")
        else:
            print("PASSED", f"{sys.argv[1]}::{name}")
"""


def run_tests(folder: Path, task: Task) -> dict[str, str]:
    file = task.fail_to_pass[0].partition("::")[0]
    told = shell(folder, f"{shlex.quote(sys.executable)} -S -c {shlex.quote(RUNNER)} {file}").stdout.split()
    return dict(zip(told[1::2], told[::2], strict=True))


def apply(folder: Path, patch: str) -> None:
    done = shell(folder, "git apply -", input=patch)
    assert done.returncode == 0, done.stderr


def checks(folder: Path) -> tuple[int, str]:
    done = shell(folder, CHECK.replace("python", shlex.quote(sys.executable), 1))
    return done.returncode, done.stdout + done.stderr


def replace_all(folder: Path, world: World, old: str, new: str) -> None:
    shell(folder, f"sed -i 's/{old}/{new}/' {world.module.path}")


def check(task: Task, folder: Path) -> list[str]:
    """Return what is wrong with a task, in words: a list that should be empty."""
    world = WORLDS[task.instance_id]
    old, new, file = world.bug, world.target.fragment, world.module.path
    assert materialise(task, folder) == task.base_commit
    wrong = []
    found = shell(folder, f'git grep -nW --heading "def {world.target.name}("').stdout
    if found != shown_source(world.module, world.target, world.sources(fixed=False)[file]):
        wrong.append(f"git grep shows {found!r}")
    code, said = checks(folder)
    if world.twin and (code != 1 or f"assert {world.twin.name}(" not in said):
        wrong.append(f"the visible tests say {said!r} of a twin")
    if not world.twin and (code, said) != (0, f"{ALL_PASS}\n"):
        wrong.append(f"the visible tests say {said!r}")

    replace_all(folder, world, old, new)
    code, said = checks(folder)
    if code != 1 or f"assert {world.sibling.name}(" not in said:
        wrong.append(f"after a replacement in the file the visible tests say {said!r}")
    shell(folder, f"git checkout -q -- {file}")

    apply(folder, task.test_patch)
    fails, passes = dict.fromkeys(task.fail_to_pass, "FAILED"), dict.fromkeys(task.pass_to_pass, "PASSED")
    if (base := run_tests(folder, task)) != fails | passes:
        wrong.append(f"base: {base}")
    replace_all(folder, world, old, new)
    if all(status == "PASSED" for status in run_tests(folder, task).values()):
        wrong.append("a replacement in the whole file passes")
    shell(
        folder,
        f"git checkout -q -- {file} && sed -i '{world.module.line(world.target)}s/{old}/{new}/' {file}",
    )
    if world.twin and all(status == "PASSED" for status in run_tests(folder, task).values()):
        wrong.append("one line is enough, in spite of the twin")
    if world.twin:
        shell(folder, f"sed -i '{world.module.line(world.twin)}s/{old}/{new}/' {file}")
    by_hand = (folder / file).read_text()
    shell(folder, f"git checkout -q -- {file}")
    apply(folder, task.patch)
    if by_hand != (folder / file).read_text():
        wrong.append("replacing the fragment in its line is not the gold patch")
    if (gold := run_tests(folder, task)) != dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "PASSED"):
        wrong.append(f"gold: {gold}")
    if checks(folder) != (0, f"{ALL_PASS}\n"):
        wrong.append("the visible tests fail with gold")
    return wrong


@pytest.mark.slow
def test_every_task_fails_at_base_passes_with_gold_and_fails_with_a_replacement_in_the_whole_file(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda task: check(task, tmp_path / task.instance_id), TASKS))
    assert {t.instance_id: wrong for t, wrong in zip(TASKS, found, strict=True) if wrong} == {}
