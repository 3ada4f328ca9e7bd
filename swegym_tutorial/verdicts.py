"""What one patch is worth, judged from a run of the hidden tests.

A reward needs both ways of results, the printed summary and the report beside it, to say that every wanted test
passed, and the tests of known results to have come out as they must. Knows nothing of sandboxes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from .hidden_tests import HiddenRun
from .reporting import Channel
from .tasks import Task


class Outcome(StrEnum):
    """What grading found. Only `resolved` earns 1; `infrastructure` earns nothing, not even 0."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"
    EMPTY_PATCH = "empty_patch"
    INVALID_PATCH = "invalid_patch"  # doesn't apply, or is too large
    TESTS_CRASHED = "tests_crashed"  # the tests told nothing, or died
    TESTS_TIMEOUT = "tests_timeout"
    TAMPERED = "tampered"  # it was not the hidden tests that ran, or their results were forged
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
    plain: Outcome | None = None  # resolved or unresolved, by the printed output and SWE-Gym's rules alone
    own_reward: float | None = None  # what a run's own reward makes of it, between 0 and 1

    @property
    def reward(self) -> float:
        """1.0 where it is resolved, else 0.0; or the own reward. Raises ValueError for an infrastructure fault."""
        if self.outcome is Outcome.INFRASTRUCTURE:
            raise ValueError(f"an infrastructure fault has no reward: {self.detail}")
        return float(self.outcome is Outcome.RESOLVED) if self.own_reward is None else self.own_reward

    @property
    def overruled(self) -> bool:
        """Whether SWE-Gym alone would have given a reward that this verdict withholds."""
        return self.plain is Outcome.RESOLVED and self.outcome is not Outcome.RESOLVED

    def _repr_markdown_(self) -> str:
        return explain(self)


def explain(verdict: Verdict) -> str:
    """Return a verdict with its reasons and its tests, as Markdown; a notebook shows a verdict so by itself."""
    lines = [f"**{verdict.outcome}**{', shared with the same patch before' if verdict.shared else ''}"]
    if verdict.outcome is not Outcome.INFRASTRUCTURE:
        lines[0] += f" · reward {verdict.reward:.3g} · {verdict.seconds:.1f} s"
    if verdict.detail:
        lines.append(_escaped(verdict.detail))
    if verdict.overruled:
        lines.append("By itself, SWE-Gym would have said **resolved**.")
    if verdict.tests:
        rows = (f"| `{test.replace('|', '/')}` | {status} |" for test, status in verdict.tests.items())
        lines.append("\n".join(["| test | result |", "|---|---|", *rows]))
    return "\n\n".join(lines)


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>|#" else letter for letter in text)


def judge(task: Task, run: HiddenRun, expected: Collection[str] = (), least: float = 0) -> Verdict:
    """Judge a run of the hidden tests. Every FAIL_TO_PASS and PASS_TO_PASS test must be told as PASSED.

    expected: PASS_TO_PASS tests that may be told as XFAIL, since they are without the patch too.
    least: the number of tests, listed or not, that must tell a result for a reward.
    """
    if run.refusal is not None:
        return Verdict(Outcome.INVALID_PATCH, detail=run.refusal)
    if forged := forgery(task, run):
        return _verdict(Outcome.TAMPERED, task, run, forged)
    if not run.told:
        outcome = Outcome.TESTS_TIMEOUT if run.timed_out else Outcome.TESTS_CRASHED
        return _verdict(outcome, task, run, run.silence)
    missing = [test for test in wanted(task) if not _passed(task, test, run, expected)]
    named = ", ".join(f"{test}{_told(test, run)}" for test in missing[:5])
    if missing or not wanted(task):
        detail = f"not passed: {named}{' ...' if len(missing) > 5 else ''}" if missing else ""
        return _verdict(Outcome.UNRESOLVED, task, run, detail)
    if len(run.tests) < least:
        detail = f"{len(run.tests)} tests told a result, far fewer than with the gold patch"
        return _verdict(Outcome.TAMPERED, task, run, detail)
    return _verdict(Outcome.RESOLVED, task, run, "")


def forgery(task: Task, run: HiddenRun) -> str:
    """Return in words why a run's results cannot be the hidden tests' own, or ""."""
    if run.hindered or run.timed_out:
        return run.hindered
    if run.channel is Channel.FORGED:
        return "the report beside the summary was changed"
    if run.false_canary:
        return run.canary
    if run.channel is Channel.ABSENT:
        return ""
    for test in wanted(task):
        printed, reported = run.printed.get(test), run.reported.get(test)
        if printed == "PASSED" and run.channel is Channel.CUT:
            return f"{test} was printed as PASSED, but the tests' report has no end"
        if printed is not None and printed != reported and "PASSED" in (printed, reported):
            return f"{test} was printed as {printed}, but reported as {reported or 'nothing'}"
    return ""


def tampered(verdict: Verdict, why: str) -> Verdict:
    """Return a verdict as one on a patch that forged its results."""
    return replace(noted(verdict, why), outcome=Outcome.TAMPERED)


def noted(verdict: Verdict, why: str) -> Verdict:
    """Return a verdict with one more thing told."""
    return replace(verdict, detail="; ".join(filter(None, [why, verdict.detail])))


def wanted(task: Task) -> tuple[str, ...]:
    return (*task.fail_to_pass, *task.pass_to_pass)


def all_but_xfails_pass(task: Task, run: HiddenRun) -> bool:
    """Whether the verdict hangs on tests that fail as expected, and on nothing else."""
    xfails = with_status(run.tests, "XFAIL")
    return not xfails.isdisjoint(wanted(task)) and all(
        _passed(task, test, run, xfails) for test in wanted(task)
    )


def with_status(tests: Mapping[str, str], status: str) -> frozenset[str]:
    return frozenset(test for test, told in tests.items() if told == status)


def _verdict(outcome: Outcome, task: Task, run: HiddenRun, detail: str) -> Verdict:
    plain = plain_outcome(task, run)
    detail = "; ".join(filter(None, [detail, run.notes, run.undone]))
    return Verdict(outcome, run.tests, detail, run.log, plain=plain)


def plain_outcome(task: Task, run: HiddenRun) -> Outcome | None:
    """Return what SWE-Gym's rules say of the printed output alone: None where nothing ran.

    There the last line on a test counts wherever it stands, XFAIL is as good as PASSED, XPASS is not known, SKIPPED
    counts as neither passed nor failed, and a list without a test that counts is full.
    """
    if run.refusal is not None or run.hindered or not run.plain:
        return None
    failed = any(run.plain.get(test) in (None, "XPASS", "FAILED", "ERROR") for test in wanted(task))
    return Outcome.UNRESOLVED if failed else Outcome.RESOLVED


def _passed(task: Task, test: str, run: HiddenRun, expected: Collection[str]) -> bool:
    told = {run.printed.get(test), run.tests.get(test)}
    if told == {"XFAIL"}:
        return test in expected and test not in task.fail_to_pass
    return told == {"PASSED"}


def _told(test: str, run: HiddenRun) -> str:
    status = run.tests.get(test)
    if status == "PASSED":
        return " (reported as PASSED, but not in the printed summary)"
    return f" ({status})" if status else ""
