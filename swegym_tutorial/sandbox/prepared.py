"""What a fresh container needs before it is an agent's: the task's repository in order, and its environment.

Knows git, tar and tasks; nothing of engines or threads.
"""

from __future__ import annotations

import io
import secrets
import shlex
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ..tasks import Task, TaskError, materialise
from . import REPOSITORY, Sandbox, SandboxError
from .bubblewrap import ENVIRONMENT
from .files import HOME

SETUP_TIMEOUT = 300.0  # seconds for a task's set-up, and for git to put its repository in order

# The local sandbox's, but the user is the image's root. LC_ALL is cleared, so that LANG counts as it does there;
# set to C.UTF-8, bash would complain in every output of an image that lacks this locale.
BASE: Mapping[str, str] = {
    **{name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "USER", "LOGNAME")},
    "LC_ALL": "",
}
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")

# Without -x: ignored files may be extensions that were built in place for the image's environment.
_RESET = """
[[ -e .git ]] || { echo "there is no git repository at $PWD in the image"; exit 1; }
[[ -O . && -O .git ]] || chown "$(id -u)" . .git  # or git refuses another user's repository
git cat-file -e "$base^{commit}" 2> /dev/null || { echo "base_commit $base is not in the image's repository"; exit 1; }
git checkout -q -f --detach "$base" && git reset -q --hard "$base" && git clean -q -f -d
"""


def reset(sandbox: Sandbox, task: Task) -> None:
    """Put the repository that the image has at base_commit. Raises SandboxError where it cannot be."""
    code = f"base={shlex.quote(task.base_commit or 'HEAD')}\n{_RESET}"
    result = sandbox.exec(code, timeout=SETUP_TIMEOUT)
    if result.exit_code:
        why = result.output.strip()[-300:] or f"git ended with {result.exit_code}"
        raise SandboxError(f"{task.instance_id} in {task.image}: {why}")


def repository_archive(task: Task) -> bytes:
    """Return a tar archive, to be unpacked at the root, of the task's repository as git makes it from its files.

    Raises SandboxError where it cannot be made.
    """
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="swegym-") as folder:
        path = Path(folder, "repository")
        try:
            materialise(task, path)
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                for name in (HOME, "/tmp"):
                    entry = tarfile.TarInfo(name[1:])
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "/tmp" else 0o755
                    archive.addfile(entry)
                archive.add(path, REPOSITORY[1:], filter=_as_root)
        except (TaskError, OSError) as error:
            raise SandboxError(f"the repository of {task.instance_id} could not be made: {error}") from error
    return buffer.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.isdir():
        entry.mode = 0o755
    return entry


def environment_after(sandbox: Sandbox, task: Task) -> Mapping[str, str]:
    """Run a task's set-up, and return the environment that it leaves. Raises SandboxError where it fails."""
    mark = secrets.token_hex(8)
    code = f"{task.setup}\nstatus=$?; printf '\\n{mark}\\0'; env -0 || exit; exit $status"
    result = sandbox.exec(code, timeout=SETUP_TIMEOUT, output_bytes=4 << 20)
    before, found, after = result.output.rpartition(f"\n{mark}\0")
    if result.exit_code or not found:
        late = f", killed after {SETUP_TIMEOUT:.0f} s" if result.timed_out else ""
        said = (before.strip() or result.output.strip())[-300:].replace("\0", " ")
        raise SandboxError(
            f"the set-up of {task.instance_id} failed with {result.exit_code}{late}: {said or 'it said nothing'}"
        )
    pairs = (pair.partition("=") for pair in after.split("\0") if "=" in pair)
    return {name: value for name, _, value in pairs if name not in _OF_THE_SHELL}
