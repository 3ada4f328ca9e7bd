"""A handmade task, the kinds of sandbox that the contract is held against, and a look at the machine's processes."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

from swegym_tutorial.sandbox import SandboxBackend, backend, local
from swegym_tutorial.tasks import Task

from .podman import Engine, skip_or_fail, start_engine, why_not
from .registry import Registry, serve

if TYPE_CHECKING:
    from modal_server import ModalServer

_numbers = itertools.count(1)

HOSTED = ("local", "subprocess")  # kinds that keep sandboxes in folders of this machine
# Kinds whose service is elsewhere -> the fixture that starts one, with the `settings` (environment variables) to it.
SERVICES = {"docker": "engine", "modal": "modal_server"}
SLOW = {"docker": [pytest.mark.slow]}  # the engine alone takes seconds to start
KINDS = [pytest.param(kind, marks=SLOW.get(kind, ())) for kind in (*HOSTED, *SERVICES)]


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


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """podman with an image of this machine's programs, and a registry."""
    if reason := why_not():
        skip_or_fail("docker", reason)
    registry = Registry()
    with serve(registry) as address, start_engine(registry, address) as started:
        yield started


@pytest.fixture(scope="session")
def modal_server() -> Iterator[ModalServer]:
    """A Modal on this machine, which a real client talks to."""
    if importlib.util.find_spec("modal") is None:
        skip_or_fail("modal", "the package modal is not installed")
    if reason := local.why_unavailable():
        skip_or_fail("modal", f"the containers of the tests' Modal server are bubblewrap's: {reason}")
    from modal_server import ModalServer

    with ModalServer() as server:
        yield server


@contextlib.contextmanager
def opened(kind: str, request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    """Open a backend of that kind, against the service of a fixture where it needs one; close it."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sandbox subprocess")
        if kind in SERVICES:
            for name, value in request.getfixturevalue(SERVICES[kind]).settings.items():
                patch.setenv(name, value)
        with contextlib.closing(backend(kind)) as made:
            yield made


@pytest.fixture(scope="module", params=KINDS)
def any_backend(request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    with opened(request.param, request) as made:
        yield made


@pytest.fixture(scope="module", params=HOSTED)
def hosted_backend(request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    with opened(request.param, request) as made:
        yield made


@pytest.fixture(scope="module", params=KINDS[len(HOSTED) :])
def remote_backend(request: pytest.FixtureRequest) -> Iterator[SandboxBackend]:
    with opened(request.param, request) as made:
        yield made


@pytest.fixture
def long_sleep() -> str:
    """A command that takes very long, and is told from all others by its argument."""
    return f"sleep 86400.{os.getpid():07}{next(_numbers):05}"


def processes_of(text: str) -> list[int]:
    """Return the ids of the living processes whose command line holds the text."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if text in line and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found.append(process.pid)
    return found


def gone(text: str) -> bool:
    """Whether all those processes end: what is killed needs a moment to die, and a day's sleep needs a day."""
    return wait_for(lambda: not processes_of(text))


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
