"""A proxy before a real training server, which plays servers that lack something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Handler = Callable[[bytes], bytes | Response | None]  # a body -> another one, an answer, or None: as it is


@dataclass
class Proxy:
    """Forwards every call; `before` may change or answer a call by its path, `after` may change the answer."""

    target: str
    before: dict[str, Handler] = field(default_factory=dict)
    after: dict[str, Callable[[bytes], bytes | Response]] = field(default_factory=dict)
    calls: list[tuple[str, bytes]] = field(default_factory=list)
    url: str = ""
    asked: bytes = b""  # the body of the call whose answer `after` is given

    async def forward(self, request: Request) -> Response:
        path = request.url.path.removeprefix("/api/v1/")
        body = await request.body()
        self.calls.append((path, body))
        changed = self.before.get(path, lambda body: None)(body)
        if isinstance(changed, Response):
            return changed
        headers = {k: v for k, v in request.headers.items() if k not in ("host", "content-length")}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            answer = await client.request(
                request.method,
                f"{self.target}{request.url.path}",
                content=body if changed is None else changed,
                headers=headers | {"accept-encoding": "identity"},
            )
        self.asked = body
        content = self.after.get(path, lambda content: content)(answer.content)
        if isinstance(content, Response):
            return content
        kind = answer.headers.get("content-type", "application/json")
        return Response(content, answer.status_code, media_type=kind)


def refusing(why: str, status: int = 400) -> Handler:
    return lambda body: JSONResponse({"detail": why}, status)


@contextmanager
def proxy_of(target: str) -> Iterator[Proxy]:
    proxy = Proxy(target)
    app = Starlette(routes=[Route("/{path:path}", proxy.forward, methods=["GET", "POST"])])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    proxy.url = f"http://127.0.0.1:{port}"
    try:
        yield proxy
    finally:
        server.should_exit = True
        thread.join(20)
