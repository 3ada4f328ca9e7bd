"""Sandboxes in containers of Docker, or of podman, which speaks the same API; through the `docker` SDK.

podman keeps two small helper processes for five minutes after each command, unless its containers.conf sets
exit_command_delay = 1 under [engine]. Knows the engine's API; nothing of commands or tasks.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import struct
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..config import TrainingConfig
from ..tasks import Task
from . import Leftover, SandboxError, supervisor
from .container import Container, NotStarted, Throttled
from .engine import connect
from .images import Images, laptop_image, talking
from .reaper import Reaper, driver_id, is_gone
from .remote import RemoteBackend

IMAGE_VARIABLE = "SWEGYM_TUTORIAL_IMAGE"  # names another image for tasks that bring files
CLOSING_TIMEOUT = 30  # seconds for one answer of the engine, once the backend is closed
RUN, DRIVER, BACKEND, INSTANCE = "swegym.run", "swegym.driver", "swegym.backend", "swegym.instance"
# What root needs to be root among the image's files, some of which other users own. No capability reaches
# beyond the container's own files: not SETUID, KILL, NET_RAW, MKNOD, SYS_CHROOT and the engine's other defaults.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
_READ = 1 << 20
_REMOVALS = 5  # tries
_REMOVAL_PATIENCE = 10.0  # seconds after which no other try is begun
_ASKED = 9  # times for an exit code: 5 s in all


class DockerBackend(RemoteBackend):
    """Opens sandboxes in containers for one run, with the limits in the settings.

    A container has no network, no more processes, memory (swap is none) and CPU time than the settings say, no
    new privileges, and root with CAPABILITIES alone. It ends by itself after config.sandbox_lifetime; a child
    process (reaper.py) ends it when this one dies. Files are limited by the engine's disk alone.
    """

    name = "docker"
    left_over = "a process of its own goes on trying for a minute"

    def __init__(
        self,
        config: TrainingConfig | None = None,
        *,
        run: str = "",
        say: Callable[[str], None] = lambda text: None,
        image: str | None = None,
    ) -> None:
        """Connect to the engine; image: for tasks that bring files (default: $SWEGYM_TUTORIAL_IMAGE, or one of ours).

        Raises SandboxUnavailable where no engine answers, with the cause and the mend.
        """
        super().__init__(config or TrainingConfig.laptop(), run, say)
        self._own_image = image or os.environ.get(IMAGE_VARIABLE, "")
        self._id = secrets.token_hex(8)
        self._driver = driver_id()
        self._api = connect()
        with talking("the container engine could not be asked what it is"):
            self._engine = Images(self._api, say)
        self._warnings: set[str] = set()
        self._reaper = Reaper("docker", self._id)

    def _fetch(self, image: str, task: Task) -> str:
        try:
            if image or self._own_image:
                return self._engine.get(image or self._own_image)
            return self._engine.build(*laptop_image())
        except SandboxError as error:
            raise SandboxError(f"{task.instance_id} cannot be opened: {error}") from error

    def _why_missing(self, image: str) -> str | None:
        return self._engine.why_missing(image)

    def _start(self, image: str, task: Task) -> Container:
        name = f"swegym-{secrets.token_hex(8)}"
        labels = {RUN: self.run, DRIVER: self._driver, BACKEND: self._id, INSTANCE: task.instance_id}
        try:
            with _busy_told(f"a container for {task.instance_id} could not be started"):
                made = self._api.create_container(
                    image,
                    name=name,
                    # As the entrypoint, so that neither the image's own nor its command counts.
                    entrypoint=supervisor.keeper(self.config.sandbox_lifetime),
                    user="0",
                    working_dir="/",
                    labels=labels,
                    host_config=self._limits(),
                    use_config_proxy=False,  # a proxy of the user's may hold a password, and there is no network
                )
                self._api.start(name)
            self._warn(made.get("Warnings") or ())
        except BaseException:  # an interrupt may come at any point
            with contextlib.suppress(SandboxError):
                DockerContainer(self._api, name).remove()
            raise
        return DockerContainer(self._api, name)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Pass on, once each, what the engine says of limits that it does not hold."""
        for warning in set(warnings) - self._warnings:
            self._warnings.add(warning)
            self.say(f"the container engine warns: {warning}")

    def _limits(self) -> dict[str, Any]:
        memory = self.config.sandbox_memory_mb << 20
        limits: dict[str, Any] = self._api.create_host_config(
            network_mode="none",
            auto_remove=True,
            nano_cpus=round(self.config.sandbox_cpus * 1e9),
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=self.config.sandbox_processes,
            cap_drop=["ALL"],
            cap_add=list(CAPABILITIES),
            security_opt=["no-new-privileges"],
        )
        return limits

    def close(self) -> None:
        """Close all; see the protocol."""
        self._api.timeout = CLOSING_TIMEOUT
        self._engine.close()
        super().close()

    def _sweep(self) -> bool:
        for each in _containers(self._api, f"{BACKEND}={self._id}"):  # whose removal failed before
            DockerContainer(self._api, each["Id"]).remove()
        return True

    def _let_go(self, gone: bool) -> None:
        self._reaper.close(gone)
        self._api.close()


class DockerContainer(Container):
    """One container of an engine."""

    def __init__(self, api: Any, name: str) -> None:
        self.name = name
        self._api = api

    def run(self, program: Sequence[str], env: Mapping[str, str], take: Callable[[int, bytes], None]) -> int:
        """Run a program to its end; see Container."""
        what = f"a program could not be run in container {self.name}"
        try:
            with talking(what):
                # Not in the image's folder: a command may have removed it, and then the engine starts nothing.
                made = self._api.exec_create(self.name, list(program), environment=dict(env), workdir="/")
        except SandboxError as error:
            raise NotStarted(str(error)) from error
        with talking(what):
            # The SDK's own exec_start reads past what came with the answer's head, and so can lose the beginning.
            url = f"{self._api.base_url}/v{self._api.api_version}/exec/{made['Id']}/start"
            answer = self._api.post(url, json={"Detach": False, "Tty": False}, stream=True, timeout=None)
            try:
                if not answer.ok:
                    raise NotStarted(f"{what}: exec answered {answer.status_code}: {answer.text.strip()}")
                for stream, data in _frames(answer.raw.read):
                    take(stream, data)
            finally:
                answer.close()
        return self._exit_code(made["Id"])

    def _exit_code(self, made: str) -> int:
        """Ask for the exit code of a program whose output is over: the engine may hear of its end a little later.

        Output that is cut off is over too, so a program that goes on is a fault.
        """
        import docker.errors

        why = "the engine hung up before the command's end"
        for number in range(_ASKED):
            try:
                with talking(why):
                    state = self._api.exec_inspect(made)
                if not state["Running"]:
                    return int(state["ExitCode"])
            except SandboxError as error:
                if isinstance(error.__cause__, docker.errors.NotFound):  # only what has ended is forgotten
                    return -1
            time.sleep(0.01 * 2**number)
        raise SandboxError(why)

    def put(self, path: str, data: bytes) -> None:
        """Write a file; see Container."""
        entry = tarfile.TarInfo(path[1:])
        entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.addfile(entry, io.BytesIO(data))
        self.unpack(buffer.getvalue())

    def unpack(self, archive: bytes) -> None:
        """Unpack a tar archive; see Container."""
        with talking(f"files could not be put into container {self.name}"):
            if not self._api.put_archive(self.name, "/", archive):
                raise SandboxError(f"files could not be put into container {self.name}")

    def fault(self) -> str | None:
        """Say why the container does not run; see Container."""
        import docker.errors

        try:
            with talking("the container could not be looked at"):
                try:
                    state = self._api.inspect_container(self.name)["State"]
                except docker.errors.NotFound:
                    return f"container {self.name} has ended or was removed from outside"
        except SandboxError as error:
            return str(error)
        if state.get("Paused"):
            return f"container {self.name} is paused"
        if state.get("Running"):
            return None
        killed = ", killed for its memory" if state.get("OOMKilled") else ""
        return f"container {self.name} is {state.get('Status')}, exit code {state.get('ExitCode')}{killed}"

    def remove(self) -> None:
        """End and delete it; see Container."""
        end = time.monotonic() + _REMOVAL_PATIENCE
        for number in range(_REMOVALS):
            try:
                with talking(f"container {self.name} could not be removed"):
                    return self._remove()
            except SandboxError:
                if number == _REMOVALS - 1 or time.monotonic() > end:
                    raise
            time.sleep(0.2 * (number + 1))
            if "removed from outside" in (self.fault() or ""):
                return

    def _remove(self) -> None:
        import docker.errors

        try:
            self._api.remove_container(self.name, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError as error:
            if error.status_code == 409:  # paused, or on its way out by itself
                with contextlib.suppress(docker.errors.APIError):
                    self._api.unpause(self.name)
            raise


def _frames(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (1 for stdout or 2 for stderr, data) from the engine's stream of frames with a head of eight bytes."""
    while len(head := read(8)) == 8:
        stream, left = struct.unpack(">BxxxL", head)
        while left and (data := read(min(left, _READ))):
            left -= len(data)
            yield stream, data


@contextlib.contextmanager
def _busy_told(what: str) -> Iterator[None]:
    """As `talking`, but what a later try may mend is raised as Throttled."""
    import docker.errors

    try:
        with talking(what):
            yield
    except SandboxError as error:
        status = getattr(error.__cause__, "status_code", None)
        if isinstance(error.__cause__, docker.errors.APIError) and status not in (429, 500, 502, 503, 504):
            raise
        raise Throttled(str(error)) from error.__cause__


def leftovers(run: str | None = None) -> list[Leftover]:
    """Return the containers of this kind that are there now; run: of that run alone.

    Raises SandboxUnavailable where no engine answers.
    """
    found = []
    for each in _containers(connect(), DRIVER if run is None else f"{RUN}={run}"):
        labels = each.get("Labels") or {}
        gone = is_gone(labels.get(DRIVER, ""))
        age = max(0.0, time.time() - each["Created"])
        found.append(Leftover("docker", each["Names"][0].lstrip("/"), labels.get(RUN, ""), age, gone))
    return found


def left_by(runs: Sequence[str]) -> list[Leftover]:
    """Return the containers of these runs, and those of which the driver was on this machine and is gone."""
    return [each for each in leftovers() if each.orphan or (each.run and each.run in runs)]


def reap(leftover: Leftover) -> None:
    """Remove one of the leftovers. Raises SandboxError where it does not go."""
    DockerContainer(connect(), leftover.name).remove()


def reap_backend(backend: str) -> int:
    """Remove the containers of one backend, whose driver is gone; return how many there were. See reaper.py."""
    api = connect()
    found = _containers(api, f"{BACKEND}={backend}")
    for each in found:
        with contextlib.suppress(SandboxError):
            DockerContainer(api, each["Id"]).remove()
    return len(found)


def _containers(api: Any, label: str) -> list[dict[str, Any]]:
    import docker.errors

    with talking("the containers could not be listed"):
        for pause in (0.1, 0.3, 1.0, 3.0):
            try:
                return list(api.containers(all=True, filters={"label": label}))
            except docker.errors.APIError as error:  # podman: one of them is just being removed
                if error.status_code != 500:
                    raise
            time.sleep(pause)
        return list(api.containers(all=True, filters={"label": label}))
