"""How SWE-Gym's own package runs and reads the hidden tests of its tasks.

The package, swegym, brings the test command of each repository and version and the parser of its output, by which
the ids in the tasks' lists were made: both are taken from it as they are, with ids that end at their first space.
Ours is what lies around them: what is printed before the tests run doesn't count, nor does the order of results.
The package is an optional extra, imported where a SWE-Gym task is graded. Knows nothing of verdicts or rewards.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import PurePosixPath
from typing import Protocol

from .hidden_tests import FIXED, Reading, worst
from .patches import touched_files
from .reporting import STATUSES, Kit
from .sandbox import REPOSITORY
from .tasks import Task

INSTALL = (
    'pip install "swegym @ git+https://github.com/SWE-Gym/SWE-Bench-Package.git'
    '@16dd480cce9b27bf111a362d280881c6def5d2a7"'
)
ENVIRONMENT_NAME = "testbed"  # of conda, in the images
MOST_TESTS = 50_000  # told beside those in the task's lists
LOG_BYTES = 32 << 20  # thousands of ids and what each test printed stand in front of the results


_LINES = re.compile(rf"^.*(?:{'|'.join(STATUSES)}).*$", re.MULTILINE)


class GradingUnavailable(ValueError):
    """Tasks cannot be graded here; the text names them, the cause and the mend."""


class Package(Protocol):
    """What we take from swegym."""

    def knows(self, task: Task) -> bool:
        """Whether it has a test command and a parser for the task's repository and version."""
        ...

    def commands(self, task: Task, install: bool = True) -> Sequence[str]:
        """The lines of its evaluation script; the last four put the test files back, apply the test patch, run the
        tests, and put the test files back again. install: the line before them installs the repository anew."""
        ...

    def parse(self, task: Task, log: str) -> Mapping[str, str]:
        """Read the tests' output: id -> status, the last where one is told twice."""
        ...


class _Swegym:
    """The package itself. Importing it takes a second or two, and no network."""

    def __init__(self) -> None:
        from swegym.harness.constants import MAP_REPO_VERSION_TO_SPECS
        from swegym.harness.log_parsers import MAP_REPO_TO_PARSER
        from swegym.harness.test_spec import make_eval_script_list

        self._specs, self._parsers, self._lines = (
            MAP_REPO_VERSION_TO_SPECS,
            MAP_REPO_TO_PARSER,
            make_eval_script_list,
        )

    def knows(self, task: Task) -> bool:
        repo = task.repo.lower()  # as all of its keys are
        return repo in self._parsers and task.version in self._specs.get(repo, {})

    def commands(self, task: Task, install: bool = True) -> Sequence[str]:
        repo = task.repo.lower()
        instance = {"repo": repo, "version": task.version, "test_patch": task.test_patch}
        specs = {
            key: value
            for key, value in self._specs[repo][task.version].items()
            if install or key != "install"
        }
        return self._lines(
            instance, specs, ENVIRONMENT_NAME, REPOSITORY, task.base_commit.strip(), task.test_patch
        )

    def parse(self, task: Task, log: str) -> Mapping[str, str]:
        return self._parsers[task.repo.lower()](log)


@cache
def load_swegym() -> Package:
    """Import the package. Raises GradingUnavailable, which names the command that installs it."""
    try:
        return _Swegym()
    except ImportError as error:
        raise GradingUnavailable(
            f"SWE-Gym's tasks are graded by its package swegym, which cannot be imported ({error}): {INSTALL}"
        ) from error


class SwegymHarness:
    """Runs swegym's evaluation script and reads what the tests in it print."""

    # pip, without a network, need not try again.
    environment: Mapping[str, str] = {**FIXED, "PIP_RETRIES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    output_bytes = LOG_BYTES
    applies_tests = True
    counts_xfail = True

    def __init__(self, load: Callable[[], Package] = load_swegym) -> None:
        self._load = load

    def why_not(self, tasks: Sequence[Task]) -> str | None:
        """Return why these tasks cannot be graded, or None. Raises GradingUnavailable where none can."""
        package = self._load()
        unknown = [
            f"{task.instance_id} ({task.repo} {task.version})" for task in tasks if not package.knows(task)
        ]
        return f"swegym knows no tests for {', '.join(unknown)}: leave them out" if unknown else None

    def preparation(self, task: Task) -> str:
        """Return the part of swegym's script that installs the repository, which runs the patch's own code."""
        before = self._commands(task)[:-4]
        return (
            "" if before == self._commands(task, install=False)[:-4] else _lines("set -xo pipefail", *before)
        )

    def canary_folder(self, task: Task) -> str | None:
        """Return the folder of a hidden test that is wanted, as its id tells it."""
        wanted = [test.partition("::")[0] for test in (*task.fail_to_pass, *task.pass_to_pass)]
        files = [*filter(touched_files(task.test_patch).__contains__, wanted), *wanted]
        python = [PurePosixPath(file) for file in files if file.endswith(".py")]
        return str(python[0].parent) if python else None

    def script(self, task: Task, mark: str, kit: Kit) -> str:
        """Return swegym's script with a line before and a line after the tests, which no patch can print before."""
        *before, put_back, apply, test, put_back_again = self._commands(task, install=False)
        if put_back != put_back_again or not apply.startswith("git apply"):
            raise GradingUnavailable(f"swegym's script is not that of the release known here: {INSTALL}")
        return _lines(
            "set -xo pipefail",
            *before,
            put_back,
            apply,
            f'printf "\\n%s applied %s\\n" {mark} $?',
            _with_canary(test, kit) if kit.canary else test,
            "status=$?",
            f'printf "\\n%s ended\\n" {mark}',
            "exit $status",
        )

    def _commands(self, task: Task, install: bool = True) -> Sequence[str]:
        if why := self.why_not([task]):
            raise GradingUnavailable(why)
        return self._load().commands(task, install)

    def name(self, test: str) -> str:
        return test.split()[0] if test.strip() else test

    def read(self, task: Task, output: str, mark: str) -> Reading:
        """Read what the tests printed; nothing told where they did not begin."""
        before, begun, rest = output.partition(f"\n{mark} applied ")
        status, _, log = rest.partition("\n")
        if not begun:
            return Reading()
        if status.strip() != "0":
            words = re.sub(r"(?m)^\+.*\n", "", before)[-300:].strip()
            return Reading(hindered=f"the test patch does not apply: {words}")
        tests, ended, _ = log.rpartition(f"\n{mark} ended")
        plain = self._parse(task, output)
        return replace(self._read_tests(task, tests if ended else log), plain=plain)

    def _parse(self, task: Task, log: str) -> Mapping[str, str]:
        try:
            return self._load().parse(task, log)
        except LookupError:  # some of its parsers take a line that is a status alone for a test's
            return {}

    def _read_tests(self, task: Task, log: str) -> Reading:
        # Line by line, since the package's own reading of the whole keeps the last of several results of one id: ids
        # cut at a space collide (SWE-bench#43, #279).
        told: dict[str, set[str]] = defaultdict(set)
        wanted = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass))
        # A loop that prints gives millions of lines. In pytest's words a line without a status tells nothing.
        as_pytest = self._parse(task, "PASSED test")
        for part in _LINES.findall(log) if as_pytest else (*log.split("\n"), log):
            for test, status in self._parse(task, part).items():
                known = test in wanted or test in told or len(told) < MOST_TESTS
                if known and status in STATUSES:  # "ERROR: no such file" is pytest's word on no test
                    told[test].add(status)
        twice = [
            f"{test} ({', '.join(sorted(told[test]))})" for test in wanted if len(told.get(test, ())) > 1
        ]
        notes = f"told more than once, so that the worst counts: {', '.join(twice[:5])}" if twice else ""
        return Reading({test: worst(statuses) for test, statuses in told.items()}, notes=notes)


def _lines(*lines: str) -> str:
    return "\n".join((*lines, ""))


_BY_NAME = re.compile(r'(.* -k ")([^"]*)(")')


def _with_canary(test: str, kit: Kit) -> str:
    """Return the command that runs the tests with the canaries last: by their file, or by its name after -k."""
    assert kit.canary is not None
    if match := _BY_NAME.fullmatch(test):
        return f"{match[1]}{match[2]} or {kit.canary.stem}{match[3]}"
    return f"{test} {shlex.quote(kit.canary.path)}"
