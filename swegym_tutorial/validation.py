"""Whether a task can be trusted: its base must fail, its gold patch must pass, as often as it is tried.

Uses the grader that training uses. Knows nothing of policies, nor of where its findings are kept (trust.py).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .answers import check_answers
from .config import TrainingConfig
from .grading import Bench, Outcome, Verdict, grade
from .hidden_tests import HiddenRun
from .sandbox import BackendClosed, SandboxBackend, SandboxError
from .tasks import Task, wrong_files

NOT_RUN = "not run"  # the status of a test that told nothing
PAUSE = 1.0  # seconds before a try is made again, doubled each time
SHOWN = 3  # tests that a reason names


class Status(StrEnum):
    """What is known of a task after its tries."""

    VALID = "valid"
    BROKEN = "broken"  # it fails each try, and in the same way
    FLAKY = "flaky"  # its tries differ
    UNCHECKED = "unchecked"  # the sandbox failed, and nothing is known of the task


@dataclass(frozen=True)
class Try:
    """One run of a task's base and one of its gold patch. Of the tests those that its lists name: id -> status."""

    fault: str = ""  # what is wrong with the task; "" for nothing
    base: Mapping[str, str] = field(default_factory=dict)
    gold: Mapping[str, str] = field(default_factory=dict)
    told: int = 0  # tests that told a result with the gold patch, listed or not
    base_seconds: float = 0.0
    gold_seconds: float = 0.0
    leak: str = ""  # an answer that lies about in the agent's sandbox, where that was searched


@dataclass(frozen=True)
class Validation:
    """What the tries of a task came to. Statuses are the first try's, seconds the tries' mean."""

    task: Task
    status: Status
    why: str = ""  # "" where it is valid
    tries: int = 0  # that came to their end
    base: Mapping[str, str] = field(default_factory=dict)
    gold: Mapping[str, str] = field(default_factory=dict)
    told: int = 0
    base_seconds: float = 0.0
    gold_seconds: float = 0.0

    @property
    def valid(self) -> bool:
        return self.status is Status.VALID


def fault_of(task: Task, sandboxes: SandboxBackend, config: TrainingConfig) -> str | None:
    """Return what is wrong with a task by one try, or None. Raises SandboxError and GradingUnavailable."""
    return try_once(task, sandboxes, config).fault or None


def try_once(task: Task, sandboxes: SandboxBackend, config: TrainingConfig) -> Try:
    """Run a task's base and its gold patch, each in a fresh sandbox, and say what is wrong.

    The base must fail every FAIL_TO_PASS test and pass every PASS_TO_PASS test (a SWE-Gym task's may fail as
    expected); the gold patch must be graded as resolved; the empty patch must earn 0. Raises SandboxError for
    infrastructure faults, which say nothing of the task, and GradingUnavailable.
    """
    if not task.fail_to_pass:
        return Try("FAIL_TO_PASS is empty: there is nothing that a patch would have to mend")
    bench, patch = Bench(sandboxes, config), task.patch.encode()
    base = bench.run(task, b"")
    if not base.told:  # else the grader would call it an infrastructure fault
        gold = bench.run(task, patch) if patch.strip() else HiddenRun(hindered="there is none")
        if not gold.told:
            return Try(_silence(base, gold), base_seconds=base.seconds, gold_seconds=gold.seconds)
    verdict = grade(task, patch, sandboxes, config, bench)
    fine = ("PASSED", "XFAIL") if bench.harness_of(task).counts_xfail else ("PASSED",)
    fault = _fault_of_base(task, base, fine) or _fault_of_gold(task, verdict, fine)
    if not fault and grade(task, b"", sandboxes, config, bench).reward != 0:
        fault = "the empty patch earns a reward"
    return Try(
        fault,
        base={test: base.tests[test] for test in _wanted(task) if test in base.tests},
        gold={test: verdict.tests[test] for test in _wanted(task) if test in verdict.tests},
        told=len(verdict.tests),
        base_seconds=base.seconds,
        gold_seconds=verdict.seconds,
    )


def _silence(base: HiddenRun, gold: HiddenRun) -> str:
    silence = gold.silence if gold.refusal is None else f"it does not apply: {gold.refusal}"
    return (
        f"the hidden tests tell nothing: on base {base.silence}; with the gold patch {silence}; "
        f"the output ends: {base.log.strip()[-300:]!r}"
    )


def _fault_of_base(task: Task, base: HiddenRun, fine: Sequence[str]) -> str:
    if wrong := [test for test in task.fail_to_pass if base.tests.get(test) == "PASSED"]:
        return f"base already passes {_named(wrong)}"
    if wrong := [test for test in task.pass_to_pass if base.tests.get(test) not in fine]:
        silence = "" if base.told else f": {base.silence}"
        return f"base does not pass {_named(wrong)}: {base.tests.get(wrong[0], NOT_RUN)}{silence}"
    return ""


def _fault_of_gold(task: Task, verdict: Verdict, fine: Sequence[str]) -> str:
    """fine: what a PASS_TO_PASS test may be told as, since the grader lets a patch do what the gold patch does."""
    failing = [test for test in task.fail_to_pass if verdict.tests.get(test) != "PASSED"]
    failing += [test for test in task.pass_to_pass if verdict.tests.get(test) not in fine]
    if verdict.outcome is Outcome.RESOLVED or (verdict.outcome is Outcome.UNRESOLVED and not failing):
        return ""
    return f"the gold patch is {verdict.outcome}: {verdict.detail}"


def _wanted(task: Task) -> tuple[str, ...]:
    return (*task.fail_to_pass, *task.pass_to_pass)


def _named(tests: Sequence[str]) -> str:
    more = f" and {len(tests) - SHOWN} more" if len(tests) > SHOWN else ""
    return ", ".join(tests[:SHOWN]) + more


def conclude(task: Task, tries: Sequence[Try], failures: Sequence[str] = ()) -> Validation:
    """Say what the tries of a task come to; failures: why others came to no end."""
    if not tries:
        return Validation(task, Status.UNCHECKED, f"the sandbox failed: {failures[0] if failures else '?'}")
    faults = [each.leak for each in tries if each.leak] + [each.fault for each in tries if each.fault]
    if differences := _differences(task, tries):
        status, why = Status.FLAKY, f"{len(tries)} tries differ: {_named(differences)}"
        why += f"; {faults[0]}" if faults else ""
    elif faults:
        status, why = Status.BROKEN, faults[0]
    else:
        status, why = Status.VALID, ""
    first, count = tries[0], len(tries)
    return Validation(
        task,
        status,
        why,
        count,
        first.base,
        first.gold,
        first.told,
        sum(each.base_seconds for each in tries) / count,
        sum(each.gold_seconds for each in tries) / count,
    )


def _differences(task: Task, tries: Sequence[Try]) -> list[str]:
    """Say which listed tests, and whether the outcome, came out differently."""
    found = []
    for name, runs in (("gold", [each.gold for each in tries]), ("base", [each.base for each in tries])):
        for test in dict.fromkeys(_wanted(task)):
            statuses = Counter(run.get(test, NOT_RUN) for run in runs)
            if len(statuses) > 1:
                counts = ", ".join(f"{status} {count} times" for status, count in statuses.most_common())
                found.append(f"{test} on {name} ({counts})")
    if not found and 0 < (bad := sum(bool(each.fault) for each in tries)) < len(tries):
        found.append(f"{bad} of {len(tries)} fail")
    return found


def validate(
    tasks: Sequence[Task],
    sandboxes: SandboxBackend,
    config: TrainingConfig,
    times: int = 1,
    workers: int | None = None,
    on_try: Callable[[], None] = lambda: None,
) -> Iterator[Validation]:
    """Try each task `times` times, and yield what it came to as soon as that is known, so in any order.

    workers: tries at once (default: the number of processors). on_try: called after each. A try whose sandbox
    fails is made again, config.attempt_retries times. An agent's sandbox of each task is searched for answers
    too. Raises GradingUnavailable and BackendClosed; close the sandboxes to end tries that run on after an interrupt.
    """
    over = threading.Event()

    def work(task: Task, number: int) -> Try | str:
        """Return a try, or why it came to no end."""
        failure = ""
        for attempt in range(config.attempt_retries + 1):
            if attempt and over.wait(PAUSE * 2**attempt):
                break
            try:
                leak = check_answers(sandboxes, task) if number == 0 else ""
                return replace(try_once(task, sandboxes, config), leak=leak)
            except BackendClosed:
                raise
            except SandboxError as error:
                if why := wrong_files(task):  # no sandbox could have been opened
                    return Try(why)
                failure = str(error)
        return failure

    pool = ThreadPoolExecutor(workers or os.cpu_count() or 2, thread_name_prefix="validation")
    try:
        futures = {pool.submit(work, task, number): task for task in tasks for number in range(times)}
        found: dict[str, list[Try | str]] = {task.instance_id: [] for task in tasks}
        for future in as_completed(futures):
            task = futures[future]
            results = found[task.instance_id]
            results.append(future.result())
            on_try()
            if len(results) == times:
                tries = [each for each in results if isinstance(each, Try)]
                yield conclude(task, tries, [each for each in results if isinstance(each, str)])
    finally:
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)
