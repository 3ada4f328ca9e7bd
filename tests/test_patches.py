"""Patches: captured from real sandboxes whose repositories have seen a lot, and applied in others."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from conftest import FINAL, Script, tool_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swegym_tutorial import patches
from swegym_tutorial.events import RunFolder
from swegym_tutorial.patches import apply_patch, capture_patch, hide_history, touched_files
from swegym_tutorial.rollout import Ending, Rollout, generate_rollout
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
    run(box, "rm src/route.py; chmod +x src/cart.py; ln -s R link; mkdir 'ä b'; echo > 'ä b/\"c'")
    other = sandboxes.open(task)
    applied = apply_patch(other, capture_patch(box, task, ROOM))
    names = {"new.bin", "README.md", "R", "src/route.py", "src/cart.py", "link", 'ä b/"c'}
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
    "git checkout -q -b mine && git commit -q -a -m x && git tag x && git stash",
    "git stash -q && git stash pop -q",
    "git config core.autocrlf true && git config core.safecrlf true && git config core.fileMode false",
    "git config filter.x.clean 'tr a-z A-Z' && git config filter.x.required true && echo '* filter=x' > .git/info/attributes",
    "git config core.worktree /tmp && git config core.fsmonitor false && git config core.quotePath false",
    "printf '#!/bin/sh\nexit 1\n' > .git/hooks-x && git config core.hooksPath .git",
    "git gc -q --prune=now && git repack -q -a -d && chmod -R a-w .git",
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
        "git config filter.x.clean false && git config filter.x.required true && echo '* filter=x' > .gitattributes",
        "echo '* ident text=auto' > .gitattributes",
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


def test_a_git_that_the_agent_broke_gives_an_empty_patch(task, box):
    class Broken:
        """As where the agent, root in its container, has put its own program in place of git."""

        read_file = box.read_file

        def exec(self, command, **how):
            return box.exec(f'{command}\nrm "$own/patch"', **how)

    run(box, FIX)
    assert capture_patch(Broken(), task, ROOM) == b""


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


# A repository as an image has it: the commits before base and after, and all that can lead to the later ones.
BEFORE = """
export GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z
git config core.logAllRefUpdates true; git checkout -q -b main
git commit -q --allow-empty -m 'older'; echo more > docs.txt; git add -A; git commit -q -m 'base'; git tag base
"""
AFTER = """
echo 'the answer' > answer.py; git add -A; git commit -q -m 'the fix'; git tag -a -m x v2; git notes add -m x
git repack -q -a -d; touch "$(ls .git/objects/pack/*.pack | head -1 | sed s/pack$/keep/)"
echo later >> answer.py; git commit -q -a -m 'later'; git branch feature; git pack-refs --all
git worktree add -q ../tmp/tree feature; git update-ref refs/pull/1/head HEAD; echo half >> answer.py; git stash -q
git commit-graph write --reachable; git remote add origin https://example.org/x; git gc -q --auto
for name in FETCH_HEAD ORIG_HEAD MERGE_HEAD CHERRY_PICK_HEAD; do git rev-parse HEAD > .git/$name; done
echo dangling | git hash-object -w --stdin; mkdir -p .git/hooks; echo 'echo hook' > .git/hooks/post-checkout
chmod +x .git/hooks/post-checkout; git config core.hooksPath .git/hooks
"""
BACK = """
fix=$(git rev-parse HEAD); git -c core.hooksPath=/dev/null checkout -q --detach base; git replace base $fix
echo "$(git rev-parse base~) $fix" > .git/info/grafts
"""


def with_history(task: Task, box: Sandbox, after: str = AFTER) -> tuple[Task, list[str], list[str]]:
    """Give the box a history. Returns the task, base's objects and all others."""
    run(box, f"set -e\n{BEFORE}")
    base = run(box, "git rev-parse HEAD").output.strip()
    known = run(box, "git rev-list --objects --no-object-names HEAD").output.split()
    run(box, f"set -e\n{after}\n{BACK}")
    every = run(box, "git cat-file --batch-all-objects --batch-check='%(objectname)'").output.split()
    return replace(task, base_commit=base), sorted(known), sorted({*every} - {*known})


# Case 10 (SWE-bench#465, mini-swe-agent#787): the repository's history shows no later commit.
def test_case_10_history_is_hidden(task, box):
    task, known, later = with_history(task, box)
    assert len(later) > 10
    hide_history(box, task)
    every = run(box, "git cat-file --batch-all-objects --batch-check='%(objectname)'").output.split()
    assert sorted(every) == known
    found = run(box, f"printf '%s\\n' {' '.join(later)} | git cat-file --batch-check | grep -v missing; true")
    assert found.output == ""
    assert run(box, "git for-each-ref; git stash list; git reflog; git remote; git notes list").output == ""
    assert run(box, "git log --all --format=%s HEAD").output == "base\nolder\nThe state before the fix\n"
    assert run(box, "git status --short; git rev-parse HEAD").output == f"{task.base_commit}\n"
    assert run(box, "git fsck --full --strict --no-dangling 2>&1").output == ""
    files = run(box, "cd .git; find . -type f -o -type l | sed 's/pack-.*[.]/pack./' | sort").output.split()
    assert files == ["./HEAD", "./config", "./index", "./objects/pack/pack.idx", "./objects/pack/pack.pack"]


def test_case_10_the_agent_works_on_as_in_any_repository(task, box):
    task, *_ = with_history(task, box)
    run(box, "echo local > .git/info/exclude; git config core.eol lf; git config user.name keeper")
    hide_history(box, task)
    assert run(box, "git config core.eol; git config user.name; cat .git/info/exclude").output.split() == [
        *("lf", "keeper", "local")
    ]
    run(
        box,
        f"{FIX}; git checkout -q -b mine; git commit -q -a -m x; git stash; git checkout -q {task.base_commit}",
    )
    run(box, "git merge -q mine; git blame README.md; git log -p")
    assert b"+fixed" in capture_patch(box, task, ROOM)
    hide_history(box, task)  # also a second time
    assert run(box, "git log --format=%s -1").output == "base\n"


class Imaged:
    """A backend whose sandboxes come with a history, as those of a task with an image do."""

    name = "imaged"

    def __init__(self, sandboxes: SandboxBackend, task: Task) -> None:
        self.sandboxes, self.bare = sandboxes, task

    def open(self, task: Task) -> Sandbox:
        box = self.sandboxes.open(self.bare)
        assert with_history(self.bare, box)[0].base_commit == task.base_commit
        return box


def test_case_10_an_attempt_at_a_task_with_an_image_begins_without_the_future(
    task, box, chat, sandboxes, config
):
    theirs = replace(with_history(task, box)[0], image="repository/image:latest")
    script = Script(chat, tool_call("git log --all --format=%s; git reflog; git tag; " + FIX), FINAL)
    rollout = generate_rollout(theirs, script, chat, Imaged(sandboxes, task), config)
    assert rollout.turns[0].results[0].output == "base\nolder\nThe state before the fix\n"
    assert b"+fixed" in rollout.patch


@pytest.mark.parametrize("form", [str.upper, lambda base: base[:12], lambda base: f" {base}\n"])
def test_a_base_commit_is_found_in_any_form(task, box, form):
    task, *_ = with_history(task, box)
    task = replace(task, base_commit=form(task.base_commit))
    hide_history(box, task)
    run(box, FIX)
    assert b"+fixed" in capture_patch(box, task, ROOM)


def test_case_10_what_a_clone_borrows_becomes_its_own(task, box):
    task, known, _ = with_history(task, box)
    lend = "mv .git /tmp/lender; git clone -q --no-checkout --shared /tmp/lender /tmp/other"
    run(
        box,
        f"{lend}; mv /tmp/other/.git .; git checkout -q {task.base_commit}; cat .git/objects/info/alternates",
    )
    hide_history(box, task)
    run(box, "rm -rf /tmp/lender")
    every = run(box, "git cat-file --batch-all-objects --batch-check='%(objectname)'").output.split()
    assert sorted(every) == known
    assert run(box, "git fsck --full 2>&1; git status --short").output == ""


def test_case_10_a_shallow_clone_stays_one(task, box):
    task, *_ = with_history(task, box, "echo x > answer.py; git add -A; git commit -q -m fix; git branch fix")
    run(box, "git clone -q --depth 2 --branch fix file://$PWD /tmp/s; rm -rf .git; mv /tmp/s/.git .; ")
    run(box, "git checkout -q HEAD~; git log --format=%s HEAD; git status")
    hide_history(box, task)
    assert run(box, "git log --format=%s").output == "base\n"
    assert run(box, "git fsck --full 2>&1").output == ""


def test_case_10_submodules_lose_their_git_folders_and_change_no_patch(task, box):
    task, *_ = with_history(task, box)
    run(
        box,
        "git init -q /tmp/sub; cd /tmp/sub; echo a > a; git add a; git commit -q -m a; cd -;"
        "git -c protocol.file.allow=always submodule --quiet add /tmp/sub 'third party/sub'; git commit -q -m sub",
    )
    task = replace(task, base_commit=run(box, "git rev-parse HEAD").output.strip())
    hide_history(box, task)
    assert run(box, "find . -name .git; git status --short; ls third*/sub").output == "./.git\na\n"
    assert capture_patch(box, task, ROOM) == b""
    run(box, FIX)
    assert capture_patch(box, task, ROOM).count(b"diff --git") == 1


@pytest.mark.parametrize(
    "leak, told",
    [
        ("git clone -q . copy", "./copy/.git leads to other commits"),
        ("git worktree add -q --detach tree", "./tree/.git leads to other commits"),
        ("mv .git elsewhere; ln -s elsewhere .git", ".git is no folder"),
        ("rm -rf .git", ".git is no folder"),
        (
            "for pack in .git/objects/pack/*.pack; do mv $pack x; git unpack-objects -q < x; done;"
            "rm .git/objects/$(GIT_NO_REPLACE_OBJECTS=1 GIT_GRAFT_FILE=/none git rev-parse base~^{tree} | sed 's|..|&/|')",
            "bad tree object",
        ),
    ],
)
def test_case_10_what_cannot_be_hidden_is_loud(task, box, leak, told):
    task, *_ = with_history(task, box)
    run(box, leak)
    with pytest.raises(SandboxError, match="future could not be hidden") as error:
        hide_history(box, task)
    assert told in str(error.value)


def test_an_unrelated_repository_inside_is_left_alone(task, box):
    task, *_ = with_history(task, box)
    run(box, "git init -q other; cd other; git commit -q --allow-empty -m x")
    hide_history(box, task)
    assert run(box, "git -C other log --format=%s").output == "x\n"


class OtherOwner:
    """A sandbox whose repository belongs to another user, as git sees it."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box

    def __getattr__(self, name):
        return getattr(self.box, name)

    def exec(self, command, **options):
        return self.box.exec(command, **options, env={"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1"})


def test_a_repository_of_another_user_is_no_obstacle(task, box, fixed, sandboxes):
    history, *_ = with_history(task, box)
    other = OtherOwner(box)
    assert "dubious ownership" in other.exec("git status", timeout=9).output
    hide_history(other, history)
    run(box, FIX)
    patch = capture_patch(other, history, ROOM)
    run(box, "git checkout -q .")
    assert apply_patch(other, patch).paths == ("README.md",)


def test_the_hiding_of_history_is_bounded_in_time(task, box, monkeypatch):
    monkeypatch.setattr(patches, "HISTORY_TIMEOUT", 0.001)
    with pytest.raises(SandboxError, match="killed after 0 s"):
        hide_history(box, task)


def test_a_sandbox_without_a_working_repository_is_no_refusal(task, box, fixed):
    run(box, "rm -rf .git/objects/pack")
    with pytest.raises(SandboxError, match="no working repository"):
        apply_patch(box, fixed)


# Trees of files as JSON: {name: ["file", bytes in base64, executable] | ["link", target] | {name: ...}}. Few names and
# few lines, so that a change of a tree often meets what was there: a file where a folder was, the same text elsewhere.
# (No name ends in a space: git itself cannot read the header that it writes for an empty file in such a folder.)
NAMES = [
    "a",
    "b.py",
    " c",
    'q"',
    "'",
    "t\t",
    "n\nn",
    "ä",
    "\udcff",
    "-d",
    "*",
    "b\\n",
    "\u2028",
    "dev null",
]
LINES = [b"", b"x", b"y", b" ", b"\t", b"\r", b"\0", b"\xff", b"--- a/x", b"+++ b/x", b"@@ -1 +1 @@", b"-- "]
TEXTS = st.builds(
    lambda lines, end: b"\n".join(lines) + end,
    st.lists(st.sampled_from(LINES), max_size=12),
    st.sampled_from([b"", b"\n", b"\n\n\n"]),
)
FILES = st.tuples(st.just("file"), TEXTS.map(lambda text: base64.b64encode(text).decode()), st.booleans())
LINKS = st.tuples(st.just("link"), st.sampled_from(NAMES))
TREES = st.recursive(
    FILES | LINKS,
    lambda node: st.dictionaries(st.sampled_from(NAMES), node, min_size=1, max_size=5),
    max_leaves=12,
).map(lambda node: node if isinstance(node, dict) else {"top": node})

PUT = """
import base64, json, os, shutil, sys
def put(tree):
    for name, node in tree.items():
        if isinstance(node, dict):
            os.mkdir(name), os.chdir(name), put(node), os.chdir("..")
        elif node[0] == "link":
            os.symlink(node[1], name)
        else:
            open(name, "wb").write(base64.b64decode(node[1])), os.chmod(name, 0o755 if node[2] else 0o644)
def look(folder):
    tree = {}
    for entry in os.scandir(folder):
        if entry.path == "./.git":
            continue
        if entry.is_symlink():
            tree[entry.name] = ["link", os.readlink(entry.path)]
        elif entry.is_dir():
            tree[entry.name] = look(entry.path)
        else:
            text = base64.b64encode(open(entry.path, "rb").read()).decode()
            tree[entry.name] = ["file", text, bool(entry.stat().st_mode & 0o100)]
    return tree
for entry in os.scandir("."):
    if "tree" in globals() and entry.name != ".git":
        shutil.rmtree(entry.path) if entry.is_dir(follow_symlinks=False) else os.remove(entry.path)
put(globals().get("tree", {}))
"""
COMMIT = """
export GIT_AUTHOR_DATE=2026-01-01T00:00:00Z GIT_COMMITTER_DATE=2026-01-01T00:00:00Z
rm -f .git/index; git add -A -f; git commit-tree -m base $(git write-tree) > .git/commit; cp .git/commit .git/HEAD; cat .git/HEAD
"""


def put(box: Sandbox, tree: dict, then: str = "") -> str:
    box.write_file("/tmp/put.py", f"import json\ntree = json.loads({json.dumps(tree)!r})\n{PUT}".encode())
    return run(box, f"python /tmp/put.py; {then}").output.strip()


def look(box: Sandbox) -> dict:
    box.write_file("/tmp/look.py", f"{PUT}\nprint(json.dumps(look('.')))".encode())
    return json.loads(run(box, "python /tmp/look.py").output)


@pytest.fixture(scope="module")
def pair(task: Task, sandboxes: SandboxBackend) -> Iterator[tuple[Sandbox, Sandbox]]:
    boxes = sandboxes.open(task), sandboxes.open(task)
    yield boxes
    for box in boxes:
        box.close()


# Case 8 (evalscope#1408, OpenHands#2684): a patch is corrupted on its way.
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(before=TREES, after=TREES)
def test_case_8_any_change_of_any_tree_travels_byte_for_byte(task, pair, tmp_path_factory, before, after):
    agent, grader = pair
    base = put(agent, before, COMMIT)
    assert put(grader, before, COMMIT) == base
    task = replace(task, base_commit=base)
    put(agent, after)
    patch = stored(capture_patch(agent, task, ROOM), RunFolder(tmp_path_factory.mktemp("run")))
    if look(agent) == look(grader):
        assert patch == b""
    else:
        applied = apply_patch(grader, patch)
        assert applied.refusal is None, applied.refusal
        assert look(grader) == look(agent)


def stored(patch: bytes, folder: RunFolder) -> bytes:
    """The patch as it comes back from the run folder."""
    none = np.zeros(0)
    folder.save_rollout(folder.path, Rollout("t", none, none, none, (), Ending.FINAL, patch, 0.0))
    return (folder.path / "prediction.patch").read_bytes()
