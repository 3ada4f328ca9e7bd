"""One JupyterLab and one browser for all of these tests, and the pictures and logs that they leave."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .lab import ROOT, Lab
from .pages import HEIGHT, WIDTH, Observer, launch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

REQUIRED = "SWEGYM_TUTORIAL_REQUIRE"  # names what must not be skipped, with commas between
ARTIFACTS = "SWEGYM_TUTORIAL_ARTIFACTS"  # the folder for what a person may want to look at after the tests
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def why_not() -> str | None:
    """Return why these tests cannot run here; None where they can."""
    for module in ("playwright", "jupyterlab", "ipywidgets"):
        if importlib.util.find_spec(module) is None:
            return f"the package {module} is not installed"
    if not any(map(shutil.which, PROGRAMS)):
        return f"no browser: none of {', '.join(PROGRAMS)} is installed"
    return None


@pytest.fixture(scope="module")
def artifacts() -> Path:
    folder = ROOT / (os.environ.get(ARTIFACTS) or "artifacts") / "browser"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if reason := why_not():
        if "browser" in os.environ.get(REQUIRED, "").split(","):
            pytest.fail(f"{REQUIRED} asks for browser: {reason}")
        pytest.skip(reason=reason)
    from playwright.sync_api import sync_playwright

    program = next(filter(None, map(shutil.which, PROGRAMS)))
    with sync_playwright() as playwright:
        started = launch(playwright, program)
        yield started
        started.close()


@pytest.fixture(scope="module")
def lab(browser: Browser, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab of which nothing may be left at the end (case 45)."""
    started = Lab(tmp_path_factory.mktemp("lab"), artifacts / "jupyter.log")
    try:
        yield started
    finally:
        left = started.close()
    assert not left, left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


FAILED: pytest.StashKey[bool] = pytest.StashKey()


@pytest.fixture
def context(browser: Browser, artifacts: Path, request: pytest.FixtureRequest) -> Iterator[BrowserContext]:
    """A fresh window. After a failed test there is a picture of each of its pages."""
    made = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    yield made
    if request.node.stash.get(FAILED, False):
        name = re.sub(r"\W+", "-", request.node.name)
        for number, page in enumerate(made.pages):
            page.screenshot(path=artifacts / f"failed-{name}-{number}.png")
    made.close()


@pytest.fixture
def observer(context: BrowserContext) -> Observer:
    return Observer(context)
