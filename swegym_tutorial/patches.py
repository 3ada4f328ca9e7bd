"""A patch: captured from the agent's sandbox and applied in another, byte for byte.

Knows git and sandboxes; nothing of tests or rewards.
"""

from __future__ import annotations

from .sandbox import Sandbox, SandboxError
from .tasks import Task

PATCH_FILE = "/tmp/prediction.patch"
GIT_TIMEOUT = 120.0  # seconds
_LEFT_OUT = " ".join(
    f"':(exclude,glob)**/{name}'" for name in ("*.pyc", "__pycache__/**", ".pytest_cache/**")
)

# Settings of the agent's own git configuration must not change what a diff looks like.
_GIT = "git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.autocrlf=false -c core.quotePath=true"
_DIFF = "diff --cached --binary --no-color --no-ext-diff --no-textconv --src-prefix=a/ --dst-prefix=b/"


def capture_patch(sandbox: Sandbox, task: Task, limit: int) -> bytes:
    """Return what the agent changed since base_commit, as a binary git diff; empty where nothing is.

    Commits that the agent made count; compiled files and pytest's cache don't. At most limit + 1 bytes come
    back: a longer patch than `limit` is the grader's to refuse. Raises SandboxError where the sandbox fails;
    a repository that the agent itself broke gives an empty patch.
    """
    base = task.base_commit or "HEAD"
    command = (
        f"rm -f .git/index.lock {PATCH_FILE}; {_GIT} add -A -- . {_LEFT_OUT}"
        f" && {_GIT} {_DIFF} {base} > {PATCH_FILE}"
    )
    sandbox.exec(command, timeout=GIT_TIMEOUT)
    try:
        return sandbox.read_file(PATCH_FILE, limit)
    except FileNotFoundError:
        return b""


def apply_patch(sandbox: Sandbox, patch: bytes, name: str = PATCH_FILE) -> str | None:
    """Apply a patch in /testbed; return None, or git's words where it doesn't apply.

    Raises SandboxError where the sandbox fails, and where git ran out of time.
    """
    sandbox.write_file(name, patch)
    result = sandbox.exec(f"git apply --whitespace=nowarn {name}", timeout=GIT_TIMEOUT)
    if result.timed_out:
        raise SandboxError(f"git apply did not end within {GIT_TIMEOUT:.0f} s")
    return (
        None if result.exit_code == 0 else result.output.strip() or f"git apply ended with {result.exit_code}"
    )


def touched_files(patch: str) -> list[str]:
    """Return the paths that a textual git diff touches, old and new names, in the order of the diff."""
    paths: dict[str, None] = {}
    for line in patch.splitlines():
        if line.startswith(("--- a/", "+++ b/", "rename from ", "rename to ")):
            path = line.split("\t")[0]
            for start in ("--- a/", "+++ b/", "rename from ", "rename to "):
                path = path.removeprefix(start)
            paths[path] = None
    return list(paths)
