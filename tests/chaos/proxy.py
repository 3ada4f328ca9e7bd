"""An HTTP proxy between the SDK and a training server that breaks calls at random.

A raw asyncio server, because the worst faults of a network lie below HTTP: a connection that ends without an answer.
At most one fault a call; which call meets which is decided by the seed and the calls' order.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import httpx

STATUSES = (500, 502, 503, 429, 408)
DELAY = (0.1, 3.0)  # seconds that a delayed call waits before it is forwarded
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "accept-encoding"}
LIMIT = 1 << 20  # bytes of a request's head


@dataclass(frozen=True)
class Rates:
    """The share of calls that meet each fault, and how outages come."""

    drop_before: float = 0.0  # the connection is cut, and the server never hears of the call
    drop_after: float = 0.0  # the server does what was asked, and the answer is lost
    delay: float = 0.0
    duplicate: float = 0.0  # the server gets the call twice, at once
    error_before: float = 0.0  # a status of STATUSES instead of the call
    error_after: float = 0.0  # a status of STATUSES instead of the answer
    outage_every: float = 0.0  # seconds between outages on average; 0: none
    outage_seconds: float = 5.0  # at most so long: every call is cut, or answered 503

    @classmethod
    def of_each(cls, share: float, **others: float) -> Rates:
        """The same share for every fault of a single call, but for what is named."""
        return cls(**{**dict.fromkeys(KINDS, share), **others})


KINDS = tuple(field.name for field in fields(Rates) if not field.name.startswith("outage"))


@dataclass(frozen=True)
class Request:
    """One call as it came in."""

    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes


class Cut(Exception):
    """The connection ends here, without an answer."""


class ChaosProxy:
    """Listens on a port of its own on 127.0.0.1 and forwards to `target`, which may change while it runs."""

    def __init__(self, target: str, rates: Rates | None = None, seed: int = 0) -> None:
        self.target = target  # the server's URL
        self.rates = rates or Rates()
        self.injected: Counter[str] = Counter()  # faults by kind
        self.calls: Counter[str] = Counter()  # by path
        self.url = ""
        self._random = random.Random(seed)
        self._outage: str | None = None  # cut or 503 while there is one
        self._connections: set[asyncio.StreamWriter] = set()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(20):
            raise RuntimeError("the proxy did not start within 20 s")

    def close(self) -> None:
        """Cut every connection and end. Safe to call twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(20)

    # -- Its thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50, keepalive_expiry=30)
        # Every call must reach the server once: a pooled connection that the server has closed may not make it two.
        transport = httpx.AsyncHTTPTransport(limits=limits, retries=0)
        async with httpx.AsyncClient(transport=transport, timeout=120, trust_env=False) as self._client:
            server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=LIMIT)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            outages = asyncio.create_task(self._outages())
            self._ready.set()
            await self._over.wait()
            server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(outages, *others, return_exceptions=True)

    async def _outages(self) -> None:
        while True:
            if not self.rates.outage_every:
                await asyncio.sleep(0.2)
                continue
            await asyncio.sleep(self._random.expovariate(1 / self.rates.outage_every))
            self._outage = self._random.choice(("cut", "503"))
            self.injected["outage"] += 1
            if self._outage == "cut":
                for writer in list(self._connections):
                    writer.transport.abort()
            await asyncio.sleep(self._random.uniform(0.2, 1) * self.rates.outage_seconds)
            self._outage = None

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                status, headers, content = await self._answer(request)
                writer.write(_head(status, headers, len(content)) + content)
                await writer.drain()
        except (Cut, ConnectionError, asyncio.IncompleteReadError):
            writer.transport.abort()  # a reset: nothing that was buffered is sent
        except asyncio.CancelledError:  # the proxy closes; asyncio would print it for each connection
            writer.transport.abort()
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _answer(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        self.calls[request.path] += 1
        if self._outage == "cut":
            raise Cut
        if self._outage == "503":
            return _error(503)
        fault = self._choose()
        if fault is not None:
            self.injected[fault] += 1
        if fault == "drop_before":
            raise Cut
        if fault == "error_before":
            return _error(self._random.choice(STATUSES))
        if fault == "delay":
            await asyncio.sleep(self._random.uniform(*DELAY))
        if fault == "duplicate":
            answers = await asyncio.gather(self._forward(request), self._forward(request))
            answer = self._random.choice(answers)
        else:
            answer = await self._forward(request)
        if fault == "drop_after":
            raise Cut
        if fault == "error_after":
            return _error(self._random.choice(STATUSES))
        return answer

    def _choose(self) -> str | None:
        at = self._random.random()
        for kind in KINDS:
            at -= getattr(self.rates, kind)
            if at < 0:
                return kind
        return None

    async def _forward(self, request: Request) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = [(name, value) for name, value in request.headers if name.lower() not in HOP]
        headers.append(("accept-encoding", "identity"))
        try:
            answer = await self._client.request(
                request.method, f"{self.target}{request.path}", content=request.body, headers=headers
            )
        except httpx.TransportError as error:  # the server is gone, as the client would see it without us
            raise Cut from error
        kept = [(name, value) for name, value in answer.headers.items() if name not in HOP]
        return answer.status_code, kept, answer.content


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """Return the next request of a connection, None where it has ended."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ", 2)
    headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    named = {name.lower(): value for name, value in headers}
    if "chunked" in named.get("transfer-encoding", "").lower():
        body = await _read_chunks(reader)
    else:
        body = await reader.readexactly(int(named.get("content-length", 0)))
    return Request(method, path, headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():  # trailers
        pass
    return body


def _head(status: int, headers: list[tuple[str, str]], length: int) -> bytes:
    lines = [f"HTTP/1.1 {status} .", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode("latin-1")


def _error(status: int) -> tuple[int, list[tuple[str, str]], bytes]:
    content = b'{"detail": "trouble on purpose"}'
    return status, [("content-type", "application/json")], content


@contextmanager
def chaos_proxy(target: str, rates: Rates | None = None, seed: int = 0) -> Iterator[ChaosProxy]:
    """Run a proxy before the server at a URL while the block runs."""
    proxy = ChaosProxy(target, rates, seed)
    proxy.start()
    with contextlib.closing(proxy):
        yield proxy
