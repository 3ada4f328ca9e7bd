"""A patch: captured from the agent's sandbox and applied in another, byte for byte.

Knows git and sandboxes; nothing of tests or rewards.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from .sandbox import Sandbox, SandboxError
from .tasks import Task

PATCH_FILE = "/tmp/prediction.patch"
GIT_TIMEOUT = 120.0  # seconds
NAMES_BYTES = 8 << 20  # of the list of paths that a patch touches
_LEFT_OUT = " ".join(
    f"':(exclude,glob)**/{name}'" for name in ("*.pyc", "__pycache__/**", ".pytest_cache/**")
)

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
git diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/ \\
    "$base" > "$own/patch"
"""


def capture_patch(sandbox: Sandbox, task: Task, limit: int) -> bytes:
    """Return what the agent changed since base_commit, as a binary git diff; empty where nothing is.

    Commits that the agent made count; ignored files, compiled files and pytest's cache don't. What git cannot
    add (a nested repository without a commit) is left out, and takes nothing else along. At most limit + 1
    bytes come back: a longer patch than `limit` is the grader's to refuse. Raises SandboxError where the sandbox
    fails or git runs out of time; a repository that has lost base_commit gives an empty patch.
    """
    own = f"capture-{secrets.token_hex(8)}"  # a name that the agent cannot have taken
    base = task.base_commit or "$(git rev-parse HEAD)"
    result = sandbox.exec(_CAPTURE.format(own=_in_shell(f"/tmp/{own}"), base=base), timeout=GIT_TIMEOUT)
    if result.timed_out:
        raise SandboxError(f"{task.instance_id}: the patch was not captured within {GIT_TIMEOUT:.0f} s")
    return sandbox.read_file(f"/tmp/{own}/patch", limit) if result.exit_code == 0 else b""


@dataclass(frozen=True)
class Applied:
    """What became of a patch: the paths that it touches, old and new names; or git's words of refusal."""

    paths: tuple[str, ...] = ()  # bytes that are no UTF-8 as surrogates
    refusal: str | None = None


def apply_patch(sandbox: Sandbox, patch: bytes, name: str = PATCH_FILE) -> Applied:
    """Apply a patch in /testbed; nothing is changed where it is refused.

    The paths are git's own reading of the patch, since a text can hide them. Raises SandboxError where the
    sandbox fails, and where git ran out of time.
    """
    sandbox.write_file(name, patch)
    file = _in_shell(name)
    # --numstat gives one name of each file, for a rename the new one; and the old one in reverse.
    names = "git -c core.quotePath=true apply --numstat"
    listed = f'list=$({names} {file} 2>&1 && {names} -R {file} 2>&1) || {{ echo "$list"; exit 1; }}'
    command = f'{listed}; words=$(git apply --whitespace=nowarn {file} 2>&1) || {{ echo "$words"; exit 1; }}'
    result = sandbox.exec(f'{command}; echo "$list"', timeout=GIT_TIMEOUT, output_bytes=NAMES_BYTES)
    if result.timed_out:
        raise SandboxError(f"git apply did not end within {GIT_TIMEOUT:.0f} s")
    if result.exit_code:
        return Applied(refusal=result.output.strip() or f"git apply ended with {result.exit_code}")
    if result.truncated_bytes:
        return Applied(refusal="it touches too many files")
    lines = (line.split("\t", 2) for line in result.output.splitlines())
    return Applied(tuple(dict.fromkeys(_unquoted(line[2]) for line in lines if len(line) == 3)))


def _in_shell(path: str) -> str:
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
