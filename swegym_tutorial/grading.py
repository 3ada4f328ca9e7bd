"""From a patch to a verdict, in a fresh sandbox with the task's hidden tests.

Only the agent's doing earns 0: a sandbox that fails raises SandboxError and is never a reward. How a run is judged
stands in verdicts.py. Knows nothing of policies, tokens or groups.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from .config import TrainingConfig
from .hidden_tests import Harness, HiddenRun, PytestHarness, run_hidden_tests
from .reporting import Channel
from .rollout import Rollout
from .sandbox import SandboxBackend, SandboxError
from .swegym_grading import GradingUnavailable, SwegymHarness
from .tasks import Task
from .verdicts import (
    Outcome,
    Verdict,
    all_but_xfails_pass,
    judge,
    noted,
    plain_outcome,
    tampered,
    with_status,
)


@dataclass(frozen=True)
class Episode:
    """A graded attempt."""

    rollout: Rollout
    verdict: Verdict
    habits: Mapping[str, bool] = field(default_factory=dict)  # see habits.py

    @property
    def reward(self) -> float:
        return self.verdict.reward


Reward = Callable[[Task, Rollout, Verdict], float]  # between 0 and 1


def rewarded(task: Task, rollout: Rollout, verdict: Verdict, reward: Reward) -> Verdict:
    """Return a verdict that is worth what an own reward makes of it.

    Raises ValueError where it gives no number between 0 and 1, or fails. No other scale would change the training:
    advantages are in units of the group's spread.
    """
    whose = f"the reward {name_of(reward)}, asked about an attempt at {task.instance_id},"
    try:
        given = reward(task, rollout, verdict)
    except Exception as error:
        raise ValueError(f"{whose} failed with {type(error).__name__}: {error}") from error
    try:
        value = math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError):  # an array of several numbers, nothing at all
        value = math.nan
    if not 0 <= value <= 1:
        raise ValueError(f"{whose} gave {given!r:.100}: a reward is a number between 0 and 1")
    return replace(verdict, own_reward=value)


def name_of(reward: Reward | None) -> str | None:
    """Return what a reward is called in logs and messages; None is the plain one."""
    return None if reward is None else getattr(reward, "__name__", type(reward).__name__)


ENOUGH = 0.5  # of the number of tests that tell a result with the gold patch
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
    task: Task,
    patch: bytes,
    sandboxes: SandboxBackend,
    config: TrainingConfig,
    bench: Bench | None = None,
    gold: Mapping[str, str] | None = None,
    told: int = 0,
    grade_empty: bool = False,
) -> Verdict:
    """Apply a patch in a fresh sandbox and run the task's hidden tests there.

    Guarded are the files of the test patch and what decides how tests run (guards.py): whatever the patch did to
    these is undone before the tests run, and told in the verdict. A reward needs the printed summary and a report
    beside it to agree (verdicts.py). The patch's code still runs in the tests' own process: docs/threat-model.md
    tells what that leaves. Where something was undone that decides results, and no reward is earned, the tests run
    once more as SWE-Gym runs them, so that the verdict tells what that would have said.

    An empty or too large patch needs no sandbox; grade_empty: an empty one is given one all the same. Tests that
    tell nothing are the agent's doing, and earn 0, where they tell something without it; else the fault is the
    task's or the sandbox's. bench: remembers that, and one is made where none is given. gold: the results of
    the listed tests with the gold patch: what was XFAIL there may be XFAIL. told: how many tests tell a result with it,
    listed or not; half of them must for a reward. Raises SandboxError for infrastructure faults,
    GradingUnavailable where what the task needs is not installed, TypeError for a patch that is text.
    """
    _check_bytes(patch)
    start = time.monotonic()
    if not patch.strip():
        if not grade_empty:
            return Verdict(Outcome.EMPTY_PATCH, detail="the attempt changed nothing")
        patch = b""
    if len(patch) > config.patch_bytes:
        return Verdict(Outcome.INVALID_PATCH, detail=f"the patch is larger than {config.patch_bytes:,} bytes")
    bench = bench or Bench(sandboxes, config)
    run = bench.run(task, patch)
    verdict = _judged(task, run, bench, gold, ENOUGH * told)
    if run.bent and verdict.outcome is not Outcome.RESOLVED:  # what would it have earned?
        with contextlib.suppress(SandboxError):
            verdict = replace(verdict, plain=bench.plain(task, patch))
    if not patch:  # worth nothing, whatever its tests tell
        verdict = replace(verdict, outcome=Outcome.EMPTY_PATCH)
    return replace(verdict, seconds=time.monotonic() - start)


def _check_bytes(patch: object) -> None:
    if not isinstance(patch, bytes):
        raise TypeError(
            f"a patch is bytes, for it is applied byte for byte, and this one is {type(patch).__name__}: give "
            "patch.encode(), as in grade(task, task.patch.encode(), ...)"
        )


def _judged(
    task: Task, run: HiddenRun, bench: Bench, gold: Mapping[str, str] | None, least: float
) -> Verdict:
    """Judge a run, with what the tests tell where no agent was, as far as the verdict hangs on it."""
    counts_xfail = bench.harness_of(task).counts_xfail
    expected = with_status(gold, "XFAIL") if gold and counts_xfail else frozenset()
    verdict = judge(task, run, expected, least)
    if run.refusal is not None:
        return verdict
    if not run.told:
        bench.base(task)  # raises where the tests tell nothing without the agent either
    elif run.channel is Channel.ABSENT and bench.base(task).channel is not Channel.ABSENT:
        return tampered(
            verdict, "the tests ran without the report that they give on the untouched repository"
        )
    elif not gold and counts_xfail and all_but_xfails_pass(task, run):
        verdict = judge(task, run, with_status(bench.base(task).tests, "XFAIL"), least)
    return _examined(task, run, verdict, bench) if verdict.outcome is Outcome.RESOLVED else verdict


def _examined(task: Task, run: HiddenRun, verdict: Verdict, bench: Bench) -> Verdict:
    """Look at a run that is to earn a reward for what would be strange without the agent too."""
    if run.channel is Channel.ABSENT:
        return noted(verdict, "there is no report beside what was printed, as on the untouched repository")
    if signs := bench.unusual(task, run.signs):
        return tampered(verdict, f"results were forged: {', '.join(sorted(signs)[:3])}")
    if run.canary and bench.tells_canaries(task):
        return tampered(verdict, run.canary)
    return noted(verdict, f"{run.canary}, nor are they without the agent") if run.canary else verdict


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
        self._golds: _Once[HiddenRun] = _Once()
        self.harness_of = harness_of

    def run(self, task: Task, patch: bytes) -> HiddenRun:
        """Run a task's hidden tests with a patch (b"" for none). Raises SandboxError and GradingUnavailable."""
        return run_hidden_tests(task, patch, self._sandboxes, self._config, self.harness_of(task))

    def plain(self, task: Task, patch: bytes) -> Outcome | None:
        """Return what SWE-Gym's way alone says of a patch: None where nothing ran. Nothing is guarded."""
        harness = self.harness_of(task)
        run = run_hidden_tests(task, patch, self._sandboxes, self._config, harness, guarded=False)
        return plain_outcome(task, run)

    def base(self, task: Task) -> HiddenRun:
        """Return the run on the untouched repository, which is made when it is first asked for.

        Raises SandboxError where the tests tell nothing there, and not with the gold patch either.
        """
        return self._bases.get((task.instance_id, task.base_commit), lambda: self._find_base(task))[0]

    def unusual(self, task: Task, signs: frozenset[str]) -> frozenset[str]:
        """Return which signs of forgery show neither on the untouched repository nor with the gold patch."""
        if signs:
            signs -= self.base(task).signs
        if signs and task.patch.strip():
            signs -= self._gold(task).signs
        return signs

    def tells_canaries(self, task: Task) -> bool:
        """Whether the tests of known results are told on the untouched repository or with the gold patch."""
        runs = (self.base, self._gold) if task.patch.strip() else (self.base,)
        return any(not run(task).canary for run in runs)

    def _gold(self, task: Task) -> HiddenRun:
        key = (task.instance_id, task.base_commit)
        return self._golds.get(key, lambda: self.run(task, task.patch.encode()))[0]

    def _find_base(self, task: Task) -> HiddenRun:
        base = self.run(task, b"")
        # Tests that need what the gold patch brings (a module that conftest.py imports) can't even begin on base.
        if base.told or (task.patch.strip() and self._gold(task).told):
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

    def __init__(
        self,
        sandboxes: SandboxBackend,
        config: TrainingConfig,
        bench: Bench | None = None,
        *,
        gold: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        told: Mapping[str, int] = MappingProxyType({}),
        flaky: Collection[str] = (),
        share_verdicts: bool = True,
        grade_empty_patches: bool = False,
    ) -> None:
        """gold: instance id -> results with the gold patch, told: how many they are, see `grade`. flaky: ids of tasks whose verdicts are
        never shared, and whose empty patches are always run, as with share_verdicts=False and
        grade_empty_patches=True for all."""
        self._sandboxes = sandboxes
        self._config = config
        self._bench = bench or Bench(sandboxes, config)
        self._gold, self._told, self._flaky = gold, told, frozenset(flaky)
        self._share, self._grade_empty = share_verdicts, grade_empty_patches
        self._verdicts = _Once(_bytes_of, REMEMBERED)

    def grade(self, task: Task, patch: bytes) -> Verdict:
        """As the function `grade`; a fault is raised to all that wait for it, and not remembered."""
        _check_bytes(patch)
        if not self._share or task.instance_id in self._flaky:
            return self._find(task, patch)
        key = (task.instance_id, hashlib.sha256(patch).digest())
        verdict, shared = self._verdicts.get(key, lambda: self._find(task, patch))
        return replace(verdict, shared=True) if shared else verdict

    def _find(self, task: Task, patch: bytes) -> Verdict:
        return grade(
            task,
            patch,
            self._sandboxes,
            self._config,
            self._bench,
            self._gold.get(task.instance_id),
            self._told.get(task.instance_id, 0),
            self._grade_empty or task.instance_id in self._flaky,
        )
