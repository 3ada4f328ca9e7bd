"""The command router: what runs in a sandbox. On Modal it answers on the worker, so it has a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from grpclib import GRPCError, Status
from modal_proto import task_command_router_pb2 as router
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from .box import Process
from .calls import Metadata, Service

if TYPE_CHECKING:
    from .server import Container, ModalServer

CHUNK = 1 << 20  # bytes of output in one message


class Router(Service):
    """Answers the calls of /modal.task_command_router.TaskCommandRouter. Each method is named like its call."""

    base = TaskCommandRouterBase

    def __init__(self, server: ModalServer) -> None:
        self.server = server
        self._hung: set[str] = set()  # execs that are started and of which nothing is ever heard

    async def check(self, name: str, metadata: Metadata) -> None:
        self.server.count(name)
        if metadata.get("authorization", "").removeprefix("Bearer ") not in self.server.issued:
            raise GRPCError(Status.UNAUTHENTICATED, "the token is missing or was not issued here")

    async def TaskExecStart(self, request: router.TaskExecStartRequest, metadata: Metadata) -> object:
        container = self._container(request.task_id)
        if request.exec_id not in container.execs:  # the key by which a call that is sent again is known
            if self.server.take_hang():
                self._hung.add(request.exec_id)
            process = container.box.run(list(request.command_args), request.workdir, _environment(request))
            container.execs[request.exec_id] = process
            if request.HasField("timeout_secs"):
                asyncio.get_running_loop().call_later(request.timeout_secs, process.kill)
            self.server.executed(container.id, tuple(request.command_args), request.timeout_secs)
        return router.TaskExecStartResponse()

    async def TaskExecStdioRead(
        self, request: router.TaskExecStdioReadRequest, metadata: Metadata
    ) -> AsyncIterator[router.TaskExecStdioReadResponse]:
        process = await self._process(request)
        error = request.file_descriptor == router.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDERR
        offset = request.offset
        while data := await process.read(2 if error else 1, offset, CHUNK):  # never an empty message
            offset += len(data)
            yield router.TaskExecStdioReadResponse(data=data)

    async def TaskExecWait(self, request: router.TaskExecWaitRequest, metadata: Metadata) -> object:
        process = await self._process(request)
        await process.wait()
        return router.TaskExecWaitResponse(**_ended(process))

    async def TaskExecPoll(self, request: router.TaskExecPollRequest, metadata: Metadata) -> object:
        return router.TaskExecPollResponse(**_ended(await self._process(request)))

    async def TaskExecStdinWrite(
        self, request: router.TaskExecStdinWriteRequest, metadata: Metadata
    ) -> object:
        process = await self._process(request)
        await process.write(request.data, request.offset, close=request.eof)
        return router.TaskExecStdinWriteResponse()

    async def TaskExecStdinStatus(
        self, request: router.TaskExecStdinStatusRequest, metadata: Metadata
    ) -> object:
        process = await self._process(request)
        return router.TaskExecStdinStatusResponse(
            num_bytes_written=process.stdin_written, closed=process.stdin_closed
        )

    async def TaskExecStdinWriteStream(self, stream: Any, metadata: Metadata) -> object:
        start = (await stream.recv_message()).start
        process = await self._process(start)
        offset = start.offset
        while (message := await stream.recv_message()) is not None:
            if message.WhichOneof("payload") == "end":
                await process.write(b"", offset, close=True)
                break
            await process.write(message.data, offset)
            offset += len(message.data)
        return router.TaskExecStdinWriteStreamResponse()

    def _container(self, task_id: str) -> Container:
        found = self.server.of_task(task_id)
        if found is None or found.result is not None:
            raise GRPCError(Status.NOT_FOUND, "the task is not running on this worker")
        return found

    async def _process(self, request: Any) -> Process:
        container = self.server.of_task(request.task_id)
        if container is None or request.exec_id not in container.execs:
            raise GRPCError(Status.NOT_FOUND, f"exec {request.exec_id} not found")
        if request.exec_id in self._hung:
            await asyncio.sleep(3600)
        return container.execs[request.exec_id]


def _environment(request: router.TaskExecStartRequest) -> dict[str, str]:
    """The variables of an exec: a field of their own in 1.5.5, among the secrets in 1.6.4."""
    found = dict(request.env)
    for source in getattr(request, "secret_sources", ()):
        found.update(source.env.contents)
    return found


def _ended(process: Process) -> dict[str, int]:
    if process.status is None:
        return {}
    return {"code": process.status} if process.status >= 0 else {"signal": -process.status}
