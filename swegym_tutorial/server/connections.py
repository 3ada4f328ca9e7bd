"""What a client says before and beside its work: configuration, capabilities, sessions, heartbeats.

Knows nothing of training or sampling.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from .models import Models
from .records import UserError
from .sessions import Sessions
from .transport import read_body, read_fields, reply

# Chunks of one call come in order, so that a gradient is summed the same way every time.
CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False}


class Connections:
    """The endpoints. Each takes a request and returns its answer."""

    def __init__(self, models: Models, sessions: Sessions) -> None:
        self._models = models
        self._sessions = sessions

    async def healthz(self, request: Request) -> Response:
        return reply({"status": "ok"})

    async def client_config(self, request: Request) -> Response:
        return reply(CLIENT_CONFIG)

    async def client_dynamic_config(self, request: Request) -> Response:
        return reply({})

    async def get_server_capabilities(self, request: Request) -> Response:
        models = [
            {
                "model_name": name,
                "max_context_length": base.limits.context,
                "trainable": True,
                "sampleable": True,
            }
            for name, base in self._models.bases.items()
        ]
        return reply({"supported_models": models})

    async def create_session(self, request: Request) -> Response:
        return reply({"type": "create_session", "session_id": self._sessions.open().id})

    async def session_heartbeat(self, request: Request) -> Response:
        fields = await read_fields(request)
        try:
            self._sessions.hear(fields.text("session_id"))
        except UserError as error:
            raise UserError(str(error), 410) from error
        return reply({"type": "session_heartbeat"})

    async def telemetry(self, request: Request) -> Response:
        await read_body(request)
        return reply({"status": "accepted"})
