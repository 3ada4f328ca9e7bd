"""The frozen set of bundled tasks: its form, that it is what the generator makes, and that each task is sound."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swegym_tutorial.bundled.generate import drafts, generate
from swegym_tutorial.bundled.world import FAMILIES, MODULES, Part, names_of
from swegym_tutorial.tasks import BUNDLED, INSTANCE_FIELDS, Task, load_tasks, materialise

TASKS = load_tasks("bundled", split=None)
ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def test_generating_again_gives_the_shipped_file_and_another_seed_another(tmp_path):
    assert generate(tmp_path / "again.jsonl") == 64
    assert (tmp_path / "again.jsonl").read_bytes() == BUNDLED.read_bytes()
    generate(tmp_path / "other.jsonl", seed=7)
    assert (tmp_path / "other.jsonl").read_bytes() != BUNDLED.read_bytes()


def test_each_split_has_32_tasks_eight_of_each_family():
    for split in (Part.TRAIN, Part.HELD_OUT):
        assert len(load_tasks("bundled", split=split)) == 32
        families = [draft.world.target.family.name for draft in drafts(101) if draft.split is split]
        assert {family.name: families.count(family.name) for family in FAMILIES} == {
            "arith": 8,
            "cmp": 8,
            "builtin": 8,
            "const": 8,
        }


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


def target_of(task: Task) -> str:
    match = re.fullmatch(r"Function (\w+) should return .+\.", task.problem_statement)
    assert match
    return match[1]


def test_no_function_repository_or_target_is_shared():
    train, held_out = (load_tasks("bundled", split=split) for split in ("train", "held-out"))
    functions = [set().union(*map(functions_of, tasks)) for tasks in (train, held_out)]
    assert functions[0] and functions[1] and not functions[0] & functions[1]
    for part, used in zip((Part.TRAIN, Part.HELD_OUT), functions, strict=True):
        assert used <= set(names_of(part))
    assert not {task.repo for task in train} & {task.repo for task in held_out}
    assert len({task.repo for task in TASKS}) == len({target_of(task) for task in TASKS}) == 64


def test_the_parts_of_the_names_are_disjoint_and_share_their_words():
    parts = [set(names_of(part)) for part in Part]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 8 * 32
    for part in parts:
        assert {word for name in part for word in name.split("_")} == {
            word for name in set().union(*parts) for word in name.split("_")
        }
    assert not set(MODULES) & {word for part in parts for name in part for word in name.split("_")}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_only_one_fragment_of_a_family_gives_the_right_results(family):
    results = set()
    for fragment in family.fragments:
        body = f"return{family.expression.format(a='x', b='y', fragment=fragment)}"
        namespace: dict[str, object] = {}
        exec(f"def f({family.parameters.format(a='x', b='y')}):\n    {body}\n", namespace)
        results.add(tuple(eval(f"f({call})", namespace) for call in family.calls))
    assert len(results) == len(family.fragments) >= 3


def shell(folder: Path, command: str, **options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT, **options
    )


def run_tests(folder: Path, task: Task) -> dict[str, str]:
    command = task.test_command.replace("python", shlex.quote(sys.executable), 1)
    file = task.fail_to_pass[0].partition("::")[0]
    output = shell(folder, f"{command} {file}").stdout
    return {
        test: status for status, test in re.findall(r"^(PASSED|FAILED|ERROR) (\S+)", output, re.MULTILINE)
    }


def apply(folder: Path, patch: str) -> None:
    done = shell(folder, "git apply -", input=patch)
    assert done.returncode == 0, done.stderr


def check(task: Task, folder: Path) -> list[str]:
    """Return what is wrong with a task, in words: a list that should be empty."""
    assert materialise(task, folder) == task.base_commit
    wrong = []
    found = shell(folder, f'grep -rn -A1 "def {target_of(task)}(" .').stdout
    match = re.fullmatch(r"\./(src/\w+\.py):(\d+):def .+\n\./\1-(\d+)-    return .+\n", found)
    if not match or int(match[3]) != int(match[2]) + 1:
        wrong.append(f"grep shows {found!r}")
        return wrong
    file, line = match[1], match[3]
    before, after = [row[1:] for row in task.patch.splitlines()[4:] if row[0] in "+-"]
    assert (folder / file).read_text().splitlines()[int(line) - 1] == before
    family = next(d.world.target.family for d in drafts(101) if d.world.target.name == target_of(task))
    old, new = next(
        (old, new) for old in family.fragments for new in family.fragments
        if old != new and before.replace(old, new) == after
    )  # fmt: skip

    apply(folder, task.test_patch)
    fails, passes = dict.fromkeys(task.fail_to_pass, "FAILED"), dict.fromkeys(task.pass_to_pass, "PASSED")
    if (base := run_tests(folder, task)) != fails | passes:
        wrong.append(f"base: {base}")
    shell(folder, f"sed -i 's/{old}/{new}/' {file}")
    if all(status == "PASSED" for status in run_tests(folder, task).values()):
        wrong.append("a replacement in the whole file passes")
    shell(folder, f"git checkout -q -- {file} && sed -i '{line}s/{old}/{new}/' {file}")
    by_hand = (folder / file).read_text()
    shell(folder, f"git checkout -q -- {file}")
    apply(folder, task.patch)
    if by_hand != (folder / file).read_text():
        wrong.append("replacing the fragment in its line is not the gold patch")
    if (gold := run_tests(folder, task)) != dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "PASSED"):
        wrong.append(f"gold: {gold}")
    return wrong


@pytest.mark.slow
def test_every_task_fails_at_base_passes_with_gold_and_fails_with_a_replacement_in_the_whole_file(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda task: check(task, tmp_path / task.instance_id), TASKS))
    assert {t.instance_id: wrong for t, wrong in zip(TASKS, found, strict=True) if wrong} == {}
