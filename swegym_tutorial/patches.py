"""The repository before and after the agent: its future hidden, its change captured and applied elsewhere.

Knows git and sandboxes; nothing of tests or rewards.
"""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from .sandbox import Sandbox, SandboxError
from .tasks import Task

PATCH_FILE = "/tmp/prediction.patch"
GIT_TIMEOUT = 120.0  # seconds
HISTORY_TIMEOUT = 600.0  # seconds; half a million objects, 360 MB, took 6
NAMES_BYTES = 8 << 20  # of the list of paths that a patch touches
_LEFT_OUT = " ".join(
    f"':(exclude,glob)**/{name}'" for name in ("*.pyc", "__pycache__/**", ".pytest_cache/**")
)


class GitTimeout(SandboxError):
    """git ran out of time. Whether that is the agent's doing, only a repository that it has not touched can tell."""


# How we call git on the repository of a task, whose owner, hooks and settings are its image's. A folder that is
# named is used whoever owns it: git before 2.38 heeds safe.directory in no environment variable.
OWN_GIT = """
export GIT_DIR="$PWD/.git" GIT_WORK_TREE="$PWD" GIT_NO_REPLACE_OBJECTS=1 GIT_GRAFT_FILE=/none
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=core.hooksPath GIT_CONFIG_VALUE_0=/dev/null
"""

# What could lead to a later commit is too much to list: refs, reflogs, notes, worktrees, kept and borrowed packs, ...
# So a new git folder takes the old one's place, and nothing is in it but what is copied here.
_HIDE = r"""
set -e -o pipefail
fail() { echo "$1"; exit 1; }
bounded() {  # in memory; most deltas are taken over as they are
    git -c core.packedGitWindowSize=32m -c core.packedGitLimit=256m -c pack.threads=2 -c pack.windowMemory=64m \
        -c pack.deltaCacheSize=64m "$@"
}
objects() { cut -d ' ' -f 1 | LC_ALL=C sort -u; }
old="$PWD/.git" new="$PWD/.git/$own/.git"

if [[ $PWD == /testbed ]]; then  # what the image's makers left behind
    rm -f /{,root/,tmp/}*.{patch,diff,rej,orig} /{,root/,tmp/}{eval,run_tests,test}.sh ~/.{bash,python}_history || true
fi
[[ -d .git && ! -L .git ]] || fail '.git is no folder'
base=$(git rev-parse --verify "$base^{commit}")
find . -path ./.git -prune -o -name .git -print0 | while IFS= read -r -d '' nested; do
    kind=$(git --literal-pathspecs ls-tree "$base" -- "${nested%/.git}")
    if [[ $kind == 160000* ]]; then  # a submodule, whose history goes on too
        rm -rf -- "$nested"
    elif GIT_DIR=$nested git cat-file -e "$base" 2> /dev/null; then
        fail "$nested leads to other commits of this repository"
    fi
done

format=$(git rev-parse --show-object-format)
(unset GIT_DIR GIT_WORK_TREE; git init -q --template= --object-format="$format" "$old/$own")
echo "$base" > "$new/HEAD"
bounded rev-list --objects "$base" > "$new/wanted"
bounded pack-objects -q --delta-base-offset "$new/objects/pack/pack" < "$new/wanted" > /dev/null
for name in core.autocrlf core.eol user.name user.email; do
    if value=$(git config --file "$old/config" "$name"); then git config --file "$new/config" "$name" "$value"; fi
done
mkdir "$new/info"
for name in exclude attributes; do
    if [[ -f $old/info/$name ]]; then cp "$old/info/$name" "$new/info/"; fi
done
if [[ -f $old/shallow ]]; then  # the oldest commits of this clone, of which some may be left
    objects < "$new/wanted" > "$new/known"
    grep -x -F -f "$new/known" "$old/shallow" > "$new/shallow" || rm "$new/shallow"
fi
if [[ $(stat -c %a "$old") == *7 ]]; then chmod -R a+rwX "$new"; fi
chown -R --reference="$old" "$new" 2> /dev/null || true
mv "$new" "$PWD/.$own"
rm -rf .git
mv "$PWD/.$own" .git
git read-tree "$base"
git update-index -q --refresh || true

# No file of the repository, and yet in it: what a patch that was tried here, or a test run, has left.
git ls-files -o -z -- '*.orig' '*.rej' '*.patch' '*.diff' '.pytest_cache/*' '*/.pytest_cache/*' | xargs -0 -r rm -f --
for name in "${compiled[@]}"; do rm -f -- "$name".*; done

[[ $(git rev-parse HEAD) == "$base" && -z $(git for-each-ref) ]] || fail 'refs are left'
git cat-file --batch-all-objects --batch-check='%(objectname)' | objects > .git/known
bounded rev-list --objects "$base" | objects > .git/wanted
[[ $(sha256sum < .git/known) == "$(sha256sum < .git/wanted)" ]] || fail 'objects are left that base_commit does not lead to'
rm -f .git/known .git/wanted
"""


class HistoryShown(SandboxError):
    """A repository shows more than base_commit and what leads up to it, and that cannot be mended."""


def hide_history(sandbox: Sandbox, task: Task) -> None:
    """Leave nothing in the agent's repository but base_commit and what leads up to it, and check that.

    For a repository with a history, at base_commit and clean, before the agent sees it. No ref, remote, reflog,
    hook, submodule's git folder or stray file of the image's makers is left, and no object that base_commit does
    not reach. The files in the working tree stay, but for rejects, backups, patches and caches of test runs that
    are no part of the repository, and the compiled forms of files that the gold patch or the test patch touch.
    Raises HistoryShown where that cannot be had: another git folder in the tree with these commits, a damaged
    repository; SandboxError where the sandbox fails or runs out of time.
    """
    names = f"own=git-{secrets.token_hex(8)} base={shlex.quote(task.base_commit.strip() or 'HEAD')}"
    names += f" compiled=({' '.join(map(shlex.quote, _compiled(task)))})"
    result = sandbox.exec(f"{names}\n{OWN_GIT}{_HIDE}", timeout=HISTORY_TIMEOUT)
    if result.exit_code:
        told = f"killed after {result.seconds:.0f} s" if result.timed_out else result.output.strip()[-500:]
        kind = SandboxError if result.timed_out else HistoryShown
        raise kind(f"{task.instance_id}: the repository's future could not be hidden: {told}")


def _compiled(task: Task) -> list[str]:
    """Return the compiled forms, without what follows the first dot, of the files that the patches touch."""
    paths = [PurePosixPath(path) for path in touched_files(task.patch) + touched_files(task.test_patch)]
    return [str(path.parent / "__pycache__" / path.stem) for path in paths if path.suffix == ".py"]


# The agent owns the repository, its configuration and its home. So the diff is made with a git folder of our own
# beside it, which borrows nothing but the objects: no setting, index, lock, ignore list or hook of the agent's
# counts, and neither does a broken one.
_CAPTURE = f"""
own={{own}} base={{base}}
mkdir -p "$own/objects/info" "$own/refs" "$own/info" || exit
chmod -R u+rwX . 2> /dev/null
echo 'ref: refs/heads/none' > "$own/HEAD"
echo "$PWD/.git/objects" > "$own/objects/info/alternates"
export GIT_DIR="$own" GIT_WORK_TREE=. HOME="$own" XDG_CONFIG_HOME="$own" GIT_CONFIG_NOSYSTEM=1
git read-tree "$base" || exit
add() {{{{ git add -A --ignore-errors -- . {_LEFT_OUT}; }}}}
add || {{{{ echo '* -working-tree-encoding' > "$own/info/attributes"; add; }}}}
git diff --cached --binary --no-renames --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ \\
    "$base" > "$own/patch"
"""


def capture_patch(sandbox: Sandbox, task: Task, limit: int) -> bytes:
    """Return what the agent changed since base_commit, as a binary git diff; empty where nothing is.

    Commits that the agent made count; ignored files, compiled files and pytest's cache don't. A renamed file stands
    with its text under both names: git cannot apply the short form where a folder takes a link's place. What git
    cannot add (a nested repository without a commit) is left out, and takes nothing else along. At most limit + 1
    bytes come back: a longer patch than `limit` is the grader's to refuse. Raises SandboxError where the sandbox
    fails, GitTimeout where git runs out of time; a repository that has lost base_commit gives an empty patch, and
    so does a git or shell that the agent broke.
    """
    own = f"capture-{secrets.token_hex(8)}"  # a name that the agent cannot have taken
    base = shlex.quote(task.base_commit.strip()) if task.base_commit else "$(git rev-parse HEAD)"
    result = sandbox.exec(_CAPTURE.format(own=in_shell(f"/tmp/{own}"), base=base), timeout=GIT_TIMEOUT)
    if result.timed_out:
        raise GitTimeout(f"{task.instance_id}: the patch was not captured within {GIT_TIMEOUT:.0f} s")
    try:
        return sandbox.read_file(f"/tmp/{own}/patch", limit) if result.exit_code == 0 else b""
    except FileNotFoundError:
        return b""


@dataclass(frozen=True)
class Applied:
    """What became of a patch: the paths that it touches, old and new names; or git's words of refusal."""

    paths: tuple[str, ...] = ()  # bytes that are no UTF-8 as surrogates
    refusal: str | None = None


_NO_REPOSITORY = 90  # an exit code that git does not use
_APPLY = f"""
words=$(git rev-parse --verify 'HEAD^{{commit}}' 2>&1) || {{ echo "$words"; exit {_NO_REPOSITORY}; }}
names() {{ git -c core.quotePath=true apply --numstat "$@" "$file" 2>&1; }}
# One name of each file, for a rename the new one; and the old one in reverse.
list=$(names && names -R) || {{ echo "$list"; exit 1; }}
words=$(git apply --whitespace=nowarn "$file" 2>&1) || {{ echo "$words"; exit 1; }}
echo "$list"
"""


def apply_patch(sandbox: Sandbox, patch: bytes, name: str = PATCH_FILE) -> Applied:
    """Apply a patch in /testbed; nothing is changed where it is refused.

    The paths are git's own reading of the patch, since a text can hide them. Raises SandboxError where the
    sandbox fails, GitTimeout where git ran out of time.
    """
    sandbox.write_file(name, patch)
    command = f"file={in_shell(name)}\n{OWN_GIT}{_APPLY}"
    result = sandbox.exec(command, timeout=GIT_TIMEOUT, output_bytes=NAMES_BYTES)
    if result.timed_out:
        raise GitTimeout(f"git apply did not end within {GIT_TIMEOUT:.0f} s")
    if result.exit_code == _NO_REPOSITORY:
        raise SandboxError(f"the sandbox has no working repository: {result.output.strip()[-300:]}")
    if result.exit_code:
        return Applied(refusal=result.output.strip() or f"git apply ended with {result.exit_code}")
    if result.truncated_bytes:
        return Applied(refusal="it touches too many files")
    lines = (line.split("\t", 2) for line in result.output.splitlines())
    return Applied(tuple(dict.fromkeys(_unquoted(line[2]) for line in lines if len(line) == 3)))


def in_shell(path: str) -> str:
    """A path under /tmp as the shell of any sandbox finds it: one without isolation has its own TMPDIR."""
    return f'"${{TMPDIR:-/tmp}}"{path.removeprefix("/tmp")}'


_SYMMETRIC = re.compile(r'diff --git ("?)a/(.*)\1 \1b/\2\1')
_STARTS = ("--- ", "+++ ", "rename from ", "rename to ", "copy to ")


def touched_files(patch: str) -> list[str]:
    """Return the paths that a trusted git diff touches, old and new names, in the order of the diff.

    For gold and test patches; of an agent's patch ask git (apply_patch), since a text can mislead this reading.
    """
    paths: dict[str, None] = {}
    for line in patch.splitlines():
        if match := _SYMMETRIC.fullmatch(line):
            paths[_unquoted(f"{match[1]}{match[2]}{match[1]}")] = None
        elif start := next((start for start in _STARTS if line.startswith(start)), None):
            path = _unquoted(line.removeprefix(start).split("\t")[0])
            if start not in ("--- ", "+++ "):
                paths[path] = None
            elif path.startswith("a/" if start == "--- " else "b/"):
                paths[path[2:]] = None
    return list(paths)


_ESCAPE = re.compile(rb"\\([0-7]{3}|.)")
_ESCAPED = dict(zip(b"abtnvfr", b"\a\b\t\n\v\f\r", strict=True))


def _unquoted(name: str) -> str:
    """Undo git's quoting of a path with unusual characters, which stands in double quotes."""
    if not (len(name) > 1 and name[0] == name[-1] == '"'):
        return name

    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 255 if len(code) == 3 else _ESCAPED.get(code[0], code[0])])

    return _ESCAPE.sub(plain, name[1:-1].encode("utf-8", "surrogateescape")).decode(
        "utf-8", "surrogateescape"
    )
