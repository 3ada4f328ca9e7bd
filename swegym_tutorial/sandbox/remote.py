"""What the backends share whose sandboxes are containers of an engine or service: openings, images, closing.

A kind (docker.py, modal.py) provides:
- a `Container` (container.py): one running container, in which root has /bin/bash, git, coreutils and /proc;
- a subclass of `RemoteBackend` with `_fetch` (make an image ready), `_start` (start a container of it with
  supervisor.keeper(lifetime) as its program), `_why_missing` (ask for an image), and `_shutdown` where the kind
  keeps anything itself. `_start` raises Throttled where the engine is busy and a later try may work.
The commands are contained.py's. Knows tasks, threads and patience; nothing of any engine.
"""

from __future__ import annotations

import contextlib
import io
import random
import secrets
import shlex
import tarfile
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from ..config import TrainingConfig
from ..tasks import Task, TaskError, materialise
from . import REPOSITORY, SandboxError
from .bubblewrap import ENVIRONMENT
from .contained import RemoteSandbox
from .container import Container, Throttled
from .files import HOME
from .threads import Once, fill, in_threads

STARTS = 6  # tries to start a container where the engine is busy
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds before the second try, doubled each time; give or take half
SETUP_TIMEOUT = 300.0  # seconds for a task's set-up, and for git to put its repository in order
ASKED_AT_ONCE = 8  # images that are asked for at the same time
CLOSED_AT_ONCE = 64

# The local sandbox's, but the user is the image's root. LC_ALL is cleared, so that LANG counts as it does there;
# set to C.UTF-8, bash would complain in every output of an image that lacks this locale.
BASE: Mapping[str, str] = {
    **{name: value for name, value in ENVIRONMENT.items() if name not in ("HOME", "USER", "LOGNAME")},
    "LC_ALL": "",
}
_OF_THE_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")

# Without -x: ignored files may be extensions that were built in place for the image's environment.
_RESET = """
[[ -e .git ]] || { echo "there is no git repository at $PWD in the image"; exit 1; }
[[ -O . && -O .git ]] || chown "$(id -u)" . .git  # or git refuses another user's repository
git cat-file -e "$base^{commit}" 2> /dev/null || { echo "base_commit $base is not in the image's repository"; exit 1; }
git checkout -q -f --detach "$base" && git reset -q --hard "$base" && git clean -q -f -d
"""


class RemoteBackend(ABC):
    """Opens sandboxes in containers for one run, at most config.sandbox_starts of them at the same time.

    A task with an image gets the repository that the image has at /testbed, reset to base_commit and cleaned;
    the user and HOME are the image's. A task with files gets them as a repository in the kind's own image, with
    the HOME of the local sandbox. A task's set-up is run once an image: the environment that it makes (not its
    shell functions, unless exported) is every command's, so that no command pays for an activation.
    """

    name: str

    def __init__(self, config: TrainingConfig, run: str, say: Callable[[str], None]) -> None:
        self.config, self.run, self.say = config, run, say
        self._lock = threading.Condition()
        self._opening = self._starting = 0
        self._closed = False
        self._sandboxes: set[RemoteSandbox] = set()
        self._images: dict[str, Future[Any]] = {}
        self._archives: Once[Hashable, bytes] = Once()
        self._environments: Once[tuple[str, str], Mapping[str, str]] = Once()

    @abstractmethod
    def _fetch(self, image: str, task: Task) -> Any:
        """Make an image ready and return it as `_start` takes it; "" is the kind's own, for tasks with files.

        Called once an image, in a thread that a close() leaves alone; after an error again for the next who
        needs it. Raises SandboxError that names the image and the task.
        """

    @abstractmethod
    def _start(self, image: Any, task: Task) -> Container:
        """Start a container with the limits in the settings. Raises SandboxError, Throttled where it is busy.

        Whatever it raises, an interrupt too, it leaves no container behind.
        """

    @abstractmethod
    def _why_missing(self, image: str) -> str | None:
        """Ask whether an image can be had, without fetching it; return why not, or None where it can.

        Raises SandboxError where whoever has the images does not answer.
        """

    def _shutdown(self) -> None:  # noqa: B027 (a kind may keep nothing)
        """Delete what the kind itself keeps. Called once, after the last sandbox is closed."""

    def open(self, task: Task) -> RemoteSandbox:
        """Return a fresh sandbox with the task's repository at base_commit; see the protocol."""
        if not task.image and not task.files:
            raise SandboxError(f"{task.instance_id} brings neither an image nor files")
        with self._open_one():
            image = self._image_of(task)
            archive = b"" if task.image else self._archive(task)
            with self._slot():
                sandbox = self._started(image, task)
                try:
                    self._prepare(sandbox, task, archive)
                except BaseException as error:
                    with contextlib.suppress(SandboxError):
                        sandbox.close()
                    if isinstance(error, SandboxError):
                        self._check_open()
                    raise
                return sandbox

    def missing(self, tasks: Sequence[Task]) -> dict[str, str]:
        """Find the tasks that cannot be opened here; see the protocol.

        An image of which nobody can say whether it is there counts as missing, unless that is so of all.
        """
        images = list(dict.fromkeys(task.image for task in tasks if task.image))
        futures = in_threads(self._why_missing, images, ASKED_AT_ONCE)
        why: dict[str, str | None] = {}
        unasked: list[SandboxError] = []
        try:
            for image, future in zip(images, futures, strict=True):
                try:
                    why[image] = future.result()
                except SandboxError as error:
                    why[image] = str(error)
                    unasked.append(error)
        finally:
            for future in futures:  # an interrupt waits for no image
                future.cancel()
        if unasked and len(unasked) == len(images):
            raise unasked[0]
        found = {task.instance_id: why.get(task.image) for task in tasks}
        found |= {
            task.instance_id: "it brings neither an image nor files"
            for task in tasks
            if not task.image and not task.files
        }
        return {name: reason for name, reason in found.items() if reason}

    def close(self) -> None:
        """Close every sandbox, wait for those being opened, and delete the rest. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lock.notify_all()
            sandboxes = list(self._sandboxes)
        with contextlib.ExitStack() as closing:  # one that fails to close stops no other
            closing.callback(self._shutdown)
            closing.callback(self._wait_for_openings)
            for future in in_threads(RemoteSandbox.close, sandboxes, CLOSED_AT_ONCE):
                closing.callback(future.result)

    def _image_of(self, task: Task) -> Any:
        """Fetch an image, or wait for who fetches it already; close() ends the waiting, not the fetching."""
        with self._lock:
            future = self._images.get(task.image)
            if future is None or (future.done() and future.exception()):
                future = self._images[task.image] = Future()
                fetch = (future, self._fetch, task.image, task)
                threading.Thread(target=fill, args=fetch, name="fetch an image", daemon=True).start()
        while not wait([future], timeout=0.2).done:
            self._check_open()
        return future.result()

    def _started(self, image: Any, task: Task) -> RemoteSandbox:
        container = self._start_patiently(image, task)
        environment = BASE if task.image else {**BASE, "HOME": HOME}
        sandbox = RemoteSandbox(container, environment, self.config.sandbox_lifetime, self._forget)
        with self._lock:
            closed = self._closed
            if not closed:
                self._sandboxes.add(sandbox)
        if closed:
            sandbox.close()
            self._check_open()
        return sandbox

    def _start_patiently(self, image: Any, task: Task) -> Container:
        """Start a container; where the engine is busy, try again after longer and longer pauses."""
        for number in range(STARTS):
            try:
                return self._start(image, task)
            except Throttled:
                if number == STARTS - 1:
                    raise
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**number) * random.uniform(0.5, 1.5)
            with self._lock:
                self._lock.wait_for(lambda: self._closed, pause)
            self._check_open()
        raise AssertionError("the loop returns or raises")

    def _prepare(self, sandbox: RemoteSandbox, task: Task, archive: bytes) -> None:
        if task.image:
            code = f"base={shlex.quote(task.base_commit or 'HEAD')}\n{_RESET}"
            result = sandbox.exec(code, timeout=SETUP_TIMEOUT)
            if result.exit_code:
                why = result.output.strip()[-300:] or f"git ended with {result.exit_code}"
                raise SandboxError(f"{task.instance_id} in {task.image}: {why}")
        else:
            sandbox.unpack(archive)
        if task.setup:
            key = (task.image, task.setup)
            sandbox.environment = dict(self._environments.get(key, lambda: _environment(sandbox, task)))

    def _archive(self, task: Task) -> bytes:
        key = (task.instance_id, task.base_commit, frozenset(task.files.items()))
        return self._archives.get(key, lambda: repository_archive(task))

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the backend is closed")

    @contextlib.contextmanager
    def _open_one(self) -> Iterator[None]:
        """Count who is in open(), so that close() can wait for it."""
        with self._lock:
            self._check_open()
            self._opening += 1
        try:
            yield
        finally:
            with self._lock:
                self._opening -= 1
                self._lock.notify_all()

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """Wait until one of the starts at a time that the settings allow is free."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed or self._starting < self.config.sandbox_starts)
            self._check_open()
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1
                self._lock.notify_all()

    def _forget(self, sandbox: RemoteSandbox) -> None:
        with self._lock:
            self._sandboxes.discard(sandbox)

    def _wait_for_openings(self) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._opening == 0)


def repository_archive(task: Task) -> bytes:
    """Return a tar archive, to be unpacked at the root, of the task's repository as git makes it from its files.

    Raises SandboxError where it cannot be made.
    """
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="swegym-") as folder:
        path = Path(folder, "repository")
        try:
            materialise(task, path)
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                for name in (HOME, "/tmp"):
                    entry = tarfile.TarInfo(name[1:])
                    entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "/tmp" else 0o755
                    archive.addfile(entry)
                archive.add(path, REPOSITORY[1:], filter=_as_root)
        except (TaskError, OSError) as error:
            raise SandboxError(f"the repository of {task.instance_id} could not be made: {error}") from error
    return buffer.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.isdir():
        entry.mode = 0o755
    return entry


def _environment(sandbox: RemoteSandbox, task: Task) -> Mapping[str, str]:
    """Run a task's set-up, and return the environment that it leaves. Raises SandboxError where it fails."""
    mark = secrets.token_hex(8)
    code = f"{task.setup}\nstatus=$?; printf '\\n{mark}\\0'; env -0 || exit; exit $status"
    result = sandbox.exec(code, timeout=SETUP_TIMEOUT, output_bytes=4 << 20)
    before, found, after = result.output.rpartition(f"\n{mark}\0")
    if result.exit_code or not found:
        late = f", killed after {SETUP_TIMEOUT:.0f} s" if result.timed_out else ""
        said = (before.strip() or result.output.strip())[-300:].replace("\0", " ")
        raise SandboxError(
            f"the set-up of {task.instance_id} failed with {result.exit_code}{late}: {said or 'it said nothing'}"
        )
    pairs = (pair.partition("=") for pair in after.split("\0") if "=" in pair)
    return {name: value for name, _, value in pairs if name not in _OF_THE_SHELL}
