"""A pytest plugin that travels into the sandbox and reports each test's result beside what pytest prints.

It stands alone: Python 3.7 and later, pytest 5.4 and later, nothing else. The grader puts it at a random path beside
a file with a key, and names that folder in the environment; key and name are gone once it is loaded, before any
conftest.py. Each line of the report carries a code made with the key from all lines so far, so that lines cannot be
added, changed or taken away without the key. The key lies in no attribute or global name, but code that searches
all objects of the process finds it. What it uses of Python it takes hold of when it is loaded, since tests and what
they import may replace it. In the workers of pytest-xdist it is silent: their controller reports.

Lines: ["begin", pytest's version], ["test", id, when, outcome, whether it was expected to fail] for each phase of a
test and each file that cannot be collected, ["end", exit status, number of tests' lines, [signs of forgery]].
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b
from json.encoder import encode_basestring_ascii
from types import FunctionType
from typing import Any

import pytest

FOLDER = "SWEGYM_TUTORIAL_REPORT"  # in the environment: where this file, the key and the report lie
TRUSTED = (  # their functions decide what a test's result is
    *("_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.unittest", "_pytest.skipping"),
    *("_pytest.nodes", "_pytest.main", "_pytest.outcomes", "_pytest.terminal", "_pytest.assertion"),
    *("_pytest.assertion.rewrite", "_pytest._code.code", "_pytest.python_api", "_pytest.raises"),
    *("pluggy._callers", "pluggy._hooks", "pluggy._manager"),
    *("pluggy.callers", "pluggy.hooks", "pluggy.manager", "unittest.case"),
)
Write = Any  # a function of fields that are JSON, which adds a line of them


def _take_folder() -> str:
    """Return the folder of the report, or "", and undo what the environment was given for this plugin."""
    folder = os.environ.pop(FOLDER, "")
    for name, ours, between in (
        ("PYTHONPATH", folder, os.pathsep),
        ("PYTEST_ADDOPTS", "-p " + __name__, " "),
    ):
        value = os.environ.get(name, "")
        if folder and value.startswith(ours):
            left = value[len(ours) :].lstrip(between)
            os.environ.pop(name)
            if left:
                os.environ[name] = left
    if folder in sys.path:  # where the workers of pytest-xdist still find it
        sys.path.append(sys.path.pop(sys.path.index(folder)))
    return folder


def _writer(folder: str) -> Write:
    """Return what adds a line to the report, given fields that are JSON."""
    path, getpid, pid = os.path.join(folder, "report"), os.getpid, os.getpid()
    key = os.path.join(folder, "key")
    with open(key, "rb") as file:
        code = blake2b(key=file.read(), digest_size=16)
    os.unlink(key)
    opened, written, closed, flags = os.open, os.write, os.close, os.O_WRONLY | os.O_APPEND
    closed(opened(path, flags | os.O_CREAT | os.O_EXCL, 0o644))

    def write(*fields: str) -> None:
        if getpid() != pid:  # a child that a test forked
            return
        line = ("[" + ",".join(fields) + "]").encode()
        code.update(line + b"\n")
        file = opened(path, flags)
        try:
            written(file, line + b"\t" + code.hexdigest().encode() + b"\n")
        finally:
            closed(file)

    return write


def _functions() -> Any:
    """Yield the trusted functions: full name, the namespace that holds them, name in it, and what they are."""
    for module in filter(None, map(sys.modules.get, TRUSTED)):
        for name, value in list(vars(module).items()):
            whole = module.__name__ + "." + name
            if isinstance(value, FunctionType):
                yield whole, vars(module), name, value
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for inner, function in vars(value).items():
                    if isinstance(function, (FunctionType, classmethod, staticmethod, property)):
                        yield whole + "." + inner, vars(value), inner, function


def _watch() -> Any:
    """Return what tells, each time, which trusted functions have been replaced since now, in body or in name."""

    def body(function: Any) -> Any:
        return getattr(getattr(function, "__func__", function), "__code__", None)

    kept = [(*found, body(found[-1])) for found in _functions()]
    tracing = sys.gettrace
    trace = tracing()

    def look() -> list[str]:
        signs = [
            "replaced " + whole
            for whole, space, name, function, code in kept
            if space.get(name) is not function or body(function) is not code
        ]
        return signs + (["a trace function was set"] if tracing() is not trace else [])

    return look


class _Hooks:
    """What pytest calls, set on an instance: functions whose values are in closures."""


def _observers(raised: dict[tuple[str, str], bool], signs: dict[str, None]) -> _Hooks:
    """Return hooks that see, nearest to a test of all, whose code it is and whether it raised."""
    hooks, installed = _Hooks(), os.path.dirname(os.__file__)  # of decorators such as unittest's

    def origin(item: Any) -> None:
        code = getattr(getattr(item, "obj", None), "__code__", None)
        file = item.nodeid.partition("::")[0]
        if (
            code is not None
            and not code.co_filename.endswith(file)
            and not code.co_filename.startswith(installed)
        ):
            signs["a test in " + file + " is code of " + os.path.basename(code.co_filename)] = None

    def observer(when: str) -> Any:
        @pytest.hookimpl(hookwrapper=True, trylast=True)
        def observe(item: Any) -> Any:
            if when == "call":
                origin(item)
            outcome = yield
            raised[item.nodeid, when] = outcome.excinfo is not None

        return observe

    for when in ("setup", "call", "teardown"):
        setattr(hooks, "pytest_runtest_" + when, observer(when))
    return hooks


def _reporters(write: Write, raised: dict[tuple[str, str], bool], signs: dict[str, None]) -> _Hooks:
    """Return hooks that write the report."""
    hooks, text, watch, version = _Hooks(), encode_basestring_ascii, _watch(), pytest.__version__
    count = [0]
    names: list[Any] = [str]
    manager: list[Any] = []

    def look() -> None:
        signs.update(dict.fromkeys(watch()))
        if not manager or not manager[0].is_registered(hooks):
            signs["the plugin that reports was taken out"] = None

    def tell(nodeid: str, when: str, outcome: str, xfail: bool = False) -> None:
        count[0] += 1
        write(text("test"), text(names[0](nodeid)), text(when), text(outcome), "true" if xfail else "false")

    @pytest.hookimpl(tryfirst=True)
    def begin(session: Any) -> None:
        names[0] = getattr(session.config, "cwd_relative_nodeid", str)
        manager.append(session.config.pluginmanager)
        write(text("begin"), text(version))

    @pytest.hookimpl(tryfirst=True)
    def registered(plugin: Any) -> None:
        module = str(getattr(plugin, "__name__", "") or type(plugin).__module__)
        known = module.partition(".")[0] in ("_pytest", "pytest", "xdist")
        if manager and not known and not str(getattr(plugin, "__file__", "")).endswith("conftest.py"):
            signs["the plugin " + module + " came late"] = None

    @pytest.hookimpl(tryfirst=True)
    def result(report: Any) -> None:
        if report.when == "call":
            look()
        if report.outcome == "passed" and raised.get((report.nodeid, report.when)):
            signs["told as passed though it raised: " + report.nodeid] = None
        tell(report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail"))

    @pytest.hookimpl(tryfirst=True)
    def collected(report: Any) -> None:
        if report.failed:
            tell(report.nodeid, "collect", "failed")

    @pytest.hookimpl(trylast=True)
    def end(exitstatus: Any) -> None:
        look()
        write(text("end"), str(int(exitstatus)), str(count[0]), "[" + ",".join(map(text, signs)) + "]")

    for name, hook in (
        ("sessionstart", begin),
        ("plugin_registered", registered),
        ("runtest_logreport", result),
        ("collectreport", collected),
        ("sessionfinish", end),
    ):
        setattr(hooks, "pytest_" + name, hook)
    return hooks


def pytest_addoption(parser: Any, pluginmanager: Any) -> None:
    """Set to work: called once, when pytest takes up the plugin."""
    folder = _take_folder()
    if folder and os.path.exists(os.path.join(folder, "key")):
        raised: dict[tuple[str, str], bool] = {}
        signs: dict[str, None] = {}
        pluginmanager.register(_observers(raised, signs), __name__ + "-observers")
        pluginmanager.register(_reporters(_writer(folder), raised, signs), __name__ + "-reporters")
