"""Which files of a repository decide how its tests run, and are not the agent's to change.

Whatever a patch did to them is undone before the hidden tests run. Files that the gold patch or the test patch
touches count as theirs. Knows paths; nothing of sandboxes or results.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import PurePosixPath

from .patches import GIT_TIMEOUT, OWN_GIT, GitTimeout, in_shell, touched_files
from .sandbox import Sandbox, SandboxError
from .tasks import Task

CONFIGURATION = frozenset(
    {
        *("conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
        *("tox.ini", "setup.cfg", "pyproject.toml"),
        ".gitattributes",  # would change the tests while they are put in place
    }
)
# Modules that would stand in for those of Python and of pytest where they lie in the root.
SHADOWS = frozenset(
    {
        *sys.stdlib_module_names,
        *("pytest", "_pytest", "pluggy", "py", "iniconfig", "packaging", "attr", "attrs", "exceptiongroup"),
        *("tomli", "toml", "colorama", "pygments", "xdist", "execnet", "sitecustomize", "usercustomize"),
        *("argcomplete", "importlib_metadata", "more_itertools", "zipp", "wcwidth", "atomicwrites"),
    }
)
_STARTUP = (".pth", ".egg-link", ".pyc")  # run or found by Python without an import
_METADATA = (".dist-info", ".egg-info")  # folders whose entry points are loaded by pytest
NAMED = 20  # paths at most in words: a patch can have tens of thousands
_TEST_FOLDERS = ("test", "tests")


@dataclass(frozen=True)
class Guard:
    """The guarded paths of one task."""

    task: Task

    @cached_property
    def tests(self) -> tuple[str, ...]:
        """The files of the test patch."""
        return tuple(touched_files(self.task.test_patch))

    @cached_property
    def _gold(self) -> frozenset[str]:
        return frozenset(touched_files(self.task.patch))

    @cached_property
    def _test_folders(self) -> frozenset[str]:
        """The folders of hidden tests that hold tests only: what the gold patch leaves alone in them is as in base.

        The makers of these tasks count every file in such a folder as part of the tests, so that a solution has
        none there; where the gold patch has one all the same, the folder is no folder of tests alone.
        """
        named = {
            str(folder)
            for file in self.tests
            for folder in PurePosixPath(file).parents
            if folder.name in _TEST_FOLDERS
        }
        return frozenset(
            folder for folder in named if not any(path.startswith(f"{folder}/") for path in self._gold)
        )

    def bends(self, undone: Sequence[str]) -> bool:
        """Whether what was undone may decide results where nobody undoes it: more than tests of the agent's own."""
        own = ("test_*.py", "*_test.py")
        return any(
            path in self.tests or not any(fnmatch(path.rpartition("/")[2], form) for form in own)
            for path in undone
        )

    def guarded(self, changed: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return which of the changed paths go back to base, and which go away if base does not have something.

        For the latter path -> what base must have for it to stay: itself, or the module or package of whose name
        it makes one.
        """
        own = {*self._gold, *self.tests}
        back = [path for path in changed if path not in own and self._configures(path)]
        stand_in = {
            path: self._stands_in(path) for path in changed if path not in own and not self._configures(path)
        }
        return back, {path: entry for path, entry in stand_in.items() if entry}

    def _configures(self, path: str) -> bool:
        folders = map(str, PurePosixPath(path).parents)
        return not CONFIGURATION.isdisjoint(path.split("/")) or not self._test_folders.isdisjoint(folders)

    def _stands_in(self, path: str) -> str | None:
        first, *rest = path.split("/")
        if path.endswith(_STARTUP) or any(part.endswith(_METADATA) for part in (first, *rest)):
            return path
        # In the root, which comes first on sys.path. Other folders come into play when pytest and Python are loaded.
        return first if first.partition(".")[0] in SHADOWS else None


# Reads NUL-separated paths. Of those in $list.new, the ones that base has, files or folders, are left alone. A link or file where a
# path needs a folder goes too: git keeps no path behind one.
_PUT_BACK = """
set -e -o pipefail
export LC_ALL=C
if [[ -s $list.new ]]; then
    xargs -0 git --literal-pathspecs ls-tree -z --name-only "$base" -- < "$list.new" | sort -z > "$list.kept"
    sort -z -u "$list.new" | comm -z -23 - "$list.kept" > "$list.gone"
    cat "$list.gone" >> "$list"
fi
set +e
while IFS= read -r -d '' path; do
    while [[ $path == */* ]]; do
        path=${path%/*}
        if [[ -L $path || -f $path ]]; then rm -f -- "$path"; fi
    done
done < "$list"
set -e
xargs -0 -r rm -rf -- < "$list"
xargs -0 -r git --literal-pathspecs ls-tree -r -z --name-only "$base" -- < "$list" |
    xargs -0 -r git --literal-pathspecs checkout -q "$base" --
"""
_LIST = "/tmp/put-back"


def put_back(
    sandbox: Sandbox, guard: Guard, changed: Sequence[str], clear: Sequence[str]
) -> tuple[list[str], str]:
    """Undo what a patch changed of the tests and of what decides how they run.

    changed: the paths that the patch touches. clear: paths where something new is to be put. Returns which of the
    changed paths were undone, and in words why it could not be done. Raises SandboxError.
    """
    task = guard.task
    back, new = guard.guarded(changed)
    _write(sandbox, _LIST, (*guard.tests, *clear, *back))
    if new:
        _write(sandbox, f"{_LIST}.new", list(dict.fromkeys(new.values())))
    names = f"list={in_shell(_LIST)} base={shlex.quote(task.base_commit.strip() or 'HEAD')}"
    result = sandbox.exec(f"{names}\n{OWN_GIT}{_PUT_BACK}", timeout=GIT_TIMEOUT)
    if result.timed_out:
        raise GitTimeout(f"{task.instance_id}: the tests were not put back within {GIT_TIMEOUT:.0f} s")
    if result.exit_code:
        return [], f"the tests could not be put back: {result.output.strip()[-300:]}"
    gone = frozenset(_read(sandbox, f"{_LIST}.gone") if new else ())
    undone = {*guard.tests, *back, *(path for path, entry in new.items() if entry in gone)}
    return [path for path in changed if path in undone], ""


def in_words(undone: Sequence[str]) -> str:
    """Say what was undone; "" where nothing was."""
    more = f" and {len(undone) - NAMED:,} more" if len(undone) > NAMED else ""
    words = f"undone before the tests ran: {', '.join(undone[:NAMED])}{more}" if undone else ""
    return words.encode("utf-8", "replace").decode()


def _write(sandbox: Sandbox, file: str, paths: Sequence[str]) -> None:
    sandbox.write_file(file, "".join(f"{path}\0" for path in paths).encode("utf-8", "surrogateescape"))


def _read(sandbox: Sandbox, file: str) -> Sequence[str]:
    try:
        data = sandbox.read_file(file)
    except FileNotFoundError as error:
        raise SandboxError(f"{file} is gone from the sandbox before the tests ran") from error
    return data.decode("utf-8", "surrogateescape").split("\0")
