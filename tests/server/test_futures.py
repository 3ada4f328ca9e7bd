"""Answers that are waited for, kept, and let go."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from swegym_tutorial.server import futures
from swegym_tutorial.server.futures import Futures
from swegym_tutorial.server.records import SampledSequence, Samples


def answer_of(size: int = 1) -> Samples:
    return Samples([SampledSequence(np.zeros(size, np.int32), np.zeros(size, np.float32), True)])


async def wait_and_finish() -> None:
    waiting = Futures()
    request = waiting.open(("m", 1), "s")
    assert waiting.known(("m", 1)) == request and waiting.known(("m", 2)) is None
    assert await waiting.fetch(request, 0.01) is None
    fetching = asyncio.create_task(waiting.fetch(request, 10))
    await asyncio.sleep(0)
    answer = answer_of()
    waiting.finish(request, answer)
    assert await fetching is answer
    with pytest.raises(KeyError):
        await waiting.fetch("other", 0)
    late = asyncio.create_task(waiting.fetch(waiting.open(("m", 2), "s"), 10))
    await asyncio.sleep(0)
    waiting.drop("s")
    assert await late is None
    with pytest.raises(KeyError):
        await waiting.fetch(request, 0)
    waiting.finish(request, answer)  # an answer that comes too late for its session is let go


def test_a_fetch_waits_and_a_session_that_ends_takes_its_requests_along() -> None:
    asyncio.run(wait_and_finish())


async def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "KEPT_FETCHED", 3)
    monkeypatch.setattr(futures, "KEPT_BYTES", 8 * 100)
    waiting = Futures()
    requests = [waiting.open(n, "s") for n in range(6)]
    for request in requests:
        waiting.finish(request, answer_of())
    for request in requests[:5]:
        await waiting.fetch(request, 0)
    for request in requests[:2]:
        with pytest.raises(KeyError):
            await waiting.fetch(request, 0)
    for request in requests[2:]:  # what wasn't fetched is kept as well
        assert isinstance(await waiting.fetch(request, 0), Samples)
    large = waiting.open("large", "s")
    waiting.finish(large, answer_of(99))
    await waiting.fetch(large, 0)
    assert isinstance(await waiting.fetch(large, 0), Samples)
    with pytest.raises(KeyError):
        await waiting.fetch(requests[4], 0)


def test_what_was_fetched_is_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(keep(monkeypatch))
