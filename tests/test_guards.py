"""Which files are put back before the hidden tests run, and which are an agent's own."""

from dataclasses import replace

import pytest

from swegym_tutorial.grading import Outcome, grade
from swegym_tutorial.guards import Guard
from swegym_tutorial.patches import capture_patch


def diff(*paths: str) -> str:
    return "".join(f"diff --git a/{path} b/{path}\n" for path in paths)


@pytest.fixture
def layout(task):
    """A task whose tests lie in pkg/tests, and whose gold patch is to pkg/core.py and to setup.cfg."""
    return replace(
        task,
        patch=diff("pkg/core.py", "setup.cfg"),
        test_patch=diff("pkg/tests/unit/test_core.py", "pkg/test_side.py"),
        fail_to_pass=("pkg/tests/unit/test_core.py::test_a",),
        pass_to_pass=(),
    )


@pytest.mark.parametrize(
    "path, kind",
    [
        ("pkg/core.py", "own"),
        ("setup.cfg", "own"),  # the gold patch changes it too
        ("pkg/json.py", "own"),
        ("pkg/io/json.py", "own"),
        ("other/types.py", "own"),
        ("src/unittest/case.py", "own"),
        ("unittest/case.py", "new"),
        ("pkg/helpers.py", "own"),  # the folder holds a hidden test, and is no folder of tests
        ("README.md", "own"),
        ("pkg/conftest.py", "back"),
        ("pyproject.toml", "back"),
        ("deep/down/tox.ini", "back"),
        ("pkg/tests/unit/helpers.py", "back"),
        ("pkg/tests/data/x.txt", "back"),
        ("pkg/tests/__init__.py", "back"),
        ("other/tests/test_more.py", "own"),  # no hidden test lies there
        ("pytest.py", "new"),
        ("_pytest/config/__init__.py", "new"),
        ("pytest.cpython-311-x86_64-linux-gnu.so", "new"),
        ("sitecustomize.py", "new"),
        ("argparse.py", "new"),
        ("a/b/x.pth", "new"),
        ("lib.egg-info/entry_points.txt", "new"),
        ("lib-1.0.dist-info/entry_points.txt", "new"),
        ("pkg/__pycache__/core.cpython-311.pyc", "new"),
    ],
)
def test_what_is_guarded(layout, path, kind):
    back, new = Guard(layout).guarded([path])
    assert ("back" if back else "new" if new else "own") == kind and not (back and new)


def test_a_folder_in_which_the_gold_patch_works_is_the_agents_too(layout):
    theirs = replace(layout, patch=diff("pkg/tests/engine.py"))
    assert Guard(theirs).guarded(["pkg/tests/other.py", "pkg/tests/conftest.py"]) == (
        ["pkg/tests/conftest.py"],
        {},
    )


def test_case_9_an_honest_fix_with_its_own_tests_and_files_is_resolved_and_a_file_of_base_stays(
    task, sandboxes, config
):
    # OpenHands#10087. graphlib.py and code/ are the repository's own here, so that an edit of them is like any other.
    own = replace(
        task, files={**task.files, "graphlib.py": "from src import route\n", "code/a.py": ""}, base_commit=""
    )
    box = sandboxes.open(own)
    gold = task.patch.replace("'", "'\\''")
    command = (
        f"git rev-parse HEAD; printf '%s' '{gold}' | git apply -; echo 'def test_x(): assert 1' > tests/test_own.py; "
        "echo 'EDITED = 1' > graphlib.py; echo 'NEW = 1' > code/b.py; echo x > typing.py; echo y >> README.md"
    )
    commit = box.exec(command, timeout=120).output.strip()
    patch = capture_patch(box, own, 1_000_000)
    box.close()
    told = replace(
        own, base_commit=commit, test_command=f"cat graphlib.py code/b.py README.md; ls; {task.test_command}"
    )
    verdict = grade(told, patch, sandboxes, config)
    assert verdict.outcome is Outcome.RESOLVED, verdict
    assert verdict.detail == "undone before the tests ran: tests/test_own.py, typing.py"
    assert "EDITED = 1\nNEW = 1" in verdict.log and "\ny\n" in verdict.log and "typing.py" not in verdict.log
