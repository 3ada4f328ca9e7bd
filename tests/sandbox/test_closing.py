"""Closing while everything is in use: who waits hears of it at once, close() comes back in time, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from swegym_tutorial import TrainingConfig
from swegym_tutorial.sandbox import (
    CLOSING,
    Sandbox,
    SandboxBackend,
    SandboxError,
    backend,
    hosted,
    images,
    remote,
    root,
)
from swegym_tutorial.sandbox.leftovers import find
from swegym_tutorial.sandbox.local import LocalBackend
from swegym_tutorial.tasks import Task

from .conftest import KINDS, SERVICES, gone, opened, processes_of, wait_for
from .podman import Engine
from .proxy import proxied

if TYPE_CHECKING:
    from modal_server import ModalServer

AT_ONCE = 20.0  # seconds in which who waits must hear of the end: one or two, and more on a busy machine


def endless(*calls: Callable[[], object]) -> None:
    while True:
        for call in calls:
            call()


def uses(sandbox: Sandbox, number: int, long_sleep: str) -> list[Callable[[], object]]:
    """What is done with the sandbox of that number until it is closed."""
    data = os.urandom(2 << 20)
    return [
        [lambda: sandbox.exec(f"(setsid {long_sleep} &); {long_sleep}", timeout=600)],
        [lambda: sandbox.write_file("/testbed/big", data), lambda: sandbox.read_file("/testbed/big")],
        [lambda: sandbox.exec("while :; do echo x; sleep 0.01; done", timeout=600)],
    ][number % 3]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_case_45_close_in_the_midst_of_all_is_heard_at_once_and_leaves_nothing(
    kind: str, small_task: Task, long_sleep: str, request: pytest.FixtureRequest
) -> None:
    ended: list[tuple[str, float]] = []

    def use(*calls: Callable[[], object]) -> None:
        with pytest.raises(SandboxError) as raised:
            endless(*calls)
        ended.append((str(raised.value), time.monotonic()))

    with opened(kind, request) as sandboxes:
        boxes = [sandboxes.open(small_task) for _ in range(9)]
        work = [uses(box, number, long_sleep) for number, box in enumerate(boxes)]
        work += [[lambda: sandboxes.open(small_task).close()]] * 3
        threads = [threading.Thread(target=use, args=calls) for calls in work]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: len(processes_of(long_sleep)) >= 6)
        start = time.monotonic()
        sandboxes.close()
        assert time.monotonic() - start < CLOSING + 15
        for thread in threads:
            thread.join(30)
        assert len(ended) == len(threads) and all("closed" in words for words, _ in ended)
        assert max(when for _, when in ended) - start < AT_ONCE
        assert gone(long_sleep)


@contextlib.contextmanager
def at_work(calls: list[Callable[[], Any]]) -> Iterator[list[Future[Any]]]:
    with ThreadPoolExecutor(len(calls)) as pool:
        yield [pool.submit(call) for call in calls]


def heard(futures: list[Future[Any]], start: float) -> None:
    for future in futures:
        with pytest.raises(SandboxError, match="closed"):
            future.result(timeout=30)
    assert time.monotonic() - start < AT_ONCE


@pytest.mark.slow
def test_an_engine_that_hangs_holds_nobody_up(
    engine: Engine, small_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are moved, programs that are started, sandboxes that are opened: all wait for the engine."""
    monkeypatch.setattr(remote, "CLOSING", 2.0)
    for name, value in engine.settings.items():
        monkeypatch.setenv(name, value)
    with proxied(tmp_path, engine.settings["DOCKER_HOST"].removeprefix("unix://")) as proxy:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/proxy.sock")
        made = backend("docker", TrainingConfig.laptop(), run="hangs")
        boxes = [made.open(small_task) for _ in range(3)]
        proxy.stall()
        with at_work(
            [
                lambda: boxes[0].write_file("/testbed/big", b"x" * 1_000_000),
                lambda: boxes[1].exec("true", timeout=60),
                lambda: boxes[2].read_file("/testbed/README"),
                lambda: made.open(small_task),
            ]
        ) as futures:
            time.sleep(0.5)
            start = time.monotonic()
            closer = ThreadPoolExecutor(1).submit(made.close)
            heard(futures, start)
            with pytest.raises(SandboxError, match="3 of 3 sandboxes were not ended within 2 s"):
                closer.result(timeout=30)
            assert time.monotonic() - start < 25  # the engine itself would be waited for 30 s
        proxy.stall(False)
        monkeypatch.setenv("DOCKER_HOST", engine.settings["DOCKER_HOST"])
        assert wait_for(
            lambda: not find("docker", "hangs"), 60
        )  # by the child that goes on, through the proxy


@pytest.mark.slow
def test_a_pull_ends_when_nobody_waits_for_it(
    engine: Engine, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in engine.settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(images, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(engine.registry, "failures", engine.registry.failures + 100)
    said: list[str] = []
    made = backend("docker", TrainingConfig.laptop(), say=said.append)
    task = replace(small_task, image=f"{engine.address}/busy/for-long:latest", files={})
    with at_work([lambda: made.open(task)]) as futures:
        assert wait_for(lambda: any("trying again" in text for text in said), 60)
        start = time.monotonic()
        made.close()
        heard(futures, start)
    assert wait_for(lambda: "fetch an image" not in [thread.name for thread in threading.enumerate()], 25)


@pytest.mark.slow
def test_a_service_that_hangs_holds_nobody_up(
    modal_server: ModalServer, small_task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "CLOSING", 10.0)  # in which a busy machine can still end one
    for name, value in modal_server.settings.items():
        monkeypatch.setenv(name, value)
    made = backend("modal", TrainingConfig.laptop(), run="hangs")
    box = made.open(small_task)
    modal_server.holding = True
    modal_server.hang_execs()
    try:
        calls = [lambda: box.exec("true", timeout=60), *[lambda: made.open(small_task)] * 3]
        with at_work(calls) as futures:
            assert wait_for(lambda: modal_server.creating == 3)
            start = time.monotonic()
            closer = ThreadPoolExecutor(1).submit(made.close)
            heard(futures, start)
            with pytest.raises(SandboxError, match="some are still being started"):
                closer.result(timeout=60)
            assert modal_server.creating == 3  # nobody waited for these
        modal_server.holding = False
        assert wait_for(lambda: modal_server.creating == 0 and not find("modal", "hangs"), 60)
    finally:
        modal_server.holding = False


def test_a_disk_that_is_stuck_is_left_to_the_watchdog(
    small_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = threading.Event()
    monkeypatch.setattr(hosted, "CLOSING", 1.0)
    monkeypatch.setattr(root, "remove_tree", lambda folder: stuck.wait())
    made = LocalBackend(tmp_path)
    made.open(small_task)
    with pytest.raises(SandboxError, match="was not deleted within 1 s; its watchdog goes on"):
        made.close()
    stuck.set()
    assert wait_for(lambda: not list(tmp_path.iterdir()))


# Case 19 (tinker-cookbook#302, uni-agent#47): many clients share one limit of starts, and throttling.


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVICES)
def test_case_19_eight_clients_start_four_at_once_however_busy_it_is(
    kind: str, small_task: Task, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in request.getfixturevalue(SERVICES[kind]).settings.items():
        monkeypatch.setenv(name, value)
    made = backend(kind, TrainingConfig.laptop(sandbox_starts=4), run="storm")
    counted = Counted(made, 4)
    monkeypatch.setattr(made, "_start", counted.start)
    throttle(kind, made, request, monkeypatch, 10)
    with contextlib.closing(made), ThreadPoolExecutor(24) as pool:  # eight clients with three workers each
        boxes = list(pool.map(lambda _: made.open(small_task), range(32)))
        assert len(find(kind, "storm")) == len(set(boxes)) == 32
        assert counted.most == 4 and counted.refused == 10
    assert find(kind, "storm") == []


class Counted:
    """A backend's way to start a container, counted; the first wait until so many are there at once."""

    def __init__(self, made: SandboxBackend, expected: int) -> None:
        self._start = made._start  # type: ignore[attr-defined]
        self._lock, self._expected, self._there = threading.Lock(), expected, threading.Event()
        self.now = self.most = self.refused = 0

    def start(self, image: Any, task: Task) -> Any:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        if self.most >= self._expected:
            self._there.set()
        self._there.wait(60)
        try:
            return self._start(image, task)
        except SandboxError:
            with self._lock:
                self.refused += 1
            raise
        finally:
            with self._lock:
                self.now -= 1


def throttle(
    kind: str, made: SandboxBackend, request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, times: int
) -> None:
    """Have the service refuse so many starts for being too busy."""
    if kind == "modal":
        server: ModalServer = request.getfixturevalue("modal_server")
        server.throttle(times)
        return
    import docker.errors
    import requests

    api, left = made._api, [429] * times  # type: ignore[attr-defined]
    create = api.create_container

    def refuse(*args: Any, **settings: Any) -> Any:
        try:
            status = left.pop()
        except IndexError:
            return create(*args, **settings)
        answer = requests.Response()
        answer.status_code = status
        raise docker.errors.APIError("too busy", answer, "toomanyrequests")

    patch.setattr(api, "create_container", refuse)
