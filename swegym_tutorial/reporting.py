"""The second channel of a test run: a report by a pytest plugin of ours, and tests that must fail.

The plugin (report_plugin.py) goes to a random place in the sandbox with a key of this run. Its report is read from
the sandbox, not from what the tests print, and holds only as it was written. The canaries are tests of known
results under a name that no patch can know: where they don't come out as they must, no other result counts.
Knows nothing of verdicts or rewards.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from hashlib import blake2b
from hmac import compare_digest
from importlib.resources import files
from pathlib import PurePosixPath

from .patches import in_shell
from .sandbox import REPOSITORY, Sandbox

FOLDER = "SWEGYM_TUTORIAL_REPORT"  # as report_plugin.py has it, which cannot be imported without pytest
REPORT_BYTES = 64 << 20
STATUSES = ("PASSED", "XPASS", "XFAIL", "SKIPPED", "FAILED", "ERROR")  # from the best to the worst


class Channel(StrEnum):
    """What became of the report of one run."""

    WHOLE = "whole"
    CUT = "cut"  # it has no end: the tests' process died, or could not write
    FORGED = "forged"  # not as the plugin wrote it
    ABSENT = "absent"  # the plugin was never loaded


@dataclass(frozen=True)
class Report:
    """What the plugin told of one run."""

    channel: Channel = Channel.ABSENT
    tests: Mapping[str, str] = field(default_factory=dict)  # test id -> status, the worst of its phases
    signs: frozenset[str] = frozenset()  # of what a forger does: may be the repository's own doing


@dataclass(frozen=True)
class Canary:
    """A file of tests whose results are known."""

    path: str  # in the repository
    expected: Mapping[str, str]  # test id -> PASSED or FAILED

    @property
    def stem(self) -> str:
        return PurePosixPath(self.path).stem

    def check(self, *told: Mapping[str, str]) -> tuple[bool, str]:
        """Compare with what was told, test id -> status, by each way.

        Returns whether one was told as what it cannot be, and in words what is wrong: that, or one that is missing
        from the first way, the report.
        """
        for tests in told:
            for test, status in self.expected.items():
                if tests.get(test, status) != status:
                    return True, f"a test that must be {status} was told as {tests[test]}"
        ran = {status for test, status in self.expected.items() if test in told[0]}
        return False, "" if len(ran) == 2 else "not all tests of known results were told"


_WORDS = (
    *(
        "amber",
        "basic",
        "cache",
        "chain",
        "clear",
        "close",
        "common",
        "copy",
        "cycle",
        "delta",
        "edge",
        "empty",
    ),
    *(
        "extra",
        "field",
        "first",
        "frame",
        "group",
        "index",
        "inner",
        "input",
        "item",
        "label",
        "later",
        "level",
    ),
    *(
        "limit",
        "local",
        "match",
        "merge",
        "mixed",
        "nested",
        "order",
        "outer",
        "pair",
        "path",
        "plain",
        "point",
    ),
    *("query", "range"),
)

# Functions and methods: where a repository's pytest collects one kind only, the other is not missed. The numbers
# are no constants, so that nothing is known before the test runs.
_FUNCTIONS = """\
def {plain}():
    numbers = list(range({start}, {stop}))
    assert len(numbers) == {length}


def {wrong}():
    numbers = list(range({start}, {stop}))
    assert len(numbers) == {other}
"""
_METHODS = """

import unittest


class {group}(unittest.TestCase):
    def {plain}(self):
        self.assertEqual(sum([{start}, {stop}]), {total})

    def {wrong}(self):
        self.assertEqual(sum([{start}, {stop}]), {other})
"""


@dataclass(frozen=True)
class Kit:
    """What one run takes into the sandbox."""

    name: str  # of the plugin's module
    key: bytes = field(repr=False)
    canary: Canary | None
    canary_text: str = field(default="", repr=False)
    methods: bool = False  # whether unittest has a part in the tests

    @property
    def folder(self) -> str:
        return f"/tmp/{self.name}"

    @property
    def exports(self) -> str:
        """Shell lines that make every pytest started after them report."""
        folder = in_shell(self.folder)
        return (
            f"export {FOLDER}={folder}\n"
            f'export PYTHONPATH={folder}"${{PYTHONPATH:+:$PYTHONPATH}}"\n'
            f'export PYTEST_ADDOPTS="-p {self.name}${{PYTEST_ADDOPTS:+ $PYTEST_ADDOPTS}}"\n'
        )

    def write(self, sandbox: Sandbox) -> None:
        """Put everything in place. Raises SandboxError."""
        watched = b"import unittest.case\n" if self.methods else b""  # what is loaded, the plugin watches
        sandbox.write_file(f"{self.folder}/{self.name}.py", _plugin() + watched)
        sandbox.write_file(f"{self.folder}/key", self.key)
        if self.canary is not None:
            sandbox.write_file(f"{REPOSITORY}/{self.canary.path}", self.canary_text.encode())

    def read(self, sandbox: Sandbox) -> Report:
        """Return what was reported, without the canaries' truth being judged. Raises SandboxError."""
        try:
            data = sandbox.read_file(f"{self.folder}/report", REPORT_BYTES)
        except FileNotFoundError:
            return Report()
        return read_report(data, self.key)


@cache
def _plugin() -> bytes:
    return files(__package__).joinpath("report_plugin.py").read_bytes()


def make_kit(folder: str | None, methods: bool = True) -> Kit:
    """Make what one run needs. folder: of the repository, where the canaries go; None for none.

    methods: whether some are unittest's; a repository without unittest is spared the loading of it.
    """
    name, key = f"plugin_{secrets.token_hex(8)}", secrets.token_bytes(32)
    if folder is None:
        return Kit(name, key, None)
    draw = secrets.SystemRandom()
    words = draw.sample(_WORDS, 5)
    plain, wrong = f"test_{words[0]}_{words[1]}", f"test_{words[2]}_{words[1]}"
    start, length = draw.randrange(3, 90), draw.randrange(3, 90)
    group, stop = f"Test{words[3].title()}{words[4].title()}", start + length
    path = str(PurePosixPath(folder) / f"test_{'_'.join(words[2:])}_{secrets.token_hex(2)}.py")
    text = (_FUNCTIONS + _METHODS if methods else _FUNCTIONS).format(
        plain=plain,
        wrong=wrong,
        group=group,
        start=start,
        stop=stop,
        length=length,
        total=start + stop,
        other=start + stop + 1,
    )
    expected = {
        f"{path}::{where}{test}": status
        for where in ("", f"{group}::")[: 1 + methods]
        for test, status in ((plain, "PASSED"), (wrong, "FAILED"))
    }
    return Kit(name, key, Canary(path, expected), text, methods)


def read_report(data: bytes, key: bytes) -> Report:
    """Read a report and check that it is the plugin's, whole and in order. Never raises on what it reads."""
    if not data:
        return Report()
    code = blake2b(key=key, digest_size=16)
    tests: dict[str, str] = {}
    signs: frozenset[str] = frozenset()
    count, ended = 0, False
    *lines, rest = data.split(b"\n")
    for line in lines:
        body, _, told = line.rpartition(b"\t")
        code.update(body + b"\n")
        if ended or not compare_digest(told, code.hexdigest().encode()):
            return Report(Channel.FORGED)
        kind, *fields = json.loads(body)
        if kind == "test":
            count += 1
            test, *phase = fields
            if status := _status(*phase):
                tests[test] = max(status, tests.get(test, status), key=STATUSES.index)
        elif kind == "end":
            ended, signs = count == fields[1], frozenset(fields[2])
            if not ended:
                return Report(Channel.FORGED)
    if ended and rest:
        return Report(Channel.FORGED)
    return Report(Channel.WHOLE if ended else Channel.CUT, tests, signs)


def _status(when: str, outcome: str, xfail: bool) -> str | None:
    """Return what a phase tells of its test: None for one that went well and is not the test itself."""
    if outcome == "failed":
        return "FAILED" if when == "call" else "ERROR"
    if outcome == "skipped":
        return "XFAIL" if xfail else "SKIPPED"
    if outcome == "passed" and when == "call":
        return "XPASS" if xfail else "PASSED"
    return None
