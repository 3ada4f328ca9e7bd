"""The control plane: apps, images, and sandboxes' lives, in the first form of the calls and in the second (V2).

What real clients of releases 1.5.5 and 1.6.4 were seen to call, and what they need in the answers.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from grpclib import GRPCError, Status
from modal_proto import api_pb2 as api
from modal_proto.api_grpc import ModalClientBase

from .apps import Apps
from .calls import Metadata, Service

if TYPE_CHECKING:
    from .server import Container, ModalServer

BUILDER = "2025.06"
TOKEN_LIFE = 1200.0  # seconds
SUCCESS = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS)


def make_jwt(life: float = TOKEN_LIFE) -> str:
    """Return an unsigned token of the form that the client reads the expiry from."""

    def part(record: dict[str, object]) -> str:
        return base64.urlsafe_b64encode(json.dumps(record).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none'})}.{part({'exp': time.time() + life, 'id': secrets.token_hex(4)})}.x"


class Control(Service, Apps):
    """Answers the calls of /modal.client.ModalClient. Each method is named like its call."""

    base = ModalClientBase

    def __init__(self, server: ModalServer) -> None:
        self.server = server
        self._by_key: dict[str, Container] = {}  # idempotency key -> what it made: a call may be sent again

    async def check(self, name: str, metadata: Metadata) -> None:
        self.server.count(name)
        given = (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret"))
        if given != self.server.token or self.server.rejecting_tokens:
            raise GRPCError(Status.UNAUTHENTICATED, "Token ID is malformed or unknown")
        if name.endswith("V2") and metadata.get("x-modal-auth-token") not in self.server.issued:
            raise GRPCError(Status.UNAUTHENTICATED, "the auth token is missing or was not issued here")

    # -- the environment, apps, images ---------------------------------------------------------------

    async def ClientHello(self, request: object, metadata: Metadata) -> api.ClientHelloResponse:
        return api.ClientHelloResponse()

    async def AuthTokenGet(self, request: api.AuthTokenGetRequest, metadata: Metadata) -> object:
        return api.AuthTokenGetResponse(token=self.server.issue())

    async def EnvironmentGetOrCreate(
        self, request: api.EnvironmentGetOrCreateRequest, metadata: Metadata
    ) -> object:
        settings = api.EnvironmentSettings(image_builder_version=BUILDER)
        about = api.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return api.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=about)

    async def AppGetOrCreate(self, request: api.AppGetOrCreateRequest, metadata: Metadata) -> object:
        apps = self.server.apps
        if request.app_name not in apps:
            if request.object_creation_type != api.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {request.app_name!r} not found")
            apps[request.app_name] = f"ap-{len(apps) + 1:022d}"
        return api.AppGetOrCreateResponse(app_id=apps[request.app_name])

    async def ImageGetOrCreate(self, request: api.ImageGetOrCreateRequest, metadata: Metadata) -> object:
        base = next((image.image_id for image in request.image.base_images), "")
        image_id = self.server.add_layer(base, tuple(request.image.dockerfile_commands))
        if image_id in self.server.built:
            about = api.ImageMetadata(image_builder_version=BUILDER)
            return api.ImageGetOrCreateResponse(image_id=image_id, result=SUCCESS, metadata=about)
        return api.ImageGetOrCreateResponse(image_id=image_id)  # without a result: the client waits for it

    async def ImageJoinStreaming(
        self, request: api.ImageJoinStreamingRequest, metadata: Metadata
    ) -> AsyncIterator[api.ImageJoinStreamingResponse]:
        await asyncio.sleep(self.server.build_seconds)
        lines = [
            api.TaskLogs(data=f"=> {command}\n", file_descriptor=api.FILE_DESCRIPTOR_STDOUT)
            for command in self.server.commands(request.image_id)
        ]
        yield api.ImageJoinStreamingResponse(task_logs=lines)
        tag = self.server.tag(request.image_id)
        if tag in self.server.missing_images:
            text = f"Failed to pull {tag}: manifest unknown"
            result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_FAILURE, exception=text)
        else:
            self.server.built.add(request.image_id)
            result = SUCCESS
        about = api.ImageMetadata(image_builder_version=BUILDER)
        yield api.ImageJoinStreamingResponse(result=result, eof=True, metadata=about)

    # -- sandboxes: the first form -------------------------------------------------------------------

    async def SandboxCreate(self, request: api.SandboxCreateRequest, metadata: Metadata) -> object:
        made = await self._create(request, metadata, v2=False)
        return api.SandboxCreateResponse(sandbox_id=made.id, metadata=_about(made))

    async def SandboxGetTaskId(self, request: api.SandboxGetTaskIdRequest, metadata: Metadata) -> object:
        found = self._find(request.sandbox_id)
        if found.result is not None:
            return api.SandboxGetTaskIdResponse(task_result=found.result)
        return api.SandboxGetTaskIdResponse(task_id=found.task_id)

    async def TaskGetCommandRouterAccess(
        self, request: api.TaskGetCommandRouterAccessRequest, metadata: Metadata
    ) -> object:
        self._running(request.task_id)
        return api.TaskGetCommandRouterAccessResponse(url=self.server.router_url, jwt=self.server.issue())

    async def SandboxWait(self, request: api.SandboxWaitRequest, metadata: Metadata) -> object:
        found = self._find(request.sandbox_id)
        if request.timeout > 0 and found.result is None:
            await asyncio.wait([found.finished], timeout=request.timeout)
        return api.SandboxWaitResponse(result=found.result, metadata=_about(found))

    async def SandboxTerminate(self, request: api.SandboxTerminateRequest, metadata: Metadata) -> object:
        found = self._find(request.sandbox_id)
        before = found.result
        self.server.finish(found, api.GenericResult.GENERIC_STATUS_TERMINATED)
        await found.box.gone()  # so that a test can look for its processes at once
        return api.SandboxTerminateResponse(existing_result=before)

    async def SandboxTagsSet(self, request: api.SandboxTagsSetRequest, metadata: Metadata) -> None:
        self._find(request.sandbox_id).tags = {tag.tag_name: tag.tag_value for tag in request.tags}

    async def SandboxTagsGet(self, request: api.SandboxTagsGetRequest, metadata: Metadata) -> object:
        return api.SandboxTagsGetResponse(tags=_tags(self._find(request.sandbox_id)))

    async def SandboxList(self, request: api.SandboxListRequest, metadata: Metadata) -> object:
        return self._list(request, v2=False)

    async def SandboxGetLogs(
        self, request: api.SandboxGetLogsRequest, metadata: Metadata
    ) -> AsyncIterator[api.TaskLogsBatch]:
        yield api.TaskLogsBatch(eof=True)

    # -- sandboxes: the second form ------------------------------------------------------------------

    async def SandboxCreateV2(self, request: api.SandboxCreateV2Request, metadata: Metadata) -> object:
        made = await self._create(request, metadata, v2=True)
        access = api.CommandRouterAccess(url=self.server.router_url, jwt=self.server.issue())
        return api.SandboxCreateV2Response(
            sandbox_id=made.id, task_id=made.task_id, metadata=_about(made), command_router_access=access
        )

    async def SandboxGetCommandRouterAccess(
        self, request: api.SandboxGetCommandRouterAccessRequest, metadata: Metadata
    ) -> object:
        self._running(self._find(request.sandbox_id).task_id if request.sandbox_id else request.task_id)
        return api.SandboxGetCommandRouterAccessResponse(url=self.server.router_url, jwt=self.server.issue())

    async def SandboxListV2(self, request: api.SandboxListRequest, metadata: Metadata) -> object:
        return self._list(request, v2=True)

    SandboxGetTaskIdV2 = SandboxGetTaskId
    SandboxWaitV2 = SandboxWait
    SandboxTerminateV2 = SandboxTerminate
    SandboxTagsSetV2 = SandboxTagsSet
    SandboxTagsGetV2 = SandboxTagsGet

    # -- what they share -----------------------------------------------------------------------------

    async def _create(
        self, request: api.SandboxCreateRequest | api.SandboxCreateV2Request, metadata: Metadata, *, v2: bool
    ) -> Container:
        self.server.throttle_one()
        key = metadata.get("x-idempotency-key", "")
        if key not in self._by_key:
            tags = {tag.tag_name: tag.tag_value for tag in request.tags}
            self._by_key[key] = await self.server.create(request.app_id, request.definition, tags, v2=v2)
        return self._by_key[key]

    def _find(self, sandbox_id: str) -> Container:
        if sandbox_id not in self.server.containers:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found")
        return self.server.containers[sandbox_id]

    def _running(self, task_id: str) -> Container:
        found = self.server.of_task(task_id)
        if found is None or found.result is not None:
            raise GRPCError(Status.FAILED_PRECONDITION, "the task has finished")
        return found

    def _list(self, request: api.SandboxListRequest, *, v2: bool) -> api.SandboxListResponse:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        found = [
            one
            for one in self.server.containers.values()
            if (v2 or not one.v2)
            and (one.result is None or request.include_finished)
            and request.app_id in ("", one.app_id)
            and wanted.items() <= one.tags.items()
            and (not request.before_timestamp or one.created < request.before_timestamp)
        ]
        found.sort(key=lambda one: -one.created)
        page = found[: self.server.page_size]
        return api.SandboxListResponse(sandboxes=[_info(one) for one in page])


def _about(one: Container) -> api.SandboxHandleMetadata:
    return api.SandboxHandleMetadata(app_id=one.app_id, result=one.result)


def _tags(one: Container) -> list[api.SandboxTag]:
    return [api.SandboxTag(tag_name=name, tag_value=value) for name, value in one.tags.items()]


def _info(one: Container) -> api.SandboxInfo:
    task = api.TaskInfo(id=one.task_id, started_at=one.created, result=one.result)
    return api.SandboxInfo(
        id=one.id,
        created_at=one.created,
        task_info=task,
        app_id=one.app_id,
        tags=_tags(one),
        metadata=_about(one),
    )
