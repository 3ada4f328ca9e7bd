"""A handmade task, and a look at the machine's processes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from swegym_tutorial.sandbox import SandboxBackend, backend
from swegym_tutorial.tasks import Task

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def small_task() -> Task:
    files = {f"pkg{i % 3}/m{i}.py": f"VALUE = {i}\n" * 40 for i in range(14)}
    files["README"] = "A small repository.\n"
    return Task(
        instance_id="small__small-1",
        repo="small/small",
        base_commit="",
        problem_statement="Nothing is wrong.",
        patch="GOLD",
        test_patch="HIDDEN",
        fail_to_pass=("t",),
        pass_to_pass=(),
        files=files,
    )


@pytest.fixture(scope="module", params=["local", "subprocess"])
def any_backend(request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    if request.param == "subprocess":
        with pytest.warns(UserWarning, match="without isolation"):
            opened = backend("subprocess")
    else:
        opened = backend(request.param)
    yield opened
    opened.close()


@pytest.fixture
def long_sleep() -> str:
    """A command that takes very long, and is told from all others by its argument."""
    return f"sleep 86400.{os.getpid()}{next(_numbers)}"


def processes_of(text: str) -> list[int]:
    """Return the ids of the living processes whose command line holds the text."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if text in line and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process.pid)
    return found


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
