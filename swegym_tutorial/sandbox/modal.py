"""Sandboxes in Modal: each a container of the task's image on their machines, without network.

They are made as the published recipe makes them: the image's entrypoint cleared, 2 CPUs, 8 GiB, two hours of
life, no network. All of an app, `swegym-tutorial` or what SWEGYM_TUTORIAL_MODAL_APP says, and with tags that tell
their run and driver, so that `leftovers` finds those of a driver that was killed; they end by themselves when
their life is over. Works with modal 1.5.5 and later, on both kinds of Modal's sandboxes (MODAL_SANDBOX_V2).
Knows Modal; commands are contained.py's, the client's peculiarities are modal_client.py's.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import math
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from ..config import TrainingConfig
from ..tasks import Task
from . import Leftover, SandboxError, supervisor
from .container import Container, NotStarted
from .modal_client import check, client, failures, within, words
from .reaper import machine
from .remote import RemoteBackend
from .threads import in_threads

APP = os.environ.get("SWEGYM_TUTORIAL_MODAL_APP", "swegym-tutorial")
OWN_IMAGE = "python:3.11-slim"  # for tasks that bring files: with git and pytest added
PYTEST = "pytest>=8,<10"
PATIENCE = 60.0  # seconds for a short question
FILE_PATIENCE = 300.0  # seconds for moving a file
OPENING_PATIENCE = (
    600.0  # seconds for making a sandbox, and for its first answer: a worker may load gigabytes
)
ASKED_AT_ONCE = 16  # sandboxes that are asked for their tags at the same time
TAG_SIZE = 50
_PROJECT = "swegym-tutorial"


class ModalContainer(Container):
    """One sandbox of Modal's. All methods from any thread."""

    def __init__(self, modal: Any, sandbox: Any, lifetime: int) -> None:
        self._modal, self._sandbox, self._lifetime = modal, sandbox, lifetime
        self._removed = False

    @property
    def id(self) -> str:
        return str(self._sandbox.object_id)

    def look_around(self) -> None:
        """Find out which processes are Modal's own, to be kept when a command's are ended."""
        found: list[bytes] = []
        self.run(supervisor.others(), {}, lambda stream, data: found.append(data))
        self.keep = " ".join(b"".join(found).decode().split())
        if not re.fullmatch(r"[0-9 ]+", self.keep):
            raise SandboxError(
                f"the sandbox {self.id} does not run bash: {self.keep[-300:] or 'it says nothing'}"
            )

    def run(self, program: Sequence[str], env: Mapping[str, str], take: Callable[[int, bytes], None]) -> int:
        """Run a program; see Container. Its stdin is left open and empty: our programs do not read it."""
        raised: list[Exception] = []
        start = time.monotonic()

        def passed(stream: int, data: bytes) -> None:
            try:
                take(stream, data)
            except Exception as error:
                raised.append(error)
                raise

        try:
            with failures(self._modal, "a command"):
                code = asyncio.run(self._run(program, env, passed))
        except SandboxError:
            if raised:  # the caller's own, not Modal's
                raise raised[0] from None
            raise
        # -1 is the client's word for an exec that reached its deadline, unless Modal's 137 is quicker.
        if code < 0 or time.monotonic() - start >= self._lifetime:
            raise SandboxError(f"the sandbox's life of {self._lifetime} s ended before the command")
        return code

    async def _run(
        self, program: Sequence[str], env: Mapping[str, str], take: Callable[[int, bytes], None]
    ) -> int:
        # Bytes, since text=True raises for output that is no UTF-8; read in pieces, since read() has no limit.
        starting = self._sandbox.exec.aio(*program, env=dict(env), timeout=self._lifetime, text=False)
        try:
            process = await starting
        except self._modal.exception.ResourceExhaustedError as error:
            raise NotStarted(f"Modal is too busy to start a command ({words(error)})") from error

        async def pass_on(number: int, stream: Any) -> None:
            # A stream that broke is read on from where it was and ends by the server's word: no end is lost.
            async for data in stream:
                take(number, data)

        # All at once: wait() alone at a deadline loses the output, and one after the other costs a round trip.
        calls = [
            asyncio.ensure_future(call)
            for call in (pass_on(1, process.stdout), pass_on(2, process.stderr), process.wait.aio())
        ]
        try:
            *_, code = await asyncio.gather(*calls)
        finally:  # where one fails, the others may too, and asyncio would tell the terminal
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        return int(code)

    def put(self, path: str, data: bytes) -> None:
        """Write a file of any size; see Container. An argument may have 64 KiB, so it goes as a stream."""
        with failures(self._modal, f"writing {path}"):
            within(FILE_PATIENCE, path, lambda: self._sandbox.filesystem.write_bytes(data, path))

    def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive at the root; see Container."""
        path = f"/tmp/.swegym-{secrets.token_hex(8)}.tar"
        self.put(path, archive)
        said: list[bytes] = []
        code = 'tar -x -f "$0" -C / --no-same-owner 2>&1; status=$?; rm -f "$0"; exit $status'
        program, take = ["/bin/sh", "-c", code, path], lambda stream, data: said.append(data)
        status = within(FILE_PATIENCE, "unpacking files", lambda: self.run(program, {}, take))
        if status:
            raise SandboxError(
                f"tar failed with {status}: {b''.join(said).decode('utf-8', 'replace')[-300:]}"
            )

    def fault(self) -> str | None:
        """Ask Modal whether it runs; see Container."""
        try:
            with failures(self._modal, "asking for the sandbox"):
                code = within(PATIENCE, "asking for the sandbox", self._sandbox.poll)
        except SandboxError as error:
            return str(error)
        if code is None:
            return None
        known = {124: "its life on Modal is over", 137: "it was terminated on Modal"}
        return known.get(code, f"its main program ended with {code}")

    def remove(self) -> None:
        """Terminate it; see Container."""
        if self._removed:
            return
        gone = (self._modal.exception.NotFoundError, self._modal.exception.ClientClosed)
        try:
            with failures(self._modal, f"terminating the sandbox {self.id}"):
                within(PATIENCE, f"terminating the sandbox {self.id}", self._sandbox.terminate)
        except SandboxError as error:
            if not isinstance(error.__cause__, gone):
                raise
        self._removed = True
        with contextlib.suppress(Exception):  # lets the connection go; what is under way ends by itself
            self._sandbox.detach()


class ModalBackend(RemoteBackend):
    """Opens sandboxes in Modal for one run."""

    name = "modal"
    start_patience = 2 * OPENING_PATIENCE

    def __init__(
        self, config: TrainingConfig, run: str = "", say: Callable[[str], None] = lambda text: None
    ) -> None:
        """See that Modal can be used. Raises SandboxUnavailable, in seconds, with what to do."""
        super().__init__(config, run, say)
        self._modal = client()
        check(self._modal)
        self._app_lock = threading.Lock()
        self._app: Any = None
        self._built = self._asked = 0
        atexit.register(self._at_exit)  # after the client's own, and so called before it ends its connections

    def close(self) -> None:
        """Close all; see the protocol."""
        super().close()
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        # No word of the calls that end with all else, or that come after the client's end.
        for name in ("asyncio", "synchronicity"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        with contextlib.suppress(SandboxError):
            self.close()

    def _fetch(self, image: str, task: Task) -> Any:
        found, why = self._build(image)
        if why:
            raise SandboxError(f"{task.instance_id}: {why}")
        return found

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Have Modal fetch the tasks' images, several at once, and return those that it cannot; see the protocol.

        What it has once fetched it keeps, so only the first time takes long.
        """
        self._asked = len({task.image for task in tasks if task.image})
        self._built = 0
        return super().missing(tasks)

    def _why_missing(self, image: str) -> str | None:
        _, why = self._build(image)
        with self._lock:
            self._built += 1
            built = self._built
        self.say(f"image {built} of {self._asked} {'is there' if why is None else 'is missing'}: {image}")
        return why

    def _build(self, tag: str) -> tuple[Any, str | None]:
        """Have Modal make an image ready; return it, and why that cannot be. Raises SandboxError."""
        modal = self._modal
        image = modal.Image.from_registry(tag or OWN_IMAGE)
        if not tag:
            image = image.apt_install("git").pip_install(PYTEST)
        image = image.entrypoint([])
        try:
            with failures(modal, f"the image {tag or OWN_IMAGE}"):
                return self._while_open(lambda: image.build(self._find_app())), None
        except SandboxError as error:
            if isinstance(error.__cause__, modal.exception.ImageBuildError):
                return None, f"Modal cannot make the image {tag or OWN_IMAGE} ready: {words(error.__cause__)}"
            raise

    def _find_app(self) -> Any:
        with self._app_lock:
            if self._app is None:
                with failures(self._modal, f"the app {APP}"):
                    self._app = self._modal.App.lookup(APP, create_if_missing=True)
            return self._app

    def _start(self, image: Any, task: Task) -> Container:
        lifetime = math.ceil(self.config.sandbox_lifetime)
        with failures(self._modal, f"a sandbox for {task.instance_id}"):
            sandbox = self._modal.Sandbox.create(
                *supervisor.keeper(lifetime),
                app=self._find_app(),
                image=image,
                cpu=self.config.sandbox_cpus,
                memory=self.config.sandbox_memory_mb,
                timeout=lifetime,
                block_network=True,
                tags=_tags(self.run, task.instance_id),
            )
        container = ModalContainer(self._modal, sandbox, lifetime)
        try:
            within(OPENING_PATIENCE, "the sandbox's first command", container.look_around)
        except BaseException:
            with contextlib.suppress(SandboxError):
                container.remove()
            raise
        return container


def _tag(text: str) -> str:
    """The text as Modal takes it for a tag."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", text)[:TAG_SIZE]


def _tags(run: str, instance_id: str) -> dict[str, str]:
    tags = {"project": _PROJECT, "run": run, "instance": instance_id, "started": str(int(time.time()))}
    return {name: _tag(value) for name, value in {**tags, **_driver()}.items() if value}


def _driver() -> dict[str, str]:
    """The tags that tell this process from every other one."""
    process = psutil.Process()
    return {"host": machine(), "pid": f"{process.pid}.{int(process.create_time())}"}


def _is_orphan(tags: Mapping[str, str]) -> bool | None:
    """Whether the process that opened a sandbox is gone; None where it ran on another machine."""
    if tags.get("host") != _tag(machine()) or not re.fullmatch(r"\d+\.\d+", tags.get("pid", "")):
        return None
    pid, started = map(int, tags["pid"].split("."))
    try:
        return abs(psutil.Process(pid).create_time() - started) > 2
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return None


def leftovers(run: str | None = None) -> list[Leftover]:
    """Return the sandboxes of this project that run on Modal now: of one run, or with None of all.

    Raises SandboxError (SandboxUnavailable where Modal cannot be asked from here).
    """
    modal = client()
    check(modal)
    return _listed(modal, {"run": _tag(run)} if run else {})


def left_by(runs: Sequence[str]) -> list[Leftover]:
    """Return the sandboxes of these runs, and those of which the driver was on this machine and is gone."""
    modal = client()
    check(modal)
    here = [each for each in _listed(modal, {"host": _tag(machine())}) if each.orphan]
    found = [*here, *(each for run in runs if run for each in _listed(modal, {"run": _tag(run)}))]
    return list({each.name: each for each in found}.values())


def _listed(modal: Any, tags: Mapping[str, str]) -> list[Leftover]:
    """Return the sandboxes of this project that have these tags."""
    with failures(modal, "listing sandboxes"):
        try:
            app = modal.App.lookup(APP)
        except modal.exception.NotFoundError:  # no sandbox was ever opened
            return []
        found = list(modal.Sandbox.list(app_id=app.app_id, tags={"project": _PROJECT, **tags}))
        asked = in_threads(functools.partial(_leftover, modal), found, ASKED_AT_ONCE)
        return [left for each in asked if (left := each.result()) is not None]


def _leftover(modal: Any, sandbox: Any) -> Leftover | None:
    try:
        tags = sandbox.get_tags()
    except (modal.exception.NotFoundError, modal.exception.ConflictError):  # it ended meanwhile
        return None
    started = tags.get("started", "")
    age = time.time() - int(started) if started.isdigit() else None
    return Leftover("modal", sandbox.object_id, tags.get("run", ""), age, _is_orphan(tags))


def reap(leftover: Leftover) -> None:
    """Terminate one of the leftovers. Raises SandboxError."""
    modal = client()
    what = f"terminating {leftover.name}"
    with failures(modal, what), contextlib.suppress(modal.exception.NotFoundError):
        within(PATIENCE, what, lambda: modal.Sandbox.from_id(leftover.name).terminate())
