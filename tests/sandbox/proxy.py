"""A way to the container engine that breaks when a test says so."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

Edit = Callable[[Iterator[bytes]], Iterator[bytes]]
_OUTPUT = re.compile(rb"docker\.(?:raw|multiplexed)-stream.*?\r\n\r\n", re.DOTALL)
_LAST = re.compile(rb"\n(?:exit \d+|late|read) \S+\n\Z")  # the supervisor's word on stderr


class Proxy:
    """Passes what comes to its socket on to another one, and back."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self._target = path, target
        self.closed = False  # whether it hangs up on who comes
        # What is passed on of a program's output, after which the connection is cut; None: not even the answer's head.
        self.output: Edit | None = iter
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
                try:
                    other.connect(self._target)
                except OSError:  # the engine is too busy for this one
                    link.close()
                    other.close()
                    continue
                self._links += [link, other]
                for way in ((link, other, self._received), (other, link, self._answers)):
                    threading.Thread(target=self._pass, args=way, daemon=True).start()

    def _pass(
        self,
        source: socket.socket,
        target: socket.socket,
        received: Callable[[socket.socket], Iterator[bytes]],
    ) -> None:
        with contextlib.suppress(OSError):
            for data in received(source):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _received(self, source: socket.socket) -> Iterator[bytes]:
        while data := source.recv(1 << 16):
            self._passing.wait()
            yield data

    def _answers(self, source: socket.socket) -> Iterator[bytes]:
        received, before = self._received(source), b""  # before: an answer's head may come in parts
        for data in received:
            if not (head := _OUTPUT.search(before + data)):
                yield data
                before = (before + data)[-4096:]
                continue
            if self.output is not None:
                begin = head.end() - len(before)
                yield data[:begin]
                yield from self.output(itertools.chain([data[begin:]], received))
            with contextlib.suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)

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


def cut_after(size: int) -> Edit | None:
    """Cut a program's connection after so many bytes of its output, with -1 before the answer's head."""

    def output(received: Iterator[bytes]) -> Iterator[bytes]:
        left = size
        for data in received:
            yield data[:left]
            left -= len(data)
            if left <= 0:
                return

    return None if size < 0 else output


def lose_after(size: int) -> Edit:
    """Cut a program's connection after its last word on stderr, and lose all but so many bytes of its stdout.

    The engine sends the two streams in no order of their own, so this may be all that came.
    """

    def output(received: Iterator[bytes]) -> Iterator[bytes]:
        left, waiting, words, ended = size, b"", b"", False
        for data in received:
            waiting += data
            while len(waiting) >= 8 and len(waiting) >= (end := 8 + int.from_bytes(waiting[4:8], "big")):
                head, frame, waiting = waiting[:4], waiting[8:end], waiting[end:]
                if head[0] == 1:
                    frame = frame[:left]
                    left -= len(frame)
                else:
                    words += frame
                    ended = ended or _LAST.search(words) is not None
                yield head + len(frame).to_bytes(4, "big") + frame
                if ended and not left:
                    return

    return output


@contextlib.contextmanager
def proxied(folder: Path, target: str) -> Iterator[Proxy]:
    proxy = Proxy(folder / "proxy.sock", target)
    try:
        yield proxy
    finally:
        proxy.close()
