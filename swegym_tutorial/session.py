"""One session with the training server, and what is made in it: adapters, and samplers of published policies.

A server that restarts, or that heard nothing for too long, forgets a session with all that was in it. So a sampler
belongs to a `Line`, which begins a new session where the present one is refused. Knows nothing of training.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .calls import CALL_TIMEOUT, PolicyError, Trouble, in_thread, pause, translated, wait
from .config import TrainingConfig
from .halt import Stopped
from .watch import Watch, ailment

if TYPE_CHECKING:
    import tinker

START_TIMEOUT = 600.0
ASK_TIMEOUT = 60.0
BEGINNING = 1.5  # seconds that sessions which are just beginning hold up the end
LIMITS = {
    Trouble.REFUSED: 2,
    Trouble.GONE: 5,
    Trouble.FAILED: 4,
}  # tries of one request; lost ones have no limit


class Session:
    """A session of the SDK's. Its calls wait; each takes what ends the waiting. Safe for many threads."""

    def __init__(self, config: TrainingConfig, address: tuple[str, str]) -> None:
        import tinker

        self._address = url, key = address
        bypass_proxy_for(url)
        self._config = config
        self._service = translated(
            lambda: tinker.ServiceClient(base_url=url, api_key=key), f"connecting to {url}"
        )
        self._holder: Any = None  # the session itself, which the SDK begins at the first call
        self._closed = False
        self.settled = threading.Event()  # not set while it begins
        self.settled.set()
        self._samplers: dict[tuple[str, str], concurrent.futures.Future[tinker.SamplingClient]] = {}
        self._lock = threading.Lock()

    def adapter(self, job: int, halt: threading.Event) -> tinker.TrainingClient:
        """Make a job's adapter. Raises PolicyError, Stopped."""
        config = self._config
        # The seed is asked of our own server only: the published recipe leaves it out, and servers may refuse it.
        seed = config.seed * 1000 + job if config.preset == "laptop" else None
        return self.call(
            lambda: self._service.create_lora_training_client(
                base_model=config.base_model,
                rank=config.lora_rank,
                seed=seed,
                train_unembed=config.train_unembed,
            ),
            f"creating a rank-{config.lora_rank} LoRA client of {config.base_model}",
            halt,
        )

    def sampler(self, path: str, halt: threading.Event) -> tinker.SamplingClient:
        """Return what samples from a path, or from the base model of that name; made once.

        Raises PolicyError, Stopped.
        """
        kind = "model_path" if path.startswith("tinker://") else "base_model"
        with self._lock:
            known = self._samplers.get((kind, path))
            made = known or concurrent.futures.Future()
            self._samplers[kind, path] = made
        if known is None:
            try:
                made.set_result(
                    self.call(
                        lambda: self._service.create_sampling_client(**{kind: path}),
                        f"sampling from {path}",
                        halt,
                    )
                )
            except BaseException as error:
                with self._lock:
                    del self._samplers[kind, path]
                made.set_exception(
                    PolicyError(str(error), Trouble.LOST) if isinstance(error, Stopped) else error
                )
                raise
        return _shared(made, halt, f"sampling from {path}")

    def call(self, call: Callable[[], Any], what: str, halt: threading.Event) -> Any:
        """Run one of the SDK's calls that block. Raises PolicyError, Stopped."""
        if self._holder is None:
            # The SDK would keep its thread for minutes where nothing answers, whatever we are told meanwhile.
            ails = in_thread(lambda: ailment(*self._address), halt, what, ASK_TIMEOUT)
            if ails:
                raise PolicyError(f"{what}: {ails}", Trouble.LOST)
            self.settled.clear()

        def in_session() -> Any:
            try:
                self._holder = self._service.holder
            finally:
                self.settled.set()
            if self._closed:  # while the server kept this thread waiting
                self._holder.close()
                raise Stopped(what)
            return call()

        timeout = START_TIMEOUT if self._config.preset == "laptop" else CALL_TIMEOUT
        return in_thread(in_session, halt, what, timeout)

    def close(self) -> None:
        """End the session, with the heartbeats that the SDK sends for it in the background. Waits for no server."""
        self._closed = True
        if self._holder is not None:  # asking the SDK for it would begin a session
            self._holder.close()


def settle(sessions: Iterable[Session]) -> None:
    """Give those that are just beginning a moment, for the SDK would ask a server that ends now for minutes."""
    end = time.monotonic() + BEGINNING
    for session in list(sessions):
        session.settled.wait(max(0.0, end - time.monotonic()))


def _shared(future: concurrent.futures.Future[Any], halt: threading.Event, what: str) -> Any:
    """Wait for what another thread makes, which goes on when this one is told to end."""
    while not future.done():
        if halt.is_set():
            raise Stopped(what)
        concurrent.futures.wait([future], timeout=0.2)
    return translated(future.result, what)


class Line:
    """A session that is replaced by a new one where the server refuses it. Safe for many threads."""

    def __init__(self, begin: Callable[[], Session], watch: Watch) -> None:
        self._begin, self._watch = begin, watch
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._closed = False

    def ask(self, what: str, call: Callable[[Session], Any], halt: threading.Event) -> Any:
        """Ask until the server answers: call(session) returns one of the SDK's futures, for which is waited.

        Lost connections and a server that is down are waited out; what is gone or refused is asked for in a new
        session; what the server fails at is tried a few times. Raises PolicyError, Stopped.
        """
        met: Counter[Trouble] = Counter()
        with self._watch.waiting(what) as waiting:
            while True:
                session = self.current()
                try:
                    return wait(call(session), halt, what)
                except PolicyError as error:
                    met[error.trouble] += 1
                    if met[error.trouble] >= LIMITS.get(error.trouble, math.inf):
                        raise
                    if error.trouble in (Trouble.GONE, Trouble.REFUSED):
                        self._renew(session)
                        if met.total() == 1:
                            continue
                    waiting.hear(str(error))
                if halt.wait(pause(met.total())):
                    raise Stopped(what)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()

    def current(self) -> Session:
        """Return the present session, or begin one. Raises PolicyError; Stopped after close()."""
        with self._lock:
            if self._closed:
                raise Stopped
            if self._session is None:
                self._session = self._begin()
            return self._session

    def _renew(self, refused: Session) -> None:
        """Give a session up, unless somebody else has done so already."""
        with self._lock:
            if self._session is refused:
                self._session = None
                refused.close()


def bypass_proxy_for(url: str) -> None:
    """A proxy that the environment names must not be asked for a server on this machine."""
    if any(host in url for host in ("127.0.0.1", "localhost", "[::1]")):
        for name in ("no_proxy", "NO_PROXY"):
            known = os.environ.get(name, "")
            if "127.0.0.1" not in known:
                os.environ[name] = ",".join(filter(None, [known, "127.0.0.1,localhost,::1"]))
