"""Apps of functions: what `modal deploy` and `modal run` need. The functions themselves are not run, only recorded."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from modal_proto import api_pb2 as api

from .calls import Metadata

if TYPE_CHECKING:
    from .server import ModalServer


class Apps:
    """The part of the control plane that knows functions, secrets, volumes and mounted files."""

    server: ModalServer

    async def AppGetByDeploymentName(self, request: Any, metadata: Metadata) -> object:
        return api.AppGetByDeploymentNameResponse()

    async def AppCreate(self, request: api.AppCreateRequest, metadata: Metadata) -> object:
        return api.AppCreateResponse(app_id="ap-of-functions")

    async def AppHeartbeat(self, request: object, metadata: Metadata) -> None:
        return None

    async def AppPublish(self, request: api.AppPublishRequest, metadata: Metadata) -> object:
        return api.AppPublishResponse()

    async def AppClientDisconnect(self, request: object, metadata: Metadata) -> None:
        return None

    async def AppGetLogs(self, request: Any, metadata: Metadata) -> AsyncIterator[api.TaskLogsBatch]:
        yield api.TaskLogsBatch(app_done=True)

    async def MountBatchedCheckExistence(self, request: Any, metadata: Metadata) -> object:
        return api.MountBatchedCheckExistenceResponse()

    async def MountPutFile(self, request: Any, metadata: Metadata) -> object:
        return api.MountPutFileResponse(exists=True)

    async def MountGetOrCreate(self, request: api.MountGetOrCreateRequest, metadata: Metadata) -> object:
        self.server.mounted.update(file.filename for file in request.files)
        about = api.MountHandleMetadata(content_checksum_sha256_hex="0" * 64)
        return api.MountGetOrCreateResponse(mount_id="mo-1", handle_metadata=about)

    async def SecretGetOrCreate(self, request: api.SecretGetOrCreateRequest, metadata: Metadata) -> object:
        self.server.secrets.append((request.deployment_name, tuple(request.required_keys)))
        return api.SecretGetOrCreateResponse(secret_id=f"st-{request.deployment_name}")

    async def VolumeGetOrCreate(self, request: api.VolumeGetOrCreateRequest, metadata: Metadata) -> object:
        self.server.volumes[request.deployment_name] = request.version
        about = api.VolumeMetadata(version=request.version)
        return api.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name}", metadata=about)

    async def FunctionPrecreate(self, request: api.FunctionPrecreateRequest, metadata: Metadata) -> object:
        about = _about(request.function_name)
        return api.FunctionPrecreateResponse(function_id=f"fu-{request.function_name}", handle_metadata=about)

    async def FunctionCreate(self, request: api.FunctionCreateRequest, metadata: Metadata) -> object:
        function = request.function
        self.server.functions[function.function_name] = function
        data = api.FunctionData(ranked_functions=[api.FunctionData.RankedFunction(rank=0, function=function)])
        answer = api.FunctionCreateResponse(
            function_id=f"fu-{function.function_name}", handle_metadata=_about(function.function_name)
        )
        if hasattr(answer, "function_data"):  # since 1.6 the client reads the definition back
            answer.function_data.CopyFrom(data)
        return answer

    async def FunctionMap(self, request: api.FunctionMapRequest, metadata: Metadata) -> object:
        inputs = []
        for item in request.pipelined_inputs:
            self.server.called.append((request.function_id, pickle.loads(item.input.args)))
            inputs.append(api.FunctionPutInputsResponseItem(idx=item.idx, input_id=f"in-{item.idx}"))
        return api.FunctionMapResponse(
            function_call_id="fc-1", function_call_jwt="none", pipelined_inputs=inputs
        )

    async def FunctionGetOutputs(self, request: Any, metadata: Metadata) -> object:
        result = api.GenericResult(status=api.GenericResult.GENERIC_STATUS_SUCCESS, data=pickle.dumps(None))
        item = api.FunctionGetOutputsItem(result=result, idx=0, data_format=api.DATA_FORMAT_PICKLE)
        return api.FunctionGetOutputsResponse(outputs=[item], last_entry_id="1")


def _about(name: str) -> api.FunctionHandleMetadata:
    return api.FunctionHandleMetadata(
        function_name=name,
        function_type=api.Function.FUNCTION_TYPE_FUNCTION,
        supported_input_formats=[api.DATA_FORMAT_PICKLE],
        supported_output_formats=[api.DATA_FORMAT_PICKLE],
    )
