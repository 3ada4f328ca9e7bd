"""Hostile patches earn nothing, in real sandboxes with real pytest, and the verdict says why."""

from __future__ import annotations

import pytest
from cheats import CHEATS, UNHELD, Cheat, patch_of

from swegym_tutorial.grading import Bench, Outcome, grade

TOLD = (Outcome.TAMPERED, Outcome.UNRESOLVED, Outcome.TESTS_CRASHED)


@pytest.fixture(scope="module")
def bench(sandboxes, config):
    return Bench(sandboxes, config)


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name.replace(" ", "-"))
def test_a_cheat_earns_nothing_and_is_told(cheat: Cheat, task, sandboxes, config, bench):
    verdict = grade(task, patch_of(cheat, sandboxes, task), sandboxes, config, bench)
    assert verdict.reward == 0.0 and verdict.outcome in TOLD and verdict.detail, verdict


@pytest.mark.parametrize("cheat", UNHELD, ids=lambda cheat: cheat.name.replace(" ", "-"))
def test_what_cannot_be_held_is_known(cheat: Cheat, task, sandboxes, config, bench):
    # docs/threat-model.md lists these. One that is held from now on belongs to the others.
    assert grade(task, patch_of(cheat, sandboxes, task), sandboxes, config, bench).reward == 1.0


def new_file(path: str, text: str, mode: str = "100644") -> str:
    lines = text.splitlines()
    added = "".join(f"+{line}\n" for line in lines) + (
        "\\ No newline at end of file\n" if mode == "120000" else ""
    )
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1,{len(lines)} @@\n{added}"
    )


HOOK = "#!/bin/sh\nexit 0\n"


@pytest.mark.parametrize(
    "patch",
    [
        new_file("../outside.py", "x = 1\n"),
        new_file("/tmp/outside.py", "x = 1\n"),
        new_file("a/../../outside.py", "x = 1\n"),
        new_file(".git/hooks/post-checkout", HOOK, "100755"),
        new_file("sub/.git/config", "[core]\n"),
        new_file("link", "/tmp", "120000") + new_file("link/outside.py", "x = 1\n"),
        new_file("link", ".git", "120000") + new_file("link/hooks/post-checkout", HOOK, "100755"),
    ],
    ids=["up", "absolute", "hidden-up", "git", "a-git-folder-inside", "through-a-link", "link-to-git"],
)
def test_a_patch_that_writes_elsewhere_is_refused_by_git(patch, task, sandboxes, config):
    verdict = grade(task, patch.encode(), sandboxes, config)
    assert verdict.outcome is Outcome.INVALID_PATCH and verdict.detail, verdict


@pytest.mark.parametrize("place", ["/tmp", "..", ".git", "/etc"])
def test_a_link_that_leads_elsewhere_is_only_a_link(place, task, sandboxes, config):
    # What is put back and put in place goes to no folder behind it.
    test = task.fail_to_pass[0].partition("::")[0]
    gone = "".join(f"-{line}\n" for line in task.files[test].splitlines())
    lines = gone.count("\n")
    patch = f"diff --git a/{test} b/{test}\ndeleted file mode 100644\n--- a/{test}\n+++ /dev/null\n@@ -1,{lines} +0,0 @@\n{gone}"
    other = next(path for path in task.files if path.startswith("tests/") and path != test)
    more = "".join(f"-{line}\n" for line in task.files[other].splitlines())
    count = more.count("\n")
    patch += f"diff --git a/{other} b/{other}\ndeleted file mode 100644\n--- a/{other}\n+++ /dev/null\n@@ -1,{count} +0,0 @@\n{more}"
    verdict = grade(task, (patch + new_file("tests", place, "120000")).encode(), sandboxes, config)
    assert verdict.outcome is Outcome.UNRESOLVED and "undone" in verdict.detail, verdict
