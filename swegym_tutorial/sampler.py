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
from .rollout import RecordingLost, Sample
from .session import Line, Session
from .token_ids import model_input, shared

Tokens = np.ndarray | Callable[[], np.ndarray]


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

    def logprobs(self, tokens: Tokens, answered: Callable[[], None] | None = None) -> Reference:
        """Ask for every token's log-probability under this policy; the answer's `result` waits for it.

        tokens: integers of shape (tokens,), or what reads them whenever they are asked for, so that they are not kept.
        answered: called when the first try's answer is there, from another thread.
        """
        return Reference(self._line, self.path, tokens, self._halt, answered)


class Reference:
    """Log-probabilities that were asked for, and are asked for again where the answer is lost."""

    def __init__(
        self,
        line: Line,
        path: str,
        tokens: Tokens,
        halt: threading.Event,
        answered: Callable[[], None] | None = None,
    ) -> None:
        self._line, self._path, self._tokens, self._halt = line, path, tokens, halt
        self._lock = threading.Lock()
        self._values: np.ndarray | None = None
        self._first: Any = None
        with contextlib.suppress(PolicyError):  # `result` asks again
            self._first = first = self._ask(line.current())
            when_done(first, self._compact)
            if answered is not None:
                when_done(first, answered)

    def result(self) -> np.ndarray:
        """Return float32 of shape (tokens,), 0 for the first, which has none. Raises PolicyError, Stopped."""
        with self._lock:
            if self._values is None:
                values = self._line.ask("reference log-probabilities", self._answer, self._halt)
                self._values = _finite(values)
        return self._values

    def _compact(self) -> None:
        """Keep an answer that is there as an array: the SDK's list takes eight times as much."""
        if self._lock.acquire(blocking=False):  # else `result` is about to take it
            try:
                if self._first is not None:
                    with contextlib.suppress(PolicyError):  # which `result` raises
                        self._values, self._first = _finite(self._first.result()), None
            finally:
                self._lock.release()

    def _answer(self, session: Session) -> Any:
        asked, self._first = self._first, None
        return asked if asked is not None else self._ask(session)

    def _ask(self, session: Session) -> Any:
        try:
            tokens = self._tokens() if callable(self._tokens) else self._tokens
        except RecordingLost as error:
            raise PolicyError(f"reference log-probabilities: {error}") from error
        client = session.sampler(self._path, self._halt)
        return client.compute_logprobs(model_input(shared(tokens)))


def _finite(values: Any) -> np.ndarray:
    if not values:
        raise PolicyError("reference log-probabilities: the server sent none")
    array = np.array([0.0, *(np.nan if value is None else value for value in values[1:])], np.float32)
    if not np.isfinite(array).all():
        raise PolicyError("reference log-probabilities: the server sent some that are not finite")
    return array
