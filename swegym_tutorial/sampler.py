"""What is asked of one published policy: samples, and log-probabilities as the reference of the KL term.

A server's trouble is waited out, and what it has forgotten is asked for in a new session; see session.py. Knows
nothing of training.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .calls import PolicyError, when_done
from .rollout import RecordingLost, Rollout, Sample
from .session import Line, Session
from .token_ids import model_input, shared


class PolicySampler:
    """One published policy; or the base model, as the reference. Safe for many threads."""

    def __init__(
        self, line: Line, path: str, stop_tokens: list[int], temperature: float, halt: threading.Event
    ) -> None:
        """halt: ends every call that waits."""
        self.path = path  # where the server keeps it; the base model's name for the base
        self._line = line
        self._stop_tokens = stop_tokens
        self._temperature = temperature
        self._halt = halt

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Sample one continuation; a server that is down is waited for.

        Raises PolicyError where the server fails, refuses, or sends no finite log-probability; Stopped.
        """
        from tinker import types

        asked = model_input(prompt)
        parameters = types.SamplingParams(
            max_tokens=max_tokens, temperature=self._temperature, seed=seed, stop=self._stop_tokens
        )

        def call(session: Session) -> Any:
            client = session.sampler(self.path, self._halt)
            return client.sample(asked, 1, parameters)

        sequence = self._line.ask("sampling", call, self._halt).sequences[0]
        tokens = list(sequence.tokens)
        logprobs = list(sequence.logprobs or [])
        if not tokens or len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
            raise PolicyError("sampling: the server did not send a finite log-probability for each token")
        return Sample(tokens, logprobs, stopped=sequence.stop_reason == "stop")

    def logprobs(self, tokens: np.ndarray | Rollout) -> Reference:
        """Ask for every token's log-probability under this policy; the answer's `result` waits for it. As `reference`.

        Raises Stopped.
        """
        made = self.reference(tokens)
        made.begin()
        return made

    def reference(
        self, tokens: np.ndarray | Rollout, settled: Callable[[], None] = lambda: None
    ) -> Reference:
        """Return what asks for every token's log-probability under this policy; it has asked nothing yet.

        tokens: integers of shape (tokens,); or an attempt, of which only the sampled tokens' are kept.
        settled: called once, from any thread, when the answer is there, or can't be had as the attempt is lost.
        """
        return Reference(self._line, self.path, tokens, self._halt, settled)


class Reference:
    """Log-probabilities that are asked for again where the answer is lost. Safe for many threads."""

    def __init__(
        self,
        line: Line,
        path: str,
        tokens: np.ndarray | Rollout,
        halt: threading.Event,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self._line, self._path, self._tokens, self._halt = line, path, tokens, halt
        self._settled: Callable[[], None] | None = settled
        self._lock = threading.Lock()
        self._bits: np.ndarray | None = None  # the attempt's mask, eight tokens a byte
        self._values: np.ndarray | None = None  # where it is set, or all of them
        self._first: Any = None

    def begin(self) -> None:
        """Ask now, unless it was asked already; where that fails, `result` asks again. Raises Stopped.

        It may wait for a server that is down; `result` does not wait for it meanwhile, but asks itself.
        """
        with contextlib.suppress(PolicyError, RecordingLost):
            session = self._line.current()
            session.sampler(self._path, self._halt)  # waits without the lock; then it is known
            if not self._lock.acquire(blocking=False):  # `result` asks
                return
            try:
                if self._first is not None or self._values is not None:
                    return
                self._first = first = self._ask(session)
            finally:
                self._lock.release()
            when_done(first, self._compact)

    def result(self) -> np.ndarray:
        """Return float32 of shape (tokens,), 0 for the first, which has none; of an attempt, 0 for all not sampled.

        Raises PolicyError; RecordingLost where an attempt must be read to be asked about, and cannot; Stopped.
        """
        with self._lock:
            if self._values is None:
                try:
                    self._keep(self._line.ask("reference log-probabilities", self._answer, self._halt))
                except RecordingLost:
                    self._settle()
                    raise
            assert self._values is not None
            if self._bits is None:
                return self._values
            values = np.zeros(self._count, np.float32)
            values[np.unpackbits(self._bits, count=self._count).astype(bool)] = self._values
            return values

    def _compact(self) -> None:
        """Keep an answer that is there in little memory: the SDK's list takes 32 bytes a token."""
        if self._lock.acquire(blocking=False):  # else `result` is about to take it
            try:
                if self._first is not None:
                    with contextlib.suppress(PolicyError):  # which `result` raises
                        self._keep(self._first.result())
                        self._first = None
            finally:
                self._lock.release()

    def _keep(self, answer: Any) -> None:
        values = _finite(answer)
        self._count = len(values)
        if self._bits is not None:
            values = values[np.unpackbits(self._bits, count=self._count).astype(bool)]
        self._values = values
        self._settle()

    def _settle(self) -> None:
        settled, self._settled = self._settled, None
        if settled is not None:
            settled()

    def _answer(self, session: Session) -> Any:
        asked, self._first = self._first, None
        return asked if asked is not None else self._ask(session)

    def _ask(self, session: Session) -> Any:
        tokens = self._tokens
        if isinstance(tokens, Rollout):
            whole = tokens.whole()
            tokens, self._bits = whole.tokens, np.packbits(whole.mask)
        client = session.sampler(self._path, self._halt)
        return client.compute_logprobs(model_input(shared(tokens)))


def _finite(values: Any) -> np.ndarray:
    if not values:
        raise PolicyError("reference log-probabilities: the server sent none")
    array = np.array([0.0, *(np.nan if value is None else value for value in values[1:])], np.float32)
    if not np.isfinite(array).all():
        raise PolicyError("reference log-probabilities: the server sent some that are not finite")
    return array
