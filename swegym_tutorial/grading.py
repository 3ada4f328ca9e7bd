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
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .config import TrainingConfig
from .patches import apply_patch, touched_files
from .rollout import Rollout
from .sandbox import CommandResult, Sandbox, SandboxBackend, SandboxError
from .tasks import Task

LOG_BYTES = 1 << 20  # of the tests' output, head and tail
TEST_ENV = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"
}  # plugins of this machine are no part of a task, and take seconds
GUARDED = ("conftest.py", "pytest.ini", ".pytest.ini", "tox.ini", "setup.cfg", "pyproject.toml")


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

    The files of the test patch are put back to base_commit first, and so are files that configure pytest
    unless the gold patch touches them too, whatever the patch did to them. An empty or too large patch needs
    no sandbox. Raises SandboxError for infrastructure faults.
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
        if patch and (refusal := apply_patch(sandbox, patch)):
            return Verdict(Outcome.INVALID_PATCH, detail=refusal)
        undone = _put_tests_in_place(sandbox, task, patch)
        command = f"{task.test_command} {' '.join(map(shlex.quote, _test_files(task)))}"
        result = sandbox.exec(command, timeout=config.grading_timeout, output_bytes=LOG_BYTES, env=TEST_ENV)
    verdict = judge(task, result)
    return replace(verdict, detail="; ".join(filter(None, [verdict.detail, undone])))


def judge(task: Task, result: CommandResult) -> Verdict:
    """Read a run of the hidden tests. Every FAIL_TO_PASS and PASS_TO_PASS test must be told as PASSED."""
    tests = parse_pytest(result.output)
    if result.timed_out:
        return Verdict(
            Outcome.TESTS_TIMEOUT, tests, f"the tests were killed after {result.seconds:.0f} s", result.output
        )
    if not tests:
        return Verdict(
            Outcome.TESTS_CRASHED, {}, f"no test told a result; exit code {result.exit_code}", result.output
        )
    wanted = (*task.fail_to_pass, *task.pass_to_pass)
    missing = [test for test in wanted if tests.get(test) != "PASSED"]
    detail = (
        "" if not missing else "not passed: " + ", ".join(missing[:5]) + (" ..." if len(missing) > 5 else "")
    )
    return Verdict(
        Outcome.UNRESOLVED if missing or not wanted else Outcome.RESOLVED, tests, detail, result.output
    )


_RESULT = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*?)(?: - .*)?$")


def parse_pytest(output: str) -> dict[str, str]:
    """Read the short summary that `pytest -rA` prints: test id -> status, the worst where one is told twice."""
    order = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")
    tests: dict[str, str] = {}
    for line in output.splitlines():
        if match := _RESULT.match(line):
            status, name = match.groups()
            tests[name] = max(status, tests.get(name, status), key=order.index)
    return tests


def _test_files(task: Task) -> list[str]:
    return [path for path in touched_files(task.test_patch) if path.endswith(".py")]


def _put_tests_in_place(sandbox: Sandbox, task: Task, patch: bytes) -> str:
    """Undo the patch's changes to tests and their configuration, then apply the test patch. Says what it undid."""
    tests = touched_files(task.test_patch)
    gold = set(touched_files(task.patch))
    changed = touched_files(patch.decode("utf-8", "replace"))
    guarded = [p for p in changed if p.rpartition("/")[2] in GUARDED and p not in gold and p not in tests]
    for path in (*tests, *guarded):
        name = shlex.quote(path)
        base = task.base_commit or "HEAD"
        sandbox.exec(
            f"rm -rf {name}; git cat-file -e {base}:{name} 2>/dev/null && git checkout -q {base} -- {name}",
            timeout=60,
        )
    if refusal := apply_patch(sandbox, task.test_patch.encode(), "/tmp/test.patch"):
        raise SandboxError(f"{task.instance_id}: the test patch does not apply on base: {refusal}")
    undone = [path for path in changed if path in guarded or path in tests]
    return f"undone before the tests ran: {', '.join(undone)}" if undone else ""


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
