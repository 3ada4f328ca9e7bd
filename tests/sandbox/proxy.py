"""A way to the container engine that breaks when a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path


class Proxy:
    """Passes what comes to its socket on to another one, and back."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self._target = path, target
        self.closed = False  # whether it hangs up on who comes
        self._passing = threading.Event()
        self._passing.set()
        self._links: list[socket.socket] = []
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(256)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                link = self._server.accept()[0]
                if self.closed:
                    link.close()
                    continue
                other = socket.socket(socket.AF_UNIX)
                other.connect(self._target)
                self._links += [link, other]
                for pair in ((link, other), (other, link)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passing.wait()
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Break what is under way, as an engine does that is started anew."""
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def stall(self, stalled: bool = True) -> None:
        """Pass nothing on, and hang up on nobody, until it is told otherwise."""
        self._passing.clear() if stalled else self._passing.set()

    def close(self) -> None:
        self.stall(False)
        self._server.close()
        self.cut()


@contextlib.contextmanager
def proxied(folder: Path, target: str) -> Iterator[Proxy]:
    proxy = Proxy(folder / "proxy.sock", target)
    try:
        yield proxy
    finally:
        proxy.close()
