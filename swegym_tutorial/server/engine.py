"""The one thread that owns torch, and who is served when.

Work of one client keeps its order, and clients take turns. The versions that are sampled from take turns as well,
each with a batch that requests join and leave at any step. A slice of sampling and a piece of work alternate, so
that neither waits long for the other. Knows nothing of HTTP.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from .decoding import Decoder
from .models import Models, Version
from .records import SampleJob, Samples, Trained, UserError

KEPT_DECODERS = 4  # versions whose common beginnings are remembered while nobody samples from them
# Seconds of sampling between two pieces of work: as long as the last one. Publishing is several short ones.
SHORTEST_SLICE, LONGEST_SLICE = 0.01, 1.0

Outcome = Samples | Trained | dict[str, Any] | Exception
Done = Callable[[Outcome], None]
Work = Callable[[], Outcome]


class Engine:
    """`submit` and `sample` may be called from any thread; `done` is called in the engine's own."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._wake = threading.Condition()
        self._work: OrderedDict[str, deque[tuple[Work, Done]]] = OrderedDict()
        self._decoders: OrderedDict[Version, Decoder] = OrderedDict()  # those with requests
        self._idle: OrderedDict[Version, Decoder] = OrderedDict()
        self._slice = SHORTEST_SLICE
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Begin nothing more, and wait a moment for what is being computed."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=0.3)

    def submit(self, client: str, work: Work, done: Done) -> None:
        """Queue work behind what its client asked for before."""
        with self._wake:
            self._work.setdefault(client, deque()).append((work, done))
            self._wake.notify()

    def sample(self, version: Version, job: SampleJob, done: Done) -> None:
        with self._wake:
            if version not in self._decoders:
                known = version in self._idle
                self._decoders[version] = self._idle.pop(version) if known else self._decoder(version)
            self._decoders[version].add(job, done)
            self._wake.notify()

    def _decoder(self, version: Version) -> Decoder:
        base = version.base
        adapter = partial(self._models.adapter, version)
        return Decoder(base.sampling, adapter, base.limits, base.eos, lambda: base.tokenizer)

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._work or self._decoders)
                if self._stopping:
                    return
                decoder = next(iter(self._decoders.items()), None)
                work = self._next_work()
            if decoder:
                self._decode(*decoder)
            if work:
                self._do(*work)

    def _next_work(self) -> tuple[Work, Done] | None:
        """Take the first piece of the client whose turn it is."""
        if not self._work:
            return None
        client, queue = self._work.popitem(last=False)
        work = queue.popleft()
        if queue:
            self._work[client] = queue
        return work

    def _do(self, work: Work, done: Done) -> None:
        start = time.monotonic()
        try:
            outcome = work()
        except Exception as error:
            outcome = _logged(error)
        done(outcome)
        self._slice = min(max(time.monotonic() - start, SHORTEST_SLICE), LONGEST_SLICE)

    def _decode(self, version: Version, decoder: Decoder) -> None:
        """Sample from a version for a slice of time, and let the next one have its turn."""
        try:
            decoder.work(self._slice)
        except Exception as error:
            decoder.fail(_logged(error))
        with self._wake:
            if decoder.busy:
                self._decoders.move_to_end(version)
            else:
                self._idle[version] = self._decoders.pop(version)
                if len(self._idle) > KEPT_DECODERS:
                    self._idle.popitem(last=False)


def _logged(error: Exception) -> Exception:
    """Log an error that is the server's own and not the user's."""
    if not isinstance(error, UserError):
        traceback.print_exception(error, file=sys.stderr)
    return error
