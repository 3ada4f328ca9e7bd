"""The server itself: its state, its two ports, and the handle by which a test makes things go wrong."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpclib import GRPCError, Status
from grpclib.encoding.base import StatusDetailsCodecBase
from grpclib.protocol import H2Protocol
from grpclib.server import Server
from modal_proto import api_pb2 as api

from swegym_tutorial.sandbox.root import RootFolder
from swegym_tutorial.sandbox.view import make_view

from .box import Box, Process
from .control import Control, make_jwt
from .router import Router

Result = TypeVar("Result")
LINGER = 5.0  # seconds for which the output of a sandbox that ended can still be read
_V1_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Asked:
    """What one creation asked for, to be compared with the configuration."""

    sandbox_id: str
    v2: bool
    image: tuple[str, ...]  # the Dockerfile commands of all its layers
    command: tuple[str, ...]
    milli_cpu: int
    memory_mb: int
    lifetime: int
    network: str  # BLOCKED, OPEN or ALLOWLIST
    tags: Mapping[str, str]


@dataclass
class Container:
    """One sandbox, running or finished."""

    id: str
    v2: bool
    app_id: str
    task_id: str
    tags: dict[str, str]
    box: Box
    created: float
    finished: asyncio.Future[None]
    watcher: asyncio.Task[None] | None = None
    result: api.GenericResult | None = None  # None while it runs
    execs: dict[str, Process] = field(default_factory=dict)


class ModalServer:
    """A Modal on 127.0.0.1 for real clients. A context manager; its methods may be called from any thread.

    token: what it accepts.
    """

    def __init__(self, token: tuple[str, str] = ("ak-loopback", "as-loopback")) -> None:
        self.token = token
        self.apps: dict[str, str] = {}  # name -> id
        self.containers: dict[str, Container] = {}
        self.asked: list[Asked] = []
        self.execs: list[tuple[str, tuple[str, ...], int]] = []  # sandbox id, arguments, timeout
        self.functions: dict[str, api.Function] = {}  # name -> definition
        self.called: list[tuple[str, Any]] = []  # function id, arguments
        self.secrets: list[tuple[str, tuple[str, ...]]] = []  # name, the keys that it must have
        self.volumes: dict[str, int] = {}  # name -> which of the two kinds
        self.mounted: set[str] = set()  # files that functions see
        self.calls: Counter[str] = Counter()  # how often each call came
        self.contents: dict[
            str, Path
        ] = {}  # image tag -> a folder whose content lies in the root of its containers
        self.built: set[str] = set()  # ids of images that are ready
        self.missing_images: set[str] = set()  # tags that cannot be pulled
        self.rejecting_tokens = False
        self.create_seconds = 0.0  # how long a creation takes
        self.holding = False  # whether creations wait until it is False
        self.build_seconds = 0.0  # how long an image takes
        self.page_size = 100  # sandboxes in one answer to a list
        self.creating = self.most_creating = 0  # creations under way now, and at most so far
        self.issued: set[str] = set()
        self._throttled, self._retry_after = 0, None
        self._hanging = 0
        self._layers: dict[str, tuple[str, tuple[str, ...]]] = {}  # image id -> base image id, commands
        self._lock = threading.Lock()
        self._control, self._router = Control(self), Router(self)

    # -- what a test does ----------------------------------------------------------------------------

    def __enter__(self) -> ModalServer:
        self._folder = RootFolder()
        try:
            self._view = make_view(self._folder.path)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="modal-server", daemon=True)
            self._thread.start()
            self._control_server, port = self._do(self._listen(self._control, 0))
            self.url = f"http://127.0.0.1:{port}"
            self._router_server, self._router_port = self._do(self._listen(self._router, 0))
            self.router_url = f"http://127.0.0.1:{self._router_port}"
        except BaseException:
            self._folder.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.close()

    @property
    def settings(self) -> dict[str, str]:
        """The environment variables that lead a client here."""
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": self.token[0],
            "MODAL_TOKEN_SECRET": self.token[1],
            "MODAL_CONFIG_PATH": str(self._folder.path / "no-such.toml"),
        }

    @property
    def running(self) -> list[str]:
        """The ids of the sandboxes that have not ended."""
        return [one.id for one in list(self.containers.values()) if one.result is None]

    def throttle(self, times: int, retry_after: float | None = None) -> None:
        """Refuse the next creations; retry_after: tell the client to try again by itself after so many seconds."""
        self._throttled, self._retry_after = times, retry_after  # type: ignore[assignment]

    def hang_execs(self, times: int = 1) -> None:
        """Answer nothing more about the next commands once they are started."""
        self._hanging = times

    def kill(self, sandbox_id: str) -> None:
        """End a sandbox as a worker that goes away does."""
        self._end(sandbox_id, api.GenericResult.GENERIC_STATUS_TERMINATED)

    def end_lifetime(self, sandbox_id: str) -> None:
        self._end(sandbox_id, api.GenericResult.GENERIC_STATUS_TIMEOUT)

    def drop_router(self) -> None:
        """Close the worker's port and its connections."""
        self._do(self._stop(self._router_server))

    def restore_router(self) -> None:
        self._router_server, _ = self._do(self._listen(self._router, self._router_port))

    def _end(self, sandbox_id: str, status: Any) -> None:
        async def end() -> None:
            self.finish(self.containers[sandbox_id], status)
            await self.containers[sandbox_id].box.gone()

        self._do(end())

    def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    # -- what the services do, in the loop -----------------------------------------------------------

    async def _listen(self, service: Control | Router, port: int) -> tuple[_Server, int]:
        server = _Server([service], status_details_codec=_Details())
        # asyncio turns Nagle's waiting off only where the protocol is said: it costs 40 ms a message
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            taken = listening.getsockname()[1]
            await server.start(sock=listening.dup())
        return server, taken

    async def _stop(self, server: _Server) -> None:
        server.close()
        server.cut()
        await server.wait_closed()

    async def _close(self) -> None:
        for one in self.containers.values():
            self.finish(one, api.GenericResult.GENERIC_STATUS_TERMINATED)
            assert one.watcher is not None
            await one.watcher
            one.box.close()
        for server in (self._control_server, self._router_server):
            await self._stop(server)

    def count(self, name: str) -> None:
        self.calls[name] += 1

    def executed(self, sandbox_id: str, arguments: tuple[str, ...], timeout: int) -> None:
        self.execs.append((sandbox_id, arguments, timeout))

    def issue(self) -> str:
        """Make a token that the services accept."""
        token = make_jwt()
        self.issued.add(token)
        return token

    def add_layer(self, base: str, commands: tuple[str, ...]) -> str:
        """Return the id of an image: the same for the same commands on the same base."""
        with self._lock:
            for image_id, layer in self._layers.items():
                if layer == (base, commands):
                    return image_id
            image_id = f"im-{len(self._layers) + 1:022d}"
            self._layers[image_id] = (base, commands)
            return image_id

    def commands(self, image_id: str) -> tuple[str, ...]:
        """Return the Dockerfile commands of an image, its base's first."""
        base, commands = self._layers[image_id]
        return (*(self.commands(base) if base else ()), *commands)

    def tag(self, image_id: str) -> str:
        """Return the tag that an image begins with."""
        return next((c.split()[1] for c in self.commands(image_id) if c.upper().startswith("FROM ")), "")

    def throttle_one(self) -> None:
        """Refuse a creation, where that was asked for."""
        if self._throttled > 0:
            self._throttled -= 1
            details = None if self._retry_after is None else [_policy(self._retry_after)]
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "Sandbox creation rate limit exceeded", details)

    def take_hang(self) -> bool:
        self._hanging -= 1
        return self._hanging >= 0

    async def create(
        self, app_id: str, definition: api.Sandbox, tags: dict[str, str], *, v2: bool
    ) -> Container:
        self.creating += 1
        self.most_creating = max(self.most_creating, self.creating)
        try:
            await asyncio.sleep(self.create_seconds)
            while self.holding:
                await asyncio.sleep(0.02)
            return await self._create(app_id, definition, tags, v2=v2)
        finally:
            self.creating -= 1

    async def _create(
        self, app_id: str, definition: api.Sandbox, tags: dict[str, str], *, v2: bool
    ) -> Container:
        loop = asyncio.get_running_loop()
        name = "".join(secrets.choice(_V1_LETTERS) for _ in range(26 if v2 else 22))
        folder = self._folder.path / name
        folder.mkdir()
        made = Container(
            id=f"sb-{name}",
            v2=v2,
            app_id=app_id,
            task_id=f"ta-{name}{'V' if v2 else ''}",
            tags=tags,
            box=Box(folder, self._view),
            created=time.time(),
            finished=loop.create_future(),
        )
        content = self.contents.get(self.tag(definition.image_id))
        await made.box.start(definition.entrypoint_args, [content] if content else [])
        self.containers[made.id] = made
        self.asked.append(self._asked(made, definition))
        loop.call_later(
            definition.timeout_secs or 300, self.finish, made, api.GenericResult.GENERIC_STATUS_TIMEOUT
        )
        made.watcher = loop.create_task(self._watch(made))
        return made

    def _asked(self, made: Container, definition: api.Sandbox) -> Asked:
        network = definition.network_access.network_access_type
        return Asked(
            sandbox_id=made.id,
            v2=made.v2,
            image=self.commands(definition.image_id),
            command=tuple(definition.entrypoint_args),
            milli_cpu=definition.resources.milli_cpu,
            memory_mb=definition.resources.memory_mb,
            lifetime=definition.timeout_secs,
            network=api.NetworkAccess.NetworkAccessType.Name(network),
            tags=dict(made.tags),
        )

    async def _watch(self, one: Container) -> None:
        """Finish a sandbox whose main command ends, and delete its files."""
        code = await one.box.wait()
        self.finish(one, api.GenericResult.GENERIC_STATUS_SUCCESS, code)
        for process in one.execs.values():
            await process.wait()
        await asyncio.to_thread(one.box.remove)
        asyncio.get_running_loop().call_later(LINGER, one.box.close)

    def finish(self, one: Container, status: Any, exitcode: int = 0) -> None:
        """End a sandbox, unless it has ended."""
        if one.result is None:
            one.result = api.GenericResult(status=status, exitcode=exitcode)
            one.finished.set_result(None)
            one.box.kill()

    def of_task(self, task_id: str) -> Container | None:
        return next((one for one in self.containers.values() if one.task_id == task_id), None)


class _Server(Server):
    """grpclib's server, which closes its port alone, with a way to cut its connections too."""

    def _protocol_factory(self) -> H2Protocol:
        protocol = super()._protocol_factory()
        self.__dict__.setdefault("_protocols", []).append(protocol)
        return protocol

    def cut(self) -> None:
        for protocol in self.__dict__.pop("_protocols", []):
            transport = getattr(protocol.connection, "_transport", None)  # gone with the connection
            if transport is not None:
                transport.abort()


def _policy(seconds: float) -> api.RPCRetryPolicy:
    return api.RPCRetryPolicy(retry_after_secs=seconds)


class _Details(StatusDetailsCodecBase):
    """Puts messages beside a status as Modal's client reads them."""

    def encode(self, status: Status, message: str | None, details: Any) -> bytes:
        record = api.RPCStatus(code=status.value, message=message or "")
        for detail in details or ():
            record.details.add().Pack(detail, type_url_prefix="type.modal.com/")
        return record.SerializeToString()

    def decode(self, status: Status, message: str | None, data: bytes) -> Any:
        return None
