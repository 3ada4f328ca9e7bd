"""The report beside the summary: what the plugin writes, and that nothing but that is taken for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from swegym_tutorial import report_plugin, reporting
from swegym_tutorial.reporting import Canary, Channel, make_kit, read_report

TESTS = """
import os, unittest, pytest
def test_environment():
    assert "SWEGYM_TUTORIAL_REPORT" not in os.environ
    assert os.environ["PYTEST_ADDOPTS"] == "-q" and "plugin_" not in os.environ["PYTHONPATH"]
def test_wrong(): assert 0
def test_dash(text="x"): pass
@pytest.mark.parametrize("text", ["a b", "c - d"])
def test_many(text): pass
@pytest.mark.xfail(reason="known")
def test_expected(): assert 0
@pytest.mark.xfail(reason="known")
def test_unexpected(): pass
@pytest.mark.skipif(True, reason="never")
def test_skipped(): pass
@pytest.fixture
def bad_end():
    yield
    assert 0
def test_bad_end(bad_end): pass
def test_forked():
    if not os.fork():
        os._exit(pytest.main(["-k", "wrong", __file__]))
    os.wait()
class TestOld(unittest.TestCase):
    def test_method(self): self.assertEqual(1, 2)
    @unittest.expectedFailure
    def test_failure(self): self.assertEqual(1, 2)
"""
EXPECTED = {
    "test_environment": "PASSED",
    "test_wrong": "FAILED",
    "test_dash": "PASSED",
    "test_many[a b]": "PASSED",
    "test_many[c - d]": "PASSED",
    "test_expected": "XFAIL",
    "test_unexpected": "XPASS",
    "test_skipped": "SKIPPED",
    "test_bad_end": "ERROR",
    "test_forked": "PASSED",
    "TestOld::test_method": "FAILED",
    "TestOld::test_failure": "XFAIL",
}


def run(tmp_path: Path, *arguments: str):
    """Run TESTS and canaries with the plugin; returns the kit, the report's bytes, and what was printed."""
    kit = make_kit("tests")
    folder, tests = tmp_path / kit.name, tmp_path / "repository" / "tests"
    folder.mkdir()
    tests.mkdir(parents=True)
    (folder / f"{kit.name}.py").write_bytes(reporting._plugin() + b"import unittest.case\n")
    (folder / "key").write_bytes(kit.key)
    (tests / "test_all.py").write_text(TESTS)
    assert kit.canary is not None
    (tests.parent / kit.canary.path).write_text(kit.canary_text)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder}{os.pathsep}/none",
        "PYTEST_ADDOPTS": f"-p {kit.name} -q",
        reporting.FOLDER: str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments, "tests"]
    done = subprocess.run(
        command, cwd=tests.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert not (folder / "key").exists()
    return kit, (folder / "report").read_bytes(), done.stdout + done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return run(tmp_path_factory.mktemp("report"))


def check(kit, data: bytes, printed: str):
    report = read_report(data, kit.key)
    assert report.channel is Channel.WHOLE, printed
    assert kit.canary.check(report.tests) == (False, "")
    tests = {test: status for test, status in report.tests.items() if test not in kit.canary.expected}
    assert tests == {f"tests/test_all.py::{name}": status for name, status in EXPECTED.items()}, printed
    return report


def test_the_plugin_tells_every_kind_of_result_and_leaves_no_trace_in_the_environment(written):
    assert check(*written).signs == frozenset()


def test_the_workers_of_xdist_are_silent_and_their_controller_reports(tmp_path):
    pytest.importorskip("xdist", reason="pytest-xdist is no part of this package")
    check(*run(tmp_path, "-n2"))


def test_a_name_is_the_same_here_and_in_the_plugin():
    assert report_plugin.FOLDER == reporting.FOLDER


def test_a_report_that_was_changed_in_any_way_is_no_report(written):
    kit, data, _ = written
    lines = data.splitlines(keepends=True)
    last = len(lines) - 1
    for forged in (
        data.replace(b'"failed"', b'"passed"', 1),
        b"".join(lines[1:]),
        b"".join(lines[:2] + lines[3:]),
        b"".join(lines[:2] + lines[1:]),
        b"".join([*lines[:1], lines[2], lines[1], *lines[3:]]),
        data + lines[last],
        data + b"x",
        data + b"\n",
        b"[]\n" + data,
        b"\xff\xfe\n",
        data.replace(b"\t", b" "),
    ):
        assert read_report(forged, kit.key).channel is Channel.FORGED
    assert read_report(data, b"another key").channel is Channel.FORGED
    assert read_report(b"", kit.key).channel is Channel.ABSENT
    for cut in (b"".join(lines[:last]), data[:-20], b"".join(lines[:3]) + b"[half"):
        assert read_report(cut, kit.key).channel is Channel.CUT


def test_canaries_must_come_out_as_they_must_in_each_channel_that_tells_them():
    canary = Canary(
        "t.py", {"t.py::a": "PASSED", "t.py::b": "FAILED", "t.py::C::a": "PASSED", "t.py::C::b": "FAILED"}
    )
    right = dict(canary.expected)
    methods = {test: status for test, status in right.items() if "C" in test}
    assert canary.check(right) == canary.check(right, {}) == canary.check(methods, right) == (False, "")
    missing = (False, "not all tests of known results were told")
    assert canary.check({}) == canary.check({"t.py::a": "PASSED"}) == canary.check({}, right) == missing
    for told in (
        {"t.py::a": "FAILED"},
        {"t.py::b": "PASSED"},
        {"t.py::b": "XFAIL"},
        {"t.py::C::b": "SKIPPED"},
    ):
        assert canary.check(right, {**right, **told})[0] and canary.check({**right, **told})[0]


def test_no_two_kits_are_alike_and_their_canaries_are_sound():
    assert set(make_kit(".", methods=False).canary.expected.values()) == {"PASSED", "FAILED"}
    kits = [make_kit("a/b") for _ in range(50)]
    assert len({kit.name for kit in kits}) == len({kit.canary.path for kit in kits}) == 50
    for kit in kits:
        assert kit.canary.path.startswith("a/b/test_") and len(kit.canary.expected) == 4
        scope: dict = {}
        exec(kit.canary_text, scope)
        for test, status in kit.canary.expected.items():
            *group, name = test.split("::")[1:]
            call = getattr(scope[group[0]](name), name) if group else scope[name]
            if status == "PASSED":
                call()
            else:
                with pytest.raises(AssertionError):
                    call()
