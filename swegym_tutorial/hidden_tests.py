"""The hidden tests of a task: put in place, run and read, in a fresh sandbox.

What a patch did to them is undone first. How they are run and read is a harness's business: the one for pytest is
here, SWE-Gym's in swegym_grading.py. Knows nothing of verdicts or rewards.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

from .config import TrainingConfig
from .patches import GIT_TIMEOUT, OWN_GIT, Applied, GitTimeout, apply_patch, in_shell, touched_files
from .sandbox import Sandbox, SandboxBackend
from .tasks import Task

LOG_BYTES = 1 << 20  # of the tests' output, head and tail
GUARDED = (
    *("conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
    ".gitattributes",  # would change the tests while they are put in place
)
NAMED = 20  # paths at most in words: a patch can have tens of thousands
STATUSES = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")  # from the best to the worst


def worst(statuses: Collection[str]) -> str:
    """Return the worst of a test's statuses."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Reading:
    """What the output of a run tells."""

    tests: Mapping[str, str] = field(default_factory=dict)  # test id -> PASSED, FAILED, ...; the worst told
    hindered: str = ""  # why it was not the hidden tests that ran
    notes: str = ""  # what decided a result and cannot be seen in it


class Harness(Protocol):
    """How the hidden tests of one kind of task are run, and their output read."""

    environment: Mapping[str, str]  # of the tests
    output_bytes: int  # of their output that are needed, half from its start and half from its end
    applies_tests: bool  # its script applies the test patch itself
    counts_xfail: bool  # a PASS_TO_PASS test that fails as expected, on base too, counts as passed

    def script(self, task: Task, mark: str) -> str:
        """The bash script to run in /testbed; `mark` is a text that no patch can know beforehand."""
        ...

    def read(self, task: Task, output: str, mark: str) -> Reading: ...


@dataclass(frozen=True)
class HiddenRun:
    """One run of the hidden tests."""

    tests: Mapping[str, str] = field(default_factory=dict)
    refusal: str | None = None  # git's words, where the patch does not apply: nothing ran
    hindered: str = ""  # why it was not the hidden tests that ran
    notes: str = ""
    undone: str = ""  # what the patch had changed of the tests
    log: str = field(default="", repr=False)
    exit_code: int = 0
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def told(self) -> bool:
        """Whether the hidden tests ran to their end and told anything."""
        return bool(self.tests) and not self.timed_out and not self.hindered

    @property
    def silence(self) -> str:
        """Why they told nothing, in words."""
        if self.hindered or self.timed_out:
            return self.hindered or f"the tests were killed after {self.seconds:.0f} s"
        return f"no test told a result; exit code {self.exit_code}"


def run_hidden_tests(
    task: Task, patch: bytes, sandboxes: SandboxBackend, config: TrainingConfig, harness: Harness
) -> HiddenRun:
    """Run the hidden tests on base_commit with a patch (b"" for none) in a fresh sandbox. Raises SandboxError."""
    with closing(sandboxes.open(task)) as sandbox:
        try:
            ready = _make_ready(sandbox, task, patch, harness)
        except GitTimeout as error:  # a patch of ten thousand folders can do that
            ready = HiddenRun(hindered=str(error))
        if ready.refusal is not None or ready.hindered:
            return ready
        mark = secrets.token_hex(12)
        file = f"/tmp/tests-{mark}.sh"
        sandbox.write_file(file, harness.script(task, mark).encode())
        result = sandbox.exec(
            f"bash {in_shell(file)}",
            timeout=config.grading_timeout,
            output_bytes=harness.output_bytes,
            env=harness.environment,
        )
    reading = harness.read(task, result.output, mark)
    return HiddenRun(
        tests=reading.tests,
        hindered=reading.hindered,
        notes=reading.notes,
        undone=ready.undone,
        log=_cut(result.output),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        seconds=result.seconds,
    )


def _make_ready(sandbox: Sandbox, task: Task, patch: bytes, harness: Harness) -> HiddenRun:
    """Apply the patch, and put the tests in place; what the run is so far."""
    applied = apply_patch(sandbox, patch) if patch else Applied()
    if applied.refusal is not None:
        return HiddenRun(refusal=applied.refusal)
    undone, hindered = _put_tests_in_place(sandbox, task, applied.paths)
    if not hindered and not harness.applies_tests:
        refusal = apply_patch(sandbox, task.test_patch.encode(), "/tmp/test.patch").refusal
        hindered = f"the test patch does not apply: {refusal}" if refusal is not None else ""
    return HiddenRun(hindered=hindered, undone=undone)


def _cut(log: str) -> str:
    """Keep a log's head and tail."""
    if len(log) <= LOG_BYTES:
        return log
    half = LOG_BYTES // 2
    return f"{log[:half]}\n[... {len(log) - LOG_BYTES:,} characters left out ...]\n{log[-half:]}"


# Reads NUL-separated paths. A link or file where a path needs a folder goes too: git keeps no path behind one.
_PUT_BACK = """
while IFS= read -r -d '' path; do
    while [[ $path == */* ]]; do
        path=${path%/*}
        if [[ -L $path || -f $path ]]; then rm -f -- "$path"; fi
    done
done < "$list"
set -e -o pipefail
xargs -0 -r rm -rf -- < "$list"
xargs -0 -r git --literal-pathspecs ls-tree -r -z --name-only "$base" -- < "$list" |
    xargs -0 -r git --literal-pathspecs checkout -q "$base" --
"""


def _put_tests_in_place(sandbox: Sandbox, task: Task, changed: Sequence[str]) -> tuple[str, str]:
    """Undo what a patch changed of the tests and their configuration.

    changed: the paths that the patch touches. Returns in words what was undone, and why it could not be.
    """
    tests = touched_files(task.test_patch)
    own = {*tests, *touched_files(task.patch)}
    guarded = [path for path in changed if path not in own and not set(path.split("/")).isdisjoint(GUARDED)]
    paths = "".join(f"{path}\0" for path in (*tests, *guarded))
    sandbox.write_file("/tmp/put-back", paths.encode("utf-8", "surrogateescape"))
    names = f"list={in_shell('/tmp/put-back')} base={shlex.quote(task.base_commit.strip() or 'HEAD')}"
    result = sandbox.exec(f"{names}\n{OWN_GIT}{_PUT_BACK}", timeout=GIT_TIMEOUT)
    if result.timed_out:
        raise GitTimeout(f"{task.instance_id}: the tests were not put back within {GIT_TIMEOUT:.0f} s")
    put_back = {*guarded, *tests}
    undone = [path for path in changed if path in put_back]
    more = f" and {len(undone) - NAMED:,} more" if len(undone) > NAMED else ""
    told = f"undone before the tests ran: {', '.join(undone[:NAMED])}{more}" if undone else ""
    return (
        told.encode("utf-8", "replace").decode(),
        f"the tests could not be put back: {result.output.strip()[-300:]}" if result.exit_code else "",
    )


class PytestHarness:
    """A task that brings its own test command, whose output is pytest's."""

    environment: Mapping[str, str] = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"  # plugins of this machine are no part of a task, and take seconds
    }
    output_bytes = LOG_BYTES
    applies_tests = False
    counts_xfail = False

    def script(self, task: Task, mark: str) -> str:
        files = (path for path in touched_files(task.test_patch) if path.endswith(".py"))
        return f"{task.test_command} {' '.join(map(shlex.quote, files))}\n"

    def read(self, task: Task, output: str, mark: str) -> Reading:
        return Reading(parse_pytest(output, (*task.fail_to_pass, *task.pass_to_pass)))


_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*)")
_DASH = " - "  # between a test and its message


def parse_pytest(output: str, wanted: Collection[str] = ()) -> dict[str, str]:
    """Read the short summary that `pytest -rA` prints: test id -> status, the worst where one is told twice.

    An id ends at the first " - ", unless it is one of the `wanted` ids, which may hold that themselves.
    """
    known, longest = frozenset(wanted), max(map(len, wanted), default=0)
    tests: dict[str, str] = {}
    for line in output.splitlines():
        if match := _RESULT.fullmatch(line):
            status, rest = match.groups()
            name = _known_id(rest, known, longest) or rest.partition(_DASH)[0]
            tests[name] = worst((status, tests.get(name, status)))
    return tests


def _known_id(rest: str, known: frozenset[str], longest: int) -> str | None:
    """Return the longest known id that the line begins with, up to its end or a dash."""
    end = len(rest) if len(rest) <= longest else rest.rfind(_DASH, 0, longest + len(_DASH))
    while end > 0:
        if rest[:end] in known:
            return rest[:end]
        end = rest.rfind(_DASH, 0, end + len(_DASH) - 1)
    return None
