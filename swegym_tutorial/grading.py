"""From a patch to a verdict, in a fresh sandbox with the task's hidden tests.

Only the agent's doing earns 0: a sandbox that fails raises SandboxError and is never a reward. Knows nothing
of policies, tokens or groups.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .config import TrainingConfig
from .patches import GIT_TIMEOUT, Applied, apply_patch, touched_files
from .rollout import Rollout
from .sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError
from .tasks import Task

LOG_BYTES = 1 << 20  # of the tests' output, head and tail
TEST_ENV = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
}  # plugins of this machine are no part of a task, and take seconds
GUARDED = (
    *("conftest.py", "pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini"),
    *("tox.ini", "setup.cfg", "pyproject.toml"),
    ".gitattributes",  # would change the tests while they are put in place
)


class Outcome(StrEnum):
    """What grading found. Only `resolved` earns 1; `infrastructure` earns nothing, not even 0."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    INVALID_PATCH = "invalid_patch"  # doesn't apply, or is too large
    TESTS_CRASHED = "tests_crashed"  # no test told a result
    TESTS_TIMEOUT = "tests_timeout"
    TAMPERED = "tampered"
    INFRASTRUCTURE = "infrastructure"


@dataclass(frozen=True)
class Verdict:
    """What one patch is worth, and why."""

    outcome: Outcome
    tests: Mapping[str, str] = field(default_factory=dict)  # test id -> PASSED, FAILED, ...
    detail: str = ""  # in words, where the tests don't say it
    log: str = field(default="", repr=False)  # what the tests printed
    seconds: float = 0.0
    shared: bool = False  # found for the same patch before

    @property
    def reward(self) -> float:
        """1.0 or 0.0; raises ValueError for an infrastructure fault, which is never a reward."""
        if self.outcome is Outcome.INFRASTRUCTURE:
            raise ValueError(f"an infrastructure fault has no reward: {self.detail}")
        return float(self.outcome is Outcome.RESOLVED)


@dataclass(frozen=True)
class Episode:
    """A graded attempt."""

    rollout: Rollout
    verdict: Verdict

    @property
    def reward(self) -> float:
        return self.verdict.reward


def grade(task: Task, patch: bytes, sandboxes: SandboxBackend, config: TrainingConfig) -> Verdict:
    """Apply a patch in a fresh sandbox and run the task's hidden tests there.

    Guarded: the files of the test patch, and the names in GUARDED (they configure pytest) wherever they lie
    unless the gold patch touches them too. Whatever the patch did to these is undone before the tests run: they
    are as in base_commit. Not guarded: all other code that the tests' process runs. A patch can still bring a
    module that stands in for pytest, a tests/__init__.py, or code that prints a summary of its own and leaves;
    so a reward is no proof against an agent that sets out to forge it. An empty or too large patch needs no
    sandbox. Raises SandboxError for infrastructure faults.
    """
    start = time.monotonic()
    if not patch.strip():
        return Verdict(Outcome.EMPTY_PATCH, detail="the attempt changed nothing")
    if len(patch) > config.patch_bytes:
        return Verdict(Outcome.INVALID_PATCH, detail=f"the patch is larger than {config.patch_bytes:,} bytes")
    verdict = run_tests(task, patch, sandboxes, config)
    return replace(verdict, seconds=time.monotonic() - start)


def run_tests(task: Task, patch: bytes, sandboxes: SandboxBackend, config: TrainingConfig) -> Verdict:
    """Run the hidden tests on base_commit with a patch (b"" for none) in a fresh sandbox. Raises SandboxError."""
    with closing(sandboxes.open(task)) as sandbox:
        applied = apply_patch(sandbox, patch) if patch else Applied()
        if applied.refusal is not None:
            return Verdict(Outcome.INVALID_PATCH, detail=applied.refusal)
        undone = _put_tests_in_place(sandbox, task, applied.paths)
        command = f"{task.test_command} {' '.join(map(shlex.quote, _test_files(task)))}"
        result = sandbox.exec(command, timeout=config.grading_timeout, output_bytes=LOG_BYTES, env=TEST_ENV)
    verdict = judge(task, result)
    return replace(verdict, detail="; ".join(filter(None, [verdict.detail, undone])))


def judge(task: Task, result: CommandResult) -> Verdict:
    """Read a run of the hidden tests. Every FAIL_TO_PASS and PASS_TO_PASS test must be told as PASSED."""
    wanted = (*task.fail_to_pass, *task.pass_to_pass)
    tests = parse_pytest(result.output, wanted)
    if result.timed_out:
        return Verdict(
            Outcome.TESTS_TIMEOUT, tests, f"the tests were killed after {result.seconds:.0f} s", result.output
        )
    if not tests:
        return Verdict(
            Outcome.TESTS_CRASHED, {}, f"no test told a result; exit code {result.exit_code}", result.output
        )
    missing = [test for test in wanted if tests.get(test) != "PASSED"]
    detail = (
        "" if not missing else "not passed: " + ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    )
    return Verdict(
        Outcome.UNRESOLVED if missing or not wanted else Outcome.RESOLVED, tests, detail, result.output
    )


_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*)")
_DASH = " - "  # between a test and its message


def parse_pytest(output: str, wanted: Collection[str] = ()) -> dict[str, str]:
    """Read the short summary that `pytest -rA` prints: test id -> status, the worst where one is told twice.

    An id ends at the first " - ", unless it is one of the `wanted` ids, which may hold that themselves.
    """
    order = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")
    known, longest = frozenset(wanted), max(map(len, wanted), default=0)
    tests: dict[str, str] = {}
    for line in output.splitlines():
        if match := _RESULT.fullmatch(line):
            status, rest = match.groups()
            name = _known_id(rest, known, longest) or rest.partition(_DASH)[0]
            tests[name] = max(status, tests.get(name, status), key=order.index)
    return tests


def _known_id(rest: str, known: frozenset[str], longest: int) -> str | None:
    """Return the longest known id that the line begins with, up to its end or a dash."""
    end = len(rest) if len(rest) <= longest else rest.rfind(_DASH, 0, longest + len(_DASH))
    while end > 0:
        if rest[:end] in known:
            return rest[:end]
        end = rest.rfind(_DASH, 0, end + len(_DASH) - 1)
    return None


def _test_files(task: Task) -> list[str]:
    return [path for path in touched_files(task.test_patch) if path.endswith(".py")]


# Reads NUL-separated paths. A link or file where a path needs a folder goes too: git keeps no path behind one.
_PUT_BACK = """
list="${{TMPDIR:-/tmp}}"/put-back
while IFS= read -r -d '' path; do
    while [[ $path == */* ]]; do
        path=${{path%/*}}
        if [[ -L $path || -f $path ]]; then rm -f -- "$path"; fi
    done
done < "$list"
set -e -o pipefail
xargs -0 -r rm -rf -- < "$list"
xargs -0 -r git --literal-pathspecs ls-tree -r -z --name-only {base} -- < "$list" |
    xargs -0 -r git --literal-pathspecs checkout -q {base} --
"""


def _put_tests_in_place(sandbox: Sandbox, task: Task, changed: Sequence[str]) -> str:
    """Undo what a patch changed of the tests and their configuration, then apply the test patch.

    changed: the paths that the patch touches. Returns in words what was undone.
    """
    tests = touched_files(task.test_patch)
    own = {*tests, *touched_files(task.patch)}
    guarded = [path for path in changed if path not in own and not set(path.split("/")).isdisjoint(GUARDED)]
    paths = "".join(f"{path}\0" for path in (*tests, *guarded))
    sandbox.write_file("/tmp/put-back", paths.encode("utf-8", "surrogateescape"))
    result = sandbox.exec(_PUT_BACK.format(base=task.base_commit or "HEAD"), timeout=GIT_TIMEOUT)
    if result.exit_code:
        raise SandboxError(
            f"{task.instance_id}: the tests could not be put back: {result.output.strip()[-300:]}"
        )
    refusal = apply_patch(sandbox, task.test_patch.encode(), "/tmp/test.patch").refusal
    if refusal is not None:
        raise SandboxError(f"{task.instance_id}: the test patch does not apply on base: {refusal}")
    undone = ", ".join(path for path in changed if path in guarded or path in tests)
    return f"undone before the tests ran: {undone}".encode("utf-8", "replace").decode() if undone else ""


class Grader:
    """Grades for one run: identical patches of one task share one verdict, also while it is being found."""

    def __init__(self, sandboxes: SandboxBackend, config: TrainingConfig) -> None:
        self._sandboxes = sandboxes
        self._config = config
        self._lock = threading.Lock()
        self._verdicts: dict[tuple[str, bytes], Future[Verdict]] = {}

    def grade(self, task: Task, patch: bytes) -> Verdict:
        """As the function `grade`; a fault is raised to all that wait for it, and not remembered."""
        key = (task.instance_id, hashlib.sha256(patch).digest())
        with self._lock:
            known = self._verdicts.get(key)
            if known is None:
                mine = self._verdicts[key] = Future()
        if known is not None:
            return replace(known.result(), shared=True)
        try:
            verdict = grade(task, patch, self._sandboxes, self._config)
        except BaseException as error:
            with self._lock:
                del self._verdicts[key]
            mine.set_exception(error)
            raise
        mine.set_result(verdict)
        return verdict
