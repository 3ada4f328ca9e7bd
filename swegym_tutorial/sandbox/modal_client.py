"""Modal's client: found, its token and server looked at first, its errors told in words.

By itself the client takes a minute to say that its server cannot be reached, and some of its calls may take
for ever, so each is waited for by `within`. Everything of it is configured by MODAL_... variables or ~/.modal.toml,
which it reads when it is imported and in part at each call: MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, MODAL_PROFILE,
MODAL_ENVIRONMENT. Knows nothing of sandboxes or tasks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import SandboxError, SandboxUnavailable
from .container import Throttled
from .threads import Pending

REACH = 8.0  # seconds in which the server's name must be found and its port answer
HELLO = 30.0  # seconds in which it must accept the token
MEND = "make a token with `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"

Result = TypeVar("Result")


class Late(SandboxError):
    """Modal did not answer in time."""


def within(seconds: float, what: str, call: Callable[[], Result]) -> Result:
    """Return what the call returns. Raises Late after so many seconds, and leaves it to its thread."""
    changed = threading.Condition()
    pending = Pending(call, changed)
    pending.begin()
    with changed:
        if not changed.wait_for(lambda: pending.done, seconds):
            raise Late(f"{what}: Modal did not answer within {seconds:.0f} s")
    return pending.take()


def client() -> Any:
    """Import the package `modal`, and keep its log off the terminal unless MODAL_LOGLEVEL asks for it.

    Raises SandboxUnavailable where it is not installed.
    """
    try:
        import modal
    except ImportError as error:
        raise SandboxUnavailable(
            f'the modal sandbox needs the package modal, and it cannot be imported ({error}): pip install "modal>=1.5.5,<2"'
        ) from error
    if "MODAL_LOGLEVEL" not in os.environ:
        for name in ("modal-client", "modal-utils"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    return modal


def check(modal: Any) -> None:
    """See that there is a token, that the server can be reached, and that it accepts the token, in this order.

    Raises SandboxUnavailable with the cause and the mend, within REACH + HELLO seconds.
    """
    if not _has_token(modal):
        raise SandboxUnavailable(f"the modal sandbox needs a token of Modal, and there is none: {MEND}")
    url = modal.config.config.get("server_url")
    if reason := _why_unreachable(url):
        raise SandboxUnavailable(
            f"Modal cannot be reached at {url}: {reason}. Is the network up, and does a firewall let it through?"
        )
    try:
        with failures(modal, "asking Modal"):
            within(HELLO, "asking Modal", lambda: modal.Client.from_env().hello())
    except SandboxUnavailable:
        raise
    except SandboxError as error:
        raise SandboxUnavailable(str(error)) from error


def _has_token(modal: Any) -> bool:
    """Whether a token is configured, without any network; a container on Modal needs none."""
    if os.environ.get("MODAL_IS_REMOTE") == "1":
        return True

    def has(name: str) -> bool:
        try:
            return bool(modal.config.config.get(name))
        except KeyError:  # a setting that this release does not know
            return False

    return (has("token_id") and has("token_secret")) or has("oauth_refresh_token")


def _why_unreachable(url: str) -> str | None:
    """Connect to the server's port and hang up; None where that works or cannot be tried from here."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    if urllib.request.getproxies().keys() & {parts.scheme, "all"} and not urllib.request.proxy_bypass(
        parts.hostname
    ):
        return None
    place = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    try:
        within(REACH, "its port", lambda: socket.create_connection(place, REACH).close())
    except (OSError, SandboxError) as error:
        return str(error)
    return None


@contextlib.contextmanager
def failures(modal: Any, what: str) -> Iterator[None]:
    """Turn what the client raises into SandboxError and its kinds, in words."""
    exception = modal.exception
    try:
        yield
    except SandboxError:
        raise
    except exception.AuthError as error:
        raise SandboxUnavailable(f"{what}: Modal refuses the token ({words(error)}): {MEND}") from error
    except exception.ResourceExhaustedError as error:
        raise Throttled(f"{what}: Modal is too busy ({words(error)})") from error
    except exception.ConflictError as error:  # before InvalidError, of which it is a kind
        raise SandboxError(f"{what}: the sandbox has ended ({words(error)})") from error
    except exception.InvalidError as error:
        raise SandboxError(f"{what}: Modal takes this for a mistake: {words(error)}") from error
    except exception.NotFoundError as error:
        raise SandboxError(f"{what}: Modal knows nothing of it any more ({words(error)})") from error
    except (exception.ConnectionError, exception.ServiceError, exception.InternalError, OSError) as error:
        raise SandboxError(f"{what}: Modal does not answer as it should ({words(error)})") from error
    except Exception as error:  # grpclib's and others that it lets through
        raise SandboxError(f"{what}: {type(error).__name__}: {words(error)}") from error


def words(error: BaseException) -> str:
    """The text of an error on one line, its end where it is long; its class where it has none."""
    text = " ".join(str(error).split())
    return text[-400:] or type(error).__name__
