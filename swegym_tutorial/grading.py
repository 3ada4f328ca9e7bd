"""From a patch to a verdict, in a fresh sandbox with the task's hidden tests.

Only the agent's doing earns 0: a sandbox that fails raises SandboxError and is never a reward. Knows nothing
of policies, tokens or groups.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Generic, TypeVar

from .config import TrainingConfig
from .hidden_tests import Harness, HiddenRun, PytestHarness, run_hidden_tests
from .rollout import Rollout
from .sandbox import SandboxBackend, SandboxError
from .swegym_grading import GradingUnavailable, SwegymHarness
from .tasks import Task


class Outcome(StrEnum):
    """What grading found. Only `resolved` earns 1; `infrastructure` earns nothing, not even 0."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    INVALID_PATCH = "invalid_patch"  # doesn't apply, or is too large
    TESTS_CRASHED = "tests_crashed"  # no test told a result
    TESTS_TIMEOUT = "tests_timeout"
    TAMPERED = "tampered"  # it was not the hidden tests that ran
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


REMEMBERED = 256 << 20  # bytes of verdicts: a full run has a hundred thousand, with logs of up to a megabyte
SWEGYM = SwegymHarness()
HARNESSES: Mapping[str, Harness] = {"pytest": PytestHarness(), "swegym": SWEGYM}


def harness_of(task: Task) -> Harness:
    """Return what runs and reads the hidden tests of a task. Raises GradingUnavailable for an unknown parser."""
    if task.parser not in HARNESSES:
        raise GradingUnavailable(
            f"{task.instance_id}: no parser is called {task.parser!r}; there are {', '.join(HARNESSES)}"
        )
    return HARNESSES[task.parser]


def check_graders(tasks: Sequence[Task]) -> None:
    """Raise GradingUnavailable, before anything starts, where a task cannot be graded here: says which, and why."""
    theirs = [task for task in tasks if harness_of(task) is SWEGYM]
    if theirs and (why := SWEGYM.why_not(theirs)):
        raise GradingUnavailable(why)


def grade(
    task: Task, patch: bytes, sandboxes: SandboxBackend, config: TrainingConfig, bench: Bench | None = None
) -> Verdict:
    """Apply a patch in a fresh sandbox and run the task's hidden tests there.

    Guarded: the files of the test patch, and the names in hidden_tests.GUARDED (they configure pytest) wherever
    they lie unless the gold patch touches them too. Whatever the patch did to these is undone before the tests
    run: they are as in base_commit. Not guarded: all other code that the tests' process runs. A patch can still
    bring a module that stands in for pytest, a tests/__init__.py, or code that prints a summary of its own and
    leaves; so a reward is no proof against an agent that sets out to forge it.

    An empty or too large patch needs no sandbox. Tests that tell nothing are the agent's doing, and earn 0, where
    they tell something without it; else the fault is the task's or the sandbox's. bench: remembers that, and one
    is made where none is given. Raises SandboxError for infrastructure faults, GradingUnavailable where what the
    task needs is not installed.
    """
    start = time.monotonic()
    if not patch.strip():
        return Verdict(Outcome.EMPTY_PATCH, detail="the attempt changed nothing")
    if len(patch) > config.patch_bytes:
        return Verdict(Outcome.INVALID_PATCH, detail=f"the patch is larger than {config.patch_bytes:,} bytes")
    bench = bench or Bench(sandboxes, config)
    run = bench.run(task, patch)
    verdict = judge(task, run)
    if run.refusal is None and not run.told:
        bench.base(task)  # raises where the tests tell nothing without the agent either
    elif bench.harness_of(task).counts_xfail and _all_but_xfails_pass(task, run):
        verdict = judge(task, run, _with(bench.base(task), "XFAIL"))
    return replace(verdict, seconds=time.monotonic() - start)


def judge(task: Task, run: HiddenRun, expected: Collection[str] = ()) -> Verdict:
    """Judge a run of the hidden tests. Every FAIL_TO_PASS and PASS_TO_PASS test must be told as PASSED.

    expected: PASS_TO_PASS tests that may be told as XFAIL, since they are without the patch too.
    """
    if run.refusal is not None:
        return Verdict(Outcome.INVALID_PATCH, detail=run.refusal)
    if not run.told:
        outcome = Outcome.TESTS_TIMEOUT if run.timed_out else Outcome.TESTS_CRASHED
        outcome = Outcome.TAMPERED if run.hindered else outcome
        return _verdict(outcome, run, run.silence)
    missing = [test for test in _wanted(task) if not _passed(task, test, run, expected)]
    named = ", ".join(f"{test} ({run.tests[test]})" if test in run.tests else test for test in missing[:5])
    detail = f"not passed: {named}{' ...' if len(missing) > 5 else ''}" if missing else ""
    resolved = _wanted(task) and not missing
    return _verdict(Outcome.RESOLVED if resolved else Outcome.UNRESOLVED, run, detail)


def _verdict(outcome: Outcome, run: HiddenRun, detail: str) -> Verdict:
    return Verdict(outcome, run.tests, "; ".join(filter(None, [detail, run.notes, run.undone])), run.log)


def _wanted(task: Task) -> tuple[str, ...]:
    return (*task.fail_to_pass, *task.pass_to_pass)


def _passed(task: Task, test: str, run: HiddenRun, expected: Collection[str]) -> bool:
    if run.tests.get(test) == "XFAIL":
        return test in expected and test not in task.fail_to_pass
    return run.tests.get(test) == "PASSED"


def _with(run: HiddenRun, status: str) -> frozenset[str]:
    return frozenset(test for test, told in run.tests.items() if told == status)


def _all_but_xfails_pass(task: Task, run: HiddenRun) -> bool:
    """Whether the verdict hangs on tests that fail as expected, and on nothing else."""
    xfails = _with(run, "XFAIL")
    return not xfails.isdisjoint(_wanted(task)) and all(
        _passed(task, test, run, xfails) for test in _wanted(task)
    )


_Value = TypeVar("_Value")


class _Once(Generic[_Value]):
    """Finds values by their keys, each once: who asks for one that is being found waits for it.

    A fault is raised to all that wait, and not remembered. Of what was found, the oldest is forgotten where all
    of it together has more bytes than `limit`, by `size`.
    """

    def __init__(self, size: Callable[[_Value], int] = lambda value: 0, limit: int = 0) -> None:
        self._size, self._limit = size, limit
        self._lock = threading.Lock()
        self._values: dict[object, Future[_Value]] = {}
        self._sizes: dict[object, int] = {}  # of what was found, the oldest first
        self._total = 0

    def get(self, key: object, find: Callable[[], _Value]) -> tuple[_Value, bool]:
        """Return the value, and whether another call found it."""
        with self._lock:
            known = self._values.get(key)
            if known is None:
                mine = self._values[key] = Future()
        if known is not None:
            return known.result(), True
        try:
            value = find()
        except BaseException as error:
            with self._lock:
                del self._values[key]
            mine.set_exception(error)
            raise
        mine.set_result(value)
        with self._lock:
            self._sizes[key] = self._size(value)
            self._total += self._sizes[key]
            while self._total > self._limit:
                oldest = next(iter(self._sizes))
                self._total -= self._sizes.pop(oldest)
                del self._values[oldest]
        return value, False


class Bench:
    """Runs hidden tests, and remembers for one run what they tell where no agent was. Safe for many threads."""

    def __init__(
        self,
        sandboxes: SandboxBackend,
        config: TrainingConfig,
        harness_of: Callable[[Task], Harness] = harness_of,
    ) -> None:
        self._sandboxes = sandboxes
        self._config = config
        self._bases: _Once[HiddenRun] = _Once()
        self.harness_of = harness_of

    def run(self, task: Task, patch: bytes) -> HiddenRun:
        """Run a task's hidden tests with a patch (b"" for none). Raises SandboxError and GradingUnavailable."""
        return run_hidden_tests(task, patch, self._sandboxes, self._config, self.harness_of(task))

    def base(self, task: Task) -> HiddenRun:
        """Return the run on the untouched repository, which is made when it is first asked for.

        Raises SandboxError where the tests tell nothing there, and not with the gold patch either.
        """
        return self._bases.get((task.instance_id, task.base_commit), lambda: self._find_base(task))[0]

    def _find_base(self, task: Task) -> HiddenRun:
        base = self.run(task, b"")
        # Tests that need what the gold patch brings (a module that conftest.py imports) can't even begin on base.
        if base.told or (task.patch.strip() and self.run(task, task.patch.encode()).told):
            return base
        raise SandboxError(
            f"{task.instance_id}: the hidden tests tell nothing on the untouched repository and with the gold patch "
            f"either ({base.silence}): the task or its image is broken, so leave it out, or grading_timeout is too "
            f"short. The output ends: {base.log.strip()[-500:]!r}"
        )


def _bytes_of(verdict: Verdict) -> int:
    """Return about how much memory a verdict takes: a log, and for each test an id and what surrounds it."""
    return len(verdict.log) + sum(len(test) + 200 for test in verdict.tests)


class Grader:
    """Grades for one run: identical patches of one task share one verdict, also while it is being found."""

    def __init__(self, sandboxes: SandboxBackend, config: TrainingConfig, bench: Bench | None = None) -> None:
        self._sandboxes = sandboxes
        self._config = config
        self._bench = bench or Bench(sandboxes, config)
        self._verdicts = _Once(_bytes_of, REMEMBERED)

    def grade(self, task: Task, patch: bytes) -> Verdict:
        """As the function `grade`; a fault is raised to all that wait for it, and not remembered."""
        key = (task.instance_id, hashlib.sha256(patch).digest())
        verdict, shared = self._verdicts.get(
            key, lambda: grade(task, patch, self._sandboxes, self._config, self._bench)
        )
        return replace(verdict, shared=True) if shared else verdict
