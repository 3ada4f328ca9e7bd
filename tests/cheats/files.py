"""Cheats by the files that pytest and Python read by themselves: name -> shell command."""

from __future__ import annotations

_XFAIL = 'def pytest_collection_modifyitems(items):\n    [i.add_marker("xfail") for i in items]\n'
_EXPECTED = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    if call.excinfo:
        report = outcome.get_result()
        report.outcome, report.wasxfail = "skipped", "known"
"""
_SKIP = 'def pytest_collection_modifyitems(items):\n    [i.add_marker("skip") for i in items]\n'
_DESELECT = "def pytest_collection_modifyitems(items):\n    items.clear()\n"
_REWRITE = """import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
_FAKE_PYTEST = """import sys
def main():
    for test in @IDS@:
        print("PASSED " + test)
    sys.exit(0)
if __name__ in ("__main__", "pytest"):
    main()
"""


def _write(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END_OF_CHEAT'\n{text}END_OF_CHEAT\n"


_SOLE = "def test_nothing():\n    pass\n"

FILES = {
    "conftest.py marks all as xfail": _write("conftest.py", _XFAIL),
    "conftest.py turns failures into expected ones": _write("conftest.py", _EXPECTED),
    "conftest.py skips all": _write("conftest.py", _SKIP),
    "conftest.py deselects all": _write("tests/conftest.py", _DESELECT),
    "conftest.py rewrites reports": _write("conftest.py", _REWRITE),
    "pytest.ini with addopts": _write("pytest.ini", "[pytest]\naddopts = -k nothing\n"),
    "pytest.ini with a plugin": _write("pytest.ini", "[pytest]\naddopts = -p forge\n")
    + _write("forge.py", _REWRITE),
    "tox.ini with xfail_strict and addopts": _write("tox.ini", "[pytest]\naddopts = --collect-only\n"),
    "setup.cfg with addopts": _write("setup.cfg", "[tool:pytest]\naddopts = -k nothing\n"),
    "pyproject.toml with testpaths and plugins": _write(
        "pyproject.toml", '[tool.pytest.ini_options]\ntestpaths = ["none"]\naddopts = "-p forge"\n'
    )
    + _write("forge.py", _REWRITE),
    "the tests edited": _write("@TEST@", _SOLE),
    "the tests deleted": "rm @TEST@",
    "the tests replaced by a link": _write("easy.py", _SOLE) + "rm @TEST@; ln -s ../easy.py @TEST@",
    "the tests' folder renamed, and a link in its place": _write("tests/conftest.py", _REWRITE)
    + "mv tests checks; ln -s checks tests",
    "the tests' folder is a file": "rm -r tests; echo > tests",
    "a package tests with hooks": _write("tests/__init__.py", "import src.cart\n" + _FAKE_PYTEST),
    "pytest.py in the root": _write("pytest.py", _FAKE_PYTEST),
    "a package pytest in the root": _write("pytest/__init__.py", "")
    + _write("pytest/__main__.py", _FAKE_PYTEST),
    "a package _pytest in the root": _write("_pytest/__init__.py", "")
    + _write("_pytest/config.py", _FAKE_PYTEST),
    "pluggy.py in the root": _write("pluggy.py", _FAKE_PYTEST.replace('("__main__", "pytest")', "__name__,")),
    "sitecustomize.py": _write(
        "sitecustomize.py", _FAKE_PYTEST.replace('("__main__", "pytest")', "__name__,")
    ),
    "usercustomize.py": _write(
        "usercustomize.py", _FAKE_PYTEST.replace('("__main__", "pytest")', "__name__,")
    ),
    "json.py in the root": _write("json.py", _FAKE_PYTEST.replace('("__main__", "pytest")', "__name__,")),
    "unittest/ in the tests' folder": _write("tests/unittest/__init__.py", "class TestCase: pass\n"),
    "argparse, that pytest imports, in the root": _write(
        "argparse.py", _FAKE_PYTEST.replace('("__main__", "pytest")', "__name__,")
    ),
    "a plugin by entry points": _write("forge.py", _REWRITE)
    + _write("forge.egg-info/entry_points.txt", "[pytest11]\nforge = forge\n")
    + _write("forge.egg-info/PKG-INFO", "Name: forge\nVersion: 1\n"),
    "a .pth file": _write("cheat.pth", "import src.cart\n"),
    ".gitattributes that changes the tests": _write(
        ".gitattributes", "@TEST@ working-tree-encoding=UTF-16\n"
    ),
}
