"""What every call shares: the key, the body's limits and encodings, and how errors are told.

Knows nothing of what the calls mean.
"""

from __future__ import annotations

import hmac
import io
from typing import Any

import orjson
import zstandard
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .records import UserError
from .wire import Fields

BODY_LIMIT = 64 * 2**20  # bytes of a request, before and after decompression


class KeyCheck:
    """Lets only requests with the right key through."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"x-api-key", b"")
            if not hmac.compare_digest(given, self._key):
                told = "this server has another API key: set TINKER_API_KEY to the one that it printed at its start"
                await reply({"detail": told}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_body(request: Request) -> bytes:
    """Return the request's body, decompressed. Raises UserError (413) for one that is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_LIMIT:
            raise UserError(
                f"the request is larger than {BODY_LIMIT // 2**20} MiB: send fewer data at once", 413
            )
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "identity":
        return bytes(body)
    if encoding != "zstd":
        raise UserError(f"this server takes zstd or no Content-Encoding, not {encoding!r}", 415)
    try:
        plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read(BODY_LIMIT + 1)
    except zstandard.ZstdError as error:
        raise UserError(f"the request's body is not valid zstd: {error}") from error
    if len(plain) > BODY_LIMIT:
        raise UserError(
            f"the request unpacks to more than {BODY_LIMIT // 2**20} MiB: send fewer data at once", 413
        )
    return plain


async def read_fields(request: Request) -> Fields:
    return Fields.parse(await read_body(request))


def reply(answer: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(answer), status, media_type="application/json")


async def user_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    return reply({"detail": str(error)}, error.status)


async def http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    told = f"{error.detail}: {request.method} {request.url.path}"
    if error.status_code == 404:
        told = f"this server has no {request.method} {request.url.path}"
    return reply({"detail": told}, error.status_code)
