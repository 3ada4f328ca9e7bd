"""The hidden tests of a task: put in place, run and read, in a fresh sandbox.

What a patch did to them is undone first (guards.py). Results come by two ways: what the tests print, and a report
beside it (reporting.py). How tests are run and their output is read is a harness's business: the one for pytest is
here, SWE-Gym's in swegym_grading.py. Knows nothing of verdicts or rewards.
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Protocol

from .config import TrainingConfig
from .guards import Guard, in_words, put_back
from .patches import Applied, GitTimeout, apply_patch, in_shell, touched_files
from .reporting import STATUSES, Channel, Kit, Report, make_kit
from .sandbox import CommandResult, Sandbox, SandboxBackend
from .tasks import Task

LOG_BYTES = 1 << 20  # of the tests' output, head and tail
# A result must not hang on the hour, the machine or chance.
FIXED: Mapping[str, str] = {"TZ": "UTC", "PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
NO_CANARY = "no tests of known results could be added"


def worst(statuses: Collection[str]) -> str:
    """Return the worst of a test's statuses."""
    return max(statuses, key=STATUSES.index)


@dataclass(frozen=True)
class Reading:
    """What the output of a run tells."""

    tests: Mapping[str, str] = field(default_factory=dict)  # test id -> PASSED, FAILED, ...; the worst told
    hindered: str = ""  # why it was not the hidden tests that ran
    notes: str = ""  # what decided a result and cannot be seen in it
    plain: Mapping[str, str] = field(
        default_factory=dict
    )  # as a plain reader has it: anywhere, the last told


class Harness(Protocol):
    """How the hidden tests of one kind of task are run, and their output read."""

    environment: Mapping[str, str]  # of the tests
    output_bytes: int  # of their output that are needed, half from its start and half from its end
    applies_tests: bool  # its script applies the test patch itself
    counts_xfail: bool  # a PASS_TO_PASS test that fails as expected, on base too, counts as passed

    def preparation(self, task: Task) -> str:
        """The bash script that runs the patch's own code before anything of the tests is there; "" for none."""
        ...

    def canary_folder(self, task: Task) -> str | None:
        """The folder of the repository where a test file would run beside the hidden tests; None for none."""
        ...

    def script(self, task: Task, mark: str, kit: Kit) -> str:
        """The bash script to run in /testbed; `mark` is a text that no patch can know beforehand."""
        ...

    def read(self, task: Task, output: str, mark: str) -> Reading: ...

    def name(self, test: str) -> str:
        """What a test that pytest calls so is called in the task's lists."""
        ...


@dataclass(frozen=True)
class HiddenRun:
    """One run of the hidden tests."""

    printed: Mapping[str, str] = field(default_factory=dict)  # test id -> status, by the summary
    reported: Mapping[str, str] = field(default_factory=dict)  # and by the report beside it
    channel: Channel = Channel.ABSENT  # what became of that report
    signs: frozenset[str] = frozenset()  # of forgery; may be the repository's own doing
    canary: str = ""  # why the tests of known results speak against this run
    false_canary: bool = False  # one of them was told as what it cannot be
    plain: Mapping[str, str] = field(default_factory=dict)  # as a plain reader has the output
    refusal: str | None = None  # git's words, where the patch does not apply: nothing ran
    hindered: str = ""  # why it was not the hidden tests that ran
    notes: str = ""
    undone: str = ""  # what the patch had changed of the tests
    bent: bool = False  # whether that may decide results where it is not undone
    log: str = field(default="", repr=False)
    exit_code: int = 0
    timed_out: bool = False
    seconds: float = 0.0

    @property
    def tests(self) -> Mapping[str, str]:
        """The results: of the report, and of the summary where there is none."""
        return self.printed if self.channel is Channel.ABSENT else self.reported

    @property
    def told(self) -> bool:
        """Whether the hidden tests ran to their end and told anything."""
        ended = self.channel in (Channel.WHOLE, Channel.ABSENT) and not self.timed_out
        return bool(self.tests) and ended and not self.hindered

    @property
    def silence(self) -> str:
        """Why they told nothing, in words."""
        if self.hindered or self.timed_out:
            return self.hindered or f"the tests were killed after {self.seconds:.0f} s"
        if self.channel is Channel.CUT and self.reported:
            return f"the tests' process ended after {len(self.reported)} tests; exit code {self.exit_code}"
        return f"no test told a result; exit code {self.exit_code}"


def run_hidden_tests(
    task: Task,
    patch: bytes,
    sandboxes: SandboxBackend,
    config: TrainingConfig,
    harness: Harness,
    guarded: bool = True,
) -> HiddenRun:
    """Run the hidden tests on base_commit with a patch (b"" for none) in a fresh sandbox. Raises SandboxError.

    guarded=False runs them as SWE-Gym does: only the files of the test patch are put back, and nothing but what is
    printed tells results.
    """
    texts = (*task.files.values(), task.test_patch)
    unittests = not task.files or any("unittest" in text for text in texts)
    kit = make_kit(harness.canary_folder(task) if guarded else None, unittests)
    mark = secrets.token_hex(12)
    with closing(sandboxes.open(task)) as sandbox:
        try:
            ready = _make_ready(sandbox, task, patch, config, harness, kit if guarded else None)
        except GitTimeout as error:  # a patch of ten thousand folders can do that
            ready = HiddenRun(hindered=str(error))
        if ready.refusal is not None or ready.hindered:
            return replace(ready, log=_cut(ready.log))
        script = harness.script(task, mark, kit)
        if guarded:
            kit.write(sandbox)
            script = kit.exports + script
        result = _run(sandbox, script, config, harness)
        report = kit.read(sandbox)
    result = replace(result, output=ready.log + result.output)
    return replace(_as_run(task, harness, kit, result, mark, report), undone=ready.undone, bent=ready.bent)


def _make_ready(
    sandbox: Sandbox, task: Task, patch: bytes, config: TrainingConfig, harness: Harness, kit: Kit | None
) -> HiddenRun:
    """Apply the patch, let its code prepare, and put the tests in place; what the run is so far.

    kit: whose canaries will be put in place; None where nothing but the test patch's files is put back.
    """
    applied = apply_patch(sandbox, patch) if patch else Applied()
    if applied.refusal is not None:
        return HiddenRun(refusal=applied.refusal)
    guard, changed = Guard(task), applied.paths if kit else ()
    clear = [kit.canary.path] if kit and kit.canary else []
    undone, hindered = put_back(sandbox, guard, changed, clear)
    log = ""
    if not hindered and (preparation := harness.preparation(task)):
        log = _run(sandbox, preparation, config, harness).output
        _, hindered = put_back(sandbox, guard, changed, clear)  # the patch's code has run
    if not hindered and not harness.applies_tests:
        refusal = apply_patch(sandbox, task.test_patch.encode(), "/tmp/test.patch").refusal
        hindered = f"the test patch does not apply: {refusal}" if refusal is not None else ""
    return HiddenRun(hindered=hindered, undone=in_words(undone), bent=guard.bends(undone), log=log)


def _run(sandbox: Sandbox, script: str, config: TrainingConfig, harness: Harness) -> CommandResult:
    file = f"/tmp/tests-{secrets.token_hex(8)}.sh"
    sandbox.write_file(file, script.encode())
    return sandbox.exec(
        f"bash {in_shell(file)}",
        timeout=config.grading_timeout,
        output_bytes=harness.output_bytes,
        env=harness.environment,
    )


def _as_run(
    task: Task, harness: Harness, kit: Kit, result: CommandResult, mark: str, report: Report
) -> HiddenRun:
    """Put together what the output and the report tell. The canaries are taken out of both."""
    reading = harness.read(task, result.output, mark)
    ours = frozenset(kit.canary.expected) if kit.canary else frozenset()
    false, wrong = kit.canary.check(report.tests, reading.tests) if kit.canary else (False, NO_CANARY)
    reported: dict[str, str] = {}
    for test, status in report.tests.items():
        if test not in ours:
            name = harness.name(test)
            reported[name] = worst((status, reported.get(name, status)))
    return HiddenRun(
        printed={test: status for test, status in reading.tests.items() if test not in ours},
        reported=reported,
        channel=report.channel,
        signs=report.signs,
        canary=wrong,
        false_canary=false,
        plain=reading.plain,
        hindered=reading.hindered,
        notes=reading.notes,
        log=_cut(result.output),
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        seconds=result.seconds,
    )


def _cut(log: str) -> str:
    """Keep a log's head and tail."""
    if len(log) <= LOG_BYTES:
        return log
    half = LOG_BYTES // 2
    return f"{log[:half]}\n[... {len(log) - LOG_BYTES:,} characters left out ...]\n{log[-half:]}"


class PytestHarness:
    """A task that brings its own test command, whose output is pytest's."""

    environment: Mapping[str, str] = {
        **FIXED,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins of this machine are no part of a task, and take seconds
    }
    output_bytes = LOG_BYTES
    applies_tests = False
    counts_xfail = False

    def preparation(self, task: Task) -> str:
        return ""

    def canary_folder(self, task: Task) -> str | None:
        files = _python_files(task)
        return str(PurePosixPath(files[0]).parent) if files else None

    def script(self, task: Task, mark: str, kit: Kit) -> str:
        files = [*_python_files(task), *([kit.canary.path] if kit.canary else [])]
        return f"{task.test_command} {' '.join(map(shlex.quote, files))}\n"

    def read(self, task: Task, output: str, mark: str) -> Reading:
        wanted = (*task.fail_to_pass, *task.pass_to_pass)
        told = _results(output, wanted)
        return Reading(parse_pytest(output, wanted), plain=dict(told))

    def name(self, test: str) -> str:
        return test


def _python_files(task: Task) -> list[str]:
    return [path for path in touched_files(task.test_patch) if path.endswith(".py")]


_RESULT = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S.*)")
_DASH = " - "  # between a test and its message


def parse_pytest(output: str, wanted: Collection[str] = ()) -> dict[str, str]:
    """Read the short summary that `pytest -rA` prints: test id -> status, the worst where one is told twice.

    An id ends at the first " - ", unless it is one of the `wanted` ids, which may hold that themselves.
    """
    tests: dict[str, str] = {}
    for name, status in _results(output, wanted):
        tests[name] = worst((status, tests.get(name, status)))
    return tests


def _results(output: str, wanted: Collection[str]) -> Sequence[tuple[str, str]]:
    """Return each id that is told with its status, in their order."""
    known, longest = frozenset(wanted), max(map(len, wanted), default=0)
    matches = filter(None, map(_RESULT.fullmatch, output.splitlines()))
    return [
        (_known_id(match[2], known, longest) or match[2].partition(_DASH)[0], match[1]) for match in matches
    ]


def _known_id(rest: str, known: frozenset[str], longest: int) -> str | None:
    """Return the longest known id that the line begins with, up to its end or a dash."""
    end = len(rest) if len(rest) <= longest else rest.rfind(_DASH, 0, longest + len(_DASH))
    while end > 0:
        if rest[:end] in known:
            return rest[:end]
        end = rest.rfind(_DASH, 0, end + len(_DASH) - 1)
    return None
