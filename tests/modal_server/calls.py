"""How a class with one method a call becomes a gRPC service: only the calls that it answers are known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib.const import Cardinality, Handler

Metadata = Mapping[str, str]


class Service(ABC):
    """A service whose methods are named like the calls. Calls it has no method for are UNIMPLEMENTED.

    A method takes the request (of a client's stream: the stream) and the metadata, and returns the answer or,
    for a server's stream, yields them.
    """

    base: type  # the generated class that knows every call of the service

    @abstractmethod
    async def check(self, name: str, metadata: Metadata) -> None:
        """Look at who calls. Raises GRPCError."""

    def __mapping__(self) -> dict[str, Handler]:
        known = type("Known", (self.base,), {})
        known.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        found = {}
        for path, handler in known().__mapping__().items():
            name = path.rsplit("/", 1)[1]
            if hasattr(type(self), name):
                call = self._call(name, getattr(self, name), handler.cardinality)
                found[path] = Handler(call, handler.cardinality, handler.request_type, handler.reply_type)
        return found

    def _call(self, name: str, method: Callable[..., Any], cardinality: Cardinality) -> Callable[..., Any]:
        async def call(stream: Any) -> None:
            metadata: Metadata = dict(stream.metadata or {})
            await self.check(name, metadata)
            if cardinality.client_streaming:
                await stream.send_message(await method(stream, metadata))
                return
            request = await stream.recv_message()
            if cardinality.server_streaming:
                async for answer in method(request, metadata):
                    await stream.send_message(answer)
            else:
                await stream.send_message(await method(request, metadata) or Empty())

        return call
