"""Whether a task can be trusted: its base must fail, its gold patch must pass, as often as it is tried.

Uses the grader that training uses. Knows nothing of policies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from .config import TrainingConfig
from .grading import Bench, Outcome, grade
from .sandbox import SandboxBackend, SandboxError
from .tasks import Task


def fault_of(task: Task, sandboxes: SandboxBackend, config: TrainingConfig) -> str | None:
    """Return what is wrong with a task, or None.

    The base must fail every FAIL_TO_PASS test and pass every PASS_TO_PASS test (a SWE-Gym task's may fail as
    expected); the gold patch must be graded as resolved; the empty patch must earn 0. Sandbox faults are told as
    such. Raises GradingUnavailable.
    """
    bench = Bench(sandboxes, config)
    fine = ("PASSED", "XFAIL") if bench.harness_of(task).counts_xfail else ("PASSED",)
    try:
        base = bench.base(task)
        if wrong := [test for test in task.fail_to_pass if base.tests.get(test) == "PASSED"]:
            return f"base already passes {wrong[0]}"
        if wrong := [test for test in task.pass_to_pass if base.tests.get(test) not in fine]:
            silence = "" if base.told else f": {base.silence}"
            return f"base does not pass {wrong[0]}: {base.tests.get(wrong[0], 'not run')}{silence}"
        gold = grade(task, task.patch.encode(), sandboxes, config, bench)
        if gold.outcome is not Outcome.RESOLVED:
            return f"the gold patch is {gold.outcome}: {gold.detail}"
        if grade(task, b"", sandboxes, config).reward != 0:
            return "the empty patch earns a reward"
    except SandboxError as error:
        return f"the sandbox failed: {error}"
    return None


def validate(
    tasks: Sequence[Task],
    sandboxes: SandboxBackend,
    config: TrainingConfig,
    times: int = 1,
    workers: int | None = None,
) -> Iterator[tuple[Task, str | None]]:
    """Yield each task, in order, with its fault or None, after `times` tries.

    workers: how many are tried at once (default: the number of processors).
    """

    def faults(task: Task) -> str | None:
        found = [fault_of(task, sandboxes, config) for _ in range(times)]
        wrong = [fault for fault in found if fault]
        if wrong and len(wrong) < times:
            return f"flaky, {len(wrong)} of {times} tries: {wrong[0]}"
        return wrong[0] if wrong else None

    with ThreadPoolExecutor(workers or os.cpu_count() or 2) as pool:
        yield from zip(tasks, pool.map(faults, tasks), strict=True)
