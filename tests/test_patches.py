"""Patches: captured from real sandboxes whose repositories have seen a lot, and applied in others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swegym_tutorial import patches
from swegym_tutorial.patches import apply_patch, capture_patch, touched_files
from swegym_tutorial.sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError, backend
from swegym_tutorial.tasks import Task

FIX = "echo fixed >> README.md"
ROOM = 10_000_000


@pytest.fixture
def box(task: Task, sandboxes: SandboxBackend) -> Iterator[Sandbox]:
    opened = sandboxes.open(task)
    yield opened
    opened.close()


def run(box: Sandbox, command: str) -> CommandResult:
    result = box.exec(command, timeout=30)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def fixed(task: Task, sandboxes: SandboxBackend) -> bytes:
    """The patch of the fix alone, as plain git writes it."""
    opened = sandboxes.open(task)
    text = run(opened, f"{FIX}; git diff {task.base_commit}").output
    opened.close()
    return text.encode()


def test_an_ordinary_edit_gives_what_git_diff_gives(task, box, fixed):
    run(box, FIX)
    assert capture_patch(box, task, ROOM) == fixed
    assert capture_patch(box, task, ROOM) == fixed  # the agent's repository is left as it was
    assert run(box, "git status --short").output == " M README.md\n"


def test_nothing_changed_is_empty(task, box):
    assert capture_patch(box, task, ROOM) == b""
    run(box, "touch src/x.pyc README.md; mkdir .pytest_cache; touch .pytest_cache/x")
    assert capture_patch(box, task, ROOM) == b""


def test_commits_count_and_so_do_new_removed_and_renamed_files(task, box, sandboxes):
    run(
        box,
        "echo new > new.bin; printf '\\0\\1' >> new.bin; git add -A; git commit -q -m x; git mv README.md R",
    )
    run(box, "rm src/ledger.py; chmod +x src/cart.py; ln -s R link; mkdir 'ä b'; echo > 'ä b/\"c'")
    other = sandboxes.open(task)
    applied = apply_patch(other, capture_patch(box, task, ROOM))
    names = {"new.bin", "README.md", "R", "src/ledger.py", "src/cart.py", "link", 'ä b/"c'}
    assert applied.refusal is None and set(applied.paths) == names
    listing = "git add -A; git ls-files -s; git status --short"
    assert run(box, listing).output.splitlines()[:5] == run(other, listing).output.splitlines()[:5]
    assert run(box, "git write-tree").output == run(other, "git write-tree").output
    other.close()


def test_at_most_one_byte_over_the_limit_comes_back(task, box, fixed):
    run(box, FIX)
    assert capture_patch(box, task, 20) == fixed[:21]


SIDE_EFFECTS = [
    "git init -q sub && touch sub/x",
    "git -C src init -q && cd src && git add . && git commit -q -m x",
    "echo secret > src/cart.pyc && chmod 000 src/cart.pyc",
    "mkdir closed.pyc && chmod 000 closed.pyc",
    "chmod 000 README.md && chmod 644 README.md && chmod 555 .git/objects && chmod 000 .git",
    "git update-index --assume-unchanged README.md",
    "git update-index --skip-worktree README.md",
    "git config core.sparseCheckout true && echo /src > .git/info/sparse-checkout",
    "echo '[broken' > ~/.gitconfig",
    "echo '[broken' >> .git/config",
    "git config diff.orderFile nothing",
    "git config diff.noprefix true && git config diff.context 0 && git config core.bare true",
    "rm .git/index && mkdir .git/index",
    "touch .git/index.lock && rm .git/HEAD",
    "mkdir -p /tmp/prediction.patch/x && chmod 000 /tmp/prediction.patch",
    "echo '* working-tree-encoding=UTF-16' > .git/info/attributes",
    "echo '*' > .git/info/exclude && echo 'README.md -diff' > .git/info/attributes",
    "git commit -q -a --amend -m x",
    "git replace $(git rev-parse HEAD:README.md) $(git hash-object -w src/cart.py)",
]


@pytest.mark.parametrize("side_effect", SIDE_EFFECTS)
def test_a_fix_is_not_lost_because_of_something_beside_it(task, box, fixed, side_effect):
    run(box, f"{FIX}; ( {side_effect} )")
    assert capture_patch(box, task, ROOM) == fixed


@pytest.mark.parametrize(
    "side_effect",
    [
        "echo '* working-tree-encoding=UTF-16' > .gitattributes",
        "echo '[broken' > .gitmodules",
        "echo secret > notes && chmod 000 notes",
        "git init -q sub && cd sub && git commit -q --allow-empty -m x",
    ],
)
def test_a_fix_is_not_lost_because_of_a_file_in_the_patch(task, box, fixed, sandboxes, side_effect):
    run(box, f"{FIX}; ( {side_effect} )")
    patch = capture_patch(box, task, ROOM)
    assert fixed in patch
    other = sandboxes.open(task)
    assert apply_patch(other, patch).refusal is None
    other.close()


def test_a_fix_in_a_file_without_rights_is_found(task, box, fixed):
    run(box, f"{FIX}; chmod 000 README.md")
    assert capture_patch(box, task, ROOM) == fixed


@pytest.mark.parametrize(
    "loss",
    [
        "rm -rf .git",
        "git checkout -q --orphan new && git commit -q -m x && git gc -q --prune=now",
        "rm -rf .git/objects/pack/*",
    ],
)
def test_a_repository_without_its_base_gives_an_empty_patch(task, box, loss):
    run(box, f"{FIX}; {loss}")
    assert capture_patch(box, task, ROOM) == b""


def test_a_timeout_is_the_sandboxs_fault(task, box, monkeypatch):
    monkeypatch.setattr(patches, "GIT_TIMEOUT", 0.001)
    with pytest.raises(SandboxError, match="not captured within"):
        capture_patch(box, task, ROOM)
    with pytest.raises(SandboxError, match="did not end within"):
        apply_patch(box, b"")


def test_half_a_patch_is_none(task, box):
    # git writes the first file's change and then finds that what the second one was is gone.
    run(box, "mv .git/objects/pack/*.pack x && git unpack-objects -q < x && rm x")
    run(box, f"{FIX}; blob=$(git rev-parse HEAD:src/cart.py); rm -f .git/objects/${{blob:0:2}}/${{blob:2}}")
    run(box, "echo >> src/cart.py")
    assert capture_patch(box, task, ROOM) == b""


@pytest.mark.filterwarnings("ignore:sandbox subprocess")
def test_patches_travel_between_sandboxes_without_isolation_too(task, fixed):
    opened = backend("subprocess")
    first, second = opened.open(task), opened.open(task)
    run(first, FIX)
    assert capture_patch(first, task, ROOM) == fixed
    assert apply_patch(second, fixed).paths == ("README.md",)
    assert capture_patch(second, task, ROOM) == fixed
    run(first, 'rm -rf "$REPO"')
    assert capture_patch(first, task, ROOM) == b""
    opened.close()


def test_a_refused_patch_changes_nothing(task, box, fixed):
    run(box, "echo other > README.md")
    assert "README.md" in apply_patch(box, fixed).refusal
    assert apply_patch(box, b"nonsense\n").refusal
    assert run(box, "git status --short").output == " M README.md\n"


def test_touched_files_reads_quoted_names_renames_and_binary_files():
    patch = (
        'diff --git "a/\\303\\244/\\"x" "b/\\303\\244/\\"x"\n--- "a/\\303\\244/\\"x"\n+++ "b/\\303\\244/\\"x"\n@@ -1 +1 @@\n-a\n+b\n'
        "diff --git a/a b.png b/a b.png\nindex 1..2 100644\nGIT binary patch\n"
        "diff --git a/old.py b/new.py\nrename from old.py\nrename to new.py\n"
        "diff --git a/src b/copy\ncopy from src\ncopy to copy\n"
        "diff --git a/gone.py b/gone.py\n--- a/gone.py\n+++ /dev/null\n"
    )
    assert touched_files(patch) == ['ä/"x', "a b.png", "old.py", "new.py", "copy", "gone.py"]
