"""Answers that are still to come, and those that were: a request returns an id at once, its answer is fetched later.

An answer is kept until it is fetched, and for a while after, so that a fetch whose reply was lost can be tried
again; likewise a request that is sent twice gets one id and is done once. Used by the event loop's thread alone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from .engine import Outcome
from .records import Samples, Trained

KEPT_FETCHED = 512  # answers that are kept after they were fetched,
KEPT_BYTES = 64 * 2**20  # and the bytes that they may come to
KEPT_KEYS = 50_000  # requests that are recognised when they are sent again


@dataclass(frozen=True)
class _Entry:
    answer: asyncio.Future[Outcome]
    session: str


class Futures:
    """Request ids and their answers."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._fetched: OrderedDict[str, int] = OrderedDict()  # id to bytes, in the order of the last fetch
        self._bytes = 0
        self._ids: OrderedDict[Hashable, str] = OrderedDict()

    def known(self, key: Hashable) -> str | None:
        """Return the id of an earlier request with this key."""
        return self._ids.get(key)

    def open(self, key: Hashable, session: str) -> str:
        """Return a new id."""
        request_id = uuid.uuid4().hex
        self._entries[request_id] = _Entry(asyncio.get_running_loop().create_future(), session)
        self._ids[key] = request_id
        while len(self._ids) > KEPT_KEYS:
            self._ids.popitem(last=False)
        return request_id

    def finish(self, request_id: str, outcome: Outcome) -> None:
        entry = self._entries.get(request_id)
        if entry:
            entry.answer.set_result(outcome)

    async def fetch(self, request_id: str, patience: float) -> Outcome | None:
        """Return the answer, or None where there is none within `patience` seconds. Raises KeyError."""
        entry = self._entries[request_id]
        if not entry.answer.done():
            await asyncio.wait([entry.answer], timeout=patience)
        if not entry.answer.done() or entry.answer.cancelled():
            return None
        if request_id in self._entries:
            self._keep(request_id, entry.answer.result())
        return entry.answer.result()

    def drop(self, session: str) -> None:
        """Forget all requests of a session."""
        for request_id in [key for key, entry in self._entries.items() if entry.session == session]:
            self._bytes -= self._fetched.pop(request_id, 0)
            self._entries.pop(request_id).answer.cancel()

    def _keep(self, request_id: str, outcome: Outcome) -> None:
        self._bytes -= self._fetched.pop(request_id, 0)
        self._fetched[request_id] = size = _size(outcome)
        self._bytes += size
        while len(self._fetched) > KEPT_FETCHED or self._bytes > KEPT_BYTES:
            oldest, size = self._fetched.popitem(last=False)
            self._bytes -= size
            del self._entries[oldest]


def _size(outcome: Outcome) -> int:
    if isinstance(outcome, Trained):
        return sum(values.nbytes for values in outcome.logprobs)
    if isinstance(outcome, Samples):
        arrays = [outcome.prompt_logprobs, outcome.topk_ids, outcome.topk_logprobs]
        arrays += [array for s in outcome.sequences for array in (s.tokens, s.logprobs)]
        return sum(array.nbytes for array in arrays if array is not None)
    return 0
