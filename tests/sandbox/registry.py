"""A container registry on the loopback: what pulls and looks for images asks for, and its usual refusals."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """Serves any image called `good/...` or `busy/...` (one layer of a few MB); others are not there, or denied.

    `busy/...` fails as often as `failures` says, first. asked: the manifests that were asked for, in order.
    """

    def __init__(self) -> None:
        self.failures = 2
        self.asked: list[str] = []
        self._lock = threading.Lock()
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("data")
            entry.size = 3 << 20
            tar.addfile(entry, io.BytesIO(os.urandom(3 << 20)))
        packed = gzip.compress(layer.getvalue(), 1)
        config = {
            "architecture": "amd64", "os": "linux", "config": {},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
        }  # fmt: skip
        written = json.dumps(config).encode()
        self.blobs = {_digest(data): data for data in (packed, written)}
        parts = {
            "config": _part("application/vnd.docker.container.image.v1+json", written),
            "layers": [_part("application/vnd.docker.image.rootfs.diff.tar.gzip", packed)],
        }
        self.manifest = json.dumps({"schemaVersion": 2, "mediaType": _TYPE, **parts}).encode()

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body for a path."""
        if path == "/v2/":
            return 200, "application/json", b"{}"
        name, _, rest = path.removeprefix("/v2/").partition("/manifests/")
        if rest:
            with self._lock:
                self.asked.append(name)
                busy = name.startswith("busy/") and self.asked.count(name) <= self.failures
            if busy:
                return 503, "application/json", _error("UNAVAILABLE", "try again later")
            if name.startswith("private/"):
                return 403, "application/json", _error("DENIED", "requested access to the resource is denied")
            if name.startswith(("good/", "busy/")):
                return 200, _TYPE, self.manifest
            return 404, "application/json", _error("MANIFEST_UNKNOWN", "manifest unknown")
        blob = self.blobs.get(path.rpartition("/")[2])
        return (200, "application/octet-stream", blob) if blob else (404, "text/plain", b"")


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _part(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "size": len(data), "digest": _digest(data)}


def _error(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


@contextlib.contextmanager
def serve(registry: Registry) -> Iterator[str]:
    """Serve it; yields its host:port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, kind, body = registry.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            if "/manifests/" in self.path and status == 200:
                self.send_header("Docker-Content-Digest", _digest(body))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
