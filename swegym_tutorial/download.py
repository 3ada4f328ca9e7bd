"""One file from the network, kept in a cache and checked at every use.

Knows addresses, bytes and checksums; what makes a file right is told by the caller. httpx follows redirects and
takes HTTP(S)_PROXY, NO_PROXY and SSL_CERT_FILE from the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRIES = 4
PAUSE = 1.0  # seconds before the second try; doubled for each further one
LONGEST_PAUSE = 60.0  # seconds: also where the server asks for more
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0  # seconds without any progress
DEADLINE = 1800.0  # seconds for one try, however steadily it drips
MOST_BYTES = 256 << 20
NOT_TRANSIENT = ("UnsupportedProtocol", "LocalProtocolError")  # httpx's errors that a second try cannot mend

Check = Callable[[bytes], object]  # raises ValueError where the bytes are not the right ones


class DownloadError(RuntimeError):
    """A file could not be had; the text says what failed, from where, and what to do."""


class _Transient(Exception):
    """A failure that may be gone in a moment."""

    def __init__(self, told: str, pause: float | None = None) -> None:
        super().__init__(told)
        self.pause = pause  # seconds that the server asks to wait


def cache_folder() -> Path:
    """Return the folder for downloaded files: SWEGYM_TUTORIAL_CACHE, else one in the user's cache folder.

    Raises DownloadError where there is no home folder to find it in.
    """
    try:
        return _cache_folder()
    except RuntimeError as error:  # no HOME, and a user whom the system does not know
        raise DownloadError(
            f"no folder for downloaded files: {error} Name one with the environment variable SWEGYM_TUTORIAL_CACHE"
        ) from error


def _cache_folder() -> Path:
    if named := os.environ.get("SWEGYM_TUTORIAL_CACHE"):
        return Path(named).expanduser().absolute()
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if given.is_absolute():  # the XDG rules have relative ones ignored
        return given / "swegym_tutorial"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "swegym_tutorial"


def cached(what: str, url: str, path: Path, check: Check) -> bytes:
    """Return the bytes of the file at `path`, fetched from `url` first where it is missing or damaged.

    what: names the file in messages. check: raises ValueError that says what is wrong with the bytes. Only bytes
    that pass it are kept; their SHA-256 stands beside the file, and every later use compares it. A file without
    one, put there by hand, is checked and gets its own. Processes that fetch at the same time do no harm.
    Raises DownloadError.
    """
    damage = None
    try:
        return _read(path, check)
    except FileNotFoundError:
        with contextlib.suppress(OSError):  # of a file that was deleted: one put there by hand gets its own
            _record(path).unlink()
    except (ValueError, OSError) as error:
        damage = str(error)
    with _Report(what) as report:
        if damage:
            report.say(f"{path} is damaged ({damage}): fetching it again")
        try:
            data = _fetch(url, report)
            check(data)
        except (DownloadError, ValueError) as error:
            raise DownloadError(_advice(what, url, path, damage, error)) from error
    try:
        _keep(path, data)
    except OSError as error:
        raise DownloadError(
            f"{what} could not be kept at {path}: {error}. Name a folder that can be written to with the "
            "environment variable SWEGYM_TUTORIAL_CACHE"
        ) from error
    return data


def _advice(what: str, url: str, path: Path, damage: str | None, error: Exception) -> str:
    failed = "the download failed" if isinstance(error, DownloadError) else "what came is not that file"
    told = f"{what} could not be had from {url}: {failed}: {error}."
    if damage:
        told += f" The file at {path} is damaged ({damage}): delete it and {_record(path).name}, and try again with a network."
    return told + f" Or get the file by hand and put it at {path}: it is checked and used from there."


def _read(path: Path, check: Check) -> bytes:
    """Return the file's bytes. Raises ValueError where they are not the ones that were accepted."""
    data = path.read_bytes()
    found, record = hashlib.sha256(data).hexdigest(), _record(path)
    if record.is_file():
        if (recorded := record.read_text(encoding="ascii", errors="replace").strip()) != found:
            raise ValueError(
                f"its SHA-256 is {found[:12]}..., not {recorded[:12]}... as recorded in {record}"
            )
        return data
    check(data)
    with contextlib.suppress(OSError):  # a folder that cannot be written to: it is checked each time
        _replace(record, f"{found}\n".encode())
    return data


def _record(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _keep(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, data)
    _replace(_record(path), f"{hashlib.sha256(data).hexdigest()}\n".encode())


def _replace(path: Path, data: bytes) -> None:
    """Write a whole file or nothing: readers see the old bytes or the new ones."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _fetch(url: str, report: _Report) -> bytes:
    """Get the bytes at an address; what may pass is tried again, longer and longer after. Raises DownloadError."""
    pause = PAUSE
    for tries_left in range(TRIES - 1, -1, -1):
        try:
            return _get(url, report)
        except _Transient as error:
            if not tries_left:
                raise DownloadError(f"{error} (tried {TRIES} times)") from error
            wait = min(LONGEST_PAUSE, error.pause or pause * random.uniform(0.75, 1.25))
            report.say(f"{error}: trying again in {wait:.0f} s")
            time.sleep(wait)
            pause *= 2
    raise AssertionError("unreachable")


def _get(url: str, report: _Report) -> bytes:
    import httpx

    timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
    headers = {"Accept-Encoding": "identity", "User-Agent": "swegym-tutorial"}
    report.say(f"downloading from {url}")
    try:
        with httpx.stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
            return _body(response, report)
    except httpx.TransportError as error:
        told = f"{type(error).__name__}: {error}"
        if type(error).__name__ in NOT_TRANSIENT:
            raise DownloadError(told) from error
        raise _Transient(told) from error
    except (httpx.HTTPError, httpx.InvalidURL, ImportError, OSError, ValueError) as error:
        # ImportError: a SOCKS proxy in the environment, and no package for it; OSError: no file at SSL_CERT_FILE
        named = os.environ.get("SSL_CERT_FILE") if isinstance(error, OSError) else None
        about = f" (SSL_CERT_FILE is {named})" if named else ""
        raise DownloadError(f"{type(error).__name__}: {error}{about}") from error


def _body(response: Any, report: _Report) -> bytes:
    status = response.status_code
    if status == 429 or status >= 500:
        asked = response.headers.get("Retry-After", "")
        told = f"the server answered {status} {response.reason_phrase}"
        raise _Transient(told, float(asked) if asked.isdigit() else None)
    if status != 200:
        raise DownloadError(f"the server answered {status} {response.reason_phrase}")
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    data, end = bytearray(), time.monotonic() + DEADLINE
    for piece in response.iter_bytes():
        data += piece
        if len(data) > MOST_BYTES:
            raise DownloadError(f"it is larger than {MOST_BYTES >> 20} MB")
        if time.monotonic() > end:
            raise DownloadError(f"it took longer than {DEADLINE:.0f} s")
        report.update(response.num_bytes_downloaded, total)
    if total is not None and response.num_bytes_downloaded != total:
        raise _Transient(f"{response.num_bytes_downloaded:,} of {total:,} bytes came")
    return bytes(data)


class _Report:
    """Tells on stderr how a download goes: a bar on a terminal, else a line at each quarter."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._bar: Any = None
        self._quarter = 0

    def __enter__(self) -> _Report:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

            self._bar = Progress(
                "{task.description}",
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                console=Console(stderr=True, emoji=False, markup=False),
                transient=True,
            )
            self._task = self._bar.add_task(self.what, total=None)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(f"{self.what}: {text}", markup=False, highlight=False, soft_wrap=True)
        else:
            print(f"{self.what}: {text}", file=sys.stderr, flush=True)

    def update(self, done: int, total: int | None) -> None:
        """So many bytes have come, of so many where that is known."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif total and (quarter := 4 * done // total) != self._quarter:
            self._quarter = quarter
            self.say(f"{done / 1e6:.1f} of {total / 1e6:.1f} MB")
