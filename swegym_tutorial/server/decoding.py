"""Batched decoding of the requests for one version: they join while others are under way, and leave when done.

A step reads one token of every row. Beginnings that were read before are not read again. Knows nothing of how keys
and values are kept, how tokens are chosen, or of training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from .cache import ROOM, RowCache
from .prefixes import NOTHING, Prefixes
from .records import Limits, SampledSequence, SampleJob, Samples, UserError
from .sampling import BASE, Adapter, SamplingModel, choose, score

MAX_ROWS = 64  # sequences decoded at once,
MAX_TOKENS = 2**17  # and the tokens that their cache has room for; only one request alone may have more
PREFILL_TOKENS = 8192  # padded prompt tokens read at once


@dataclass(eq=False)
class _Request:
    job: SampleJob
    done: Callable[[Samples | Exception], None]
    scores: Samples = field(default_factory=lambda: Samples([]))
    sequences: list[SampledSequence | None] = field(default_factory=list)


@dataclass
class _Row:
    """One sequence of a request."""

    request: _Request
    number: int  # among the request's sequences
    limit: int  # tokens that may be sampled
    stops: frozenset[int]
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Decoder:
    """The requests for one version. `add` may be called from any thread, everything else from the engine's."""

    def __init__(
        self,
        model: SamplingModel,
        adapter: Callable[[], Adapter],
        limits: Limits,
        eos: frozenset[int],
        tokenizer: Callable[[], Any],
    ) -> None:
        """adapter: gets the version's. eos: the stop tokens of requests that name none. tokenizer: for stop strings."""
        self._model = model
        self._adapter = adapter
        self._limits = limits
        self._eos = eos
        self._tokenizer = tokenizer
        self._merged = BASE
        self._prefixes = Prefixes()
        self._waiting: deque[_Request] = deque()
        self._taken: set[_Request] = set()  # no longer waiting, and not yet answered
        self._rows: list[_Row] = []
        self._cache = RowCache(MAX_TOKENS)
        self._last = torch.empty(0)  # each row's logits of its next token, float32 (rows, vocabulary)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    def add(self, job: SampleJob, done: Callable[[Samples | Exception], None]) -> None:
        self._waiting.append(_Request(job, done, sequences=[None] * job.num_samples))

    def fail(self, error: Exception) -> None:
        """Answer all requests, also those that wait, with an error."""
        self._keep([])
        while self._taken:
            self._taken.pop().done(error)
        while self._waiting:
            self._waiting.popleft().done(error)

    @torch.inference_mode()
    def work(self, seconds: float) -> None:
        """Decode until nothing is left or the time is up.

        Raises UserError where the version is gone or its outputs aren't finite; then `fail` must follow.
        """
        adapter = self._adapter()
        if adapter is not self._merged:
            self._merged, self._prefixes = adapter, Prefixes()
        began = time.monotonic()
        self._model.activate(adapter)
        now = time.monotonic()
        deadline = now + max(
            seconds, 4 * (now - began)
        )  # else large models would do little but change versions
        while self.busy:
            while self._waiting and self._admit():
                pass
            self._step()
            if time.monotonic() > deadline:
                return

    def _admit(self) -> bool:
        """Read the prompts of requests that wait, as many as fit, and add their rows. False where that's all for now.

        A prompt that is scored is read alone, and one between two steps: so no bit of its scores hangs on the others.
        """
        scored = self._waiting[0].job.scores_prompt
        requests: list[_Request] = []
        rows = len(self._rows)
        longest = max((row.request.job.prompt.size + row.limit for row in self._rows), default=0)
        width = 0
        while self._waiting and self._waiting[0].job.scores_prompt == scored:
            job = self._waiting[0].job
            rows += job.num_samples
            width = max(width, job.prompt.size)
            longest = max(longest, job.prompt.size + self._limit(job))
            full = rows > MAX_ROWS or rows * (longest + ROOM) > MAX_TOKENS
            if full and (requests or self._rows):
                break
            if requests and (scored or (len(requests) + 1) * width > PREFILL_TOKENS):
                break
            requests.append(self._waiting.popleft())
            self._taken.add(requests[-1])
        if requests:
            self._prefill(requests, scored)
        return bool(requests) and not scored

    def _limit(self, job: SampleJob) -> int:
        room = self._limits.context - job.prompt.size + 1  # the last token is sampled and never read
        return room if job.max_tokens is None else min(room, job.max_tokens)

    def _prefill(self, requests: Sequence[_Request], scored: bool) -> None:
        """Read prompts and add a row for each of their sequences; equal prompts are read once."""
        prompts = {request.job.prompt.tobytes(): request.job.prompt for request in requests}
        places = {key: n for n, key in enumerate(prompts)}
        first = len(self._rows)
        copies = sum(request.job.num_samples for request in requests) - len(prompts)
        logits = self._read(list(prompts.values()), scored, copies)
        rows: list[_Row | None] = [None] * len(prompts)
        chosen = list(range(len(prompts)))
        for request in requests:
            place = places[request.job.prompt.tobytes()]
            if scored:
                request.scores = score(request.job, logits[place])
            for row in self._rows_of(request):
                if rows[place] is None:
                    rows[place] = row
                else:
                    self._cache.copy(first + place)
                    rows.append(row)
                    chosen.append(place)
        self._rows += [row for row in rows if row is not None]
        last = logits[self._model.tensor(np.array(chosen)), -1]
        self._last = torch.cat([self._last, last]) if first else last

    def _rows_of(self, request: _Request) -> Iterator[_Row]:
        job = request.job
        stops = self._eos if job.stop_tokens is None else job.stop_tokens
        for number in range(job.num_samples):
            seed = None if job.seed is None else [job.seed % 2**64, number]
            yield _Row(request, number, self._limit(job), stops, np.random.default_rng(seed))

    def _read(self, prompts: list[np.ndarray], scored: bool, copies: int) -> torch.Tensor:
        """Read prompts into rows of their own, which will be copied so many times.

        Returns the logits of their last (scored: all) tokens.
        """
        reuse = self._model.full_attention and not scored
        known = [self._prefixes.find(prompt) if reuse else NOTHING for prompt in prompts]
        first = len(self._rows)
        sizes = np.array([prompt.size for prompt in prompts])
        new = self._cache.open(sizes, known, copies)
        tokens = np.zeros((len(prompts), self._cache.view.new), np.int64)
        for row, (prompt, count) in enumerate(zip(prompts, new.tolist(), strict=True)):
            tokens[row, -count:] = prompt[-count:]
        logits = self._forward(self._model.tensor(tokens), 0 if scored else 1)
        if reuse:
            for row, prompt in enumerate(prompts, first):
                self._prefixes.keep(prompt, self._cache.row(row, prompt.size))
        return logits

    def _forward(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        """Read the rows' new tokens; return the logits of the last `keep` (0: all) of them."""
        view, tensor = self._cache.view, self._model.tensor
        places = np.arange(-view.width, 0)[None] + self._cache.sizes[view.rows, None]  # below 0: padding
        seen, positions = tensor((places >= 0).astype(np.int64)), tensor(places[:, -view.new :].clip(0))
        return self._model.forward(tokens, seen, positions, self._cache, keep)

    def _step(self) -> None:
        """Sample a token for every row, let the finished ones go, and read the tokens of the others."""
        jobs = [row.request.job for row in self._rows]
        chosen, logprobs = choose(self._last, jobs, np.array([row.random.random() for row in self._rows]))
        if not bool(torch.isfinite(logprobs).all()):
            raise UserError("the policy's outputs are not finite: its weights have diverged")
        keep, finished = [], []
        told = zip(self._rows, chosen.tolist(), logprobs.tolist(), strict=True)
        for place, (row, token, logprob) in enumerate(told):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            stopped = token in row.stops or self._completes_text(row)
            if stopped or len(row.tokens) == row.limit:
                finished.append((row, place, stopped))
            else:
                keep.append(place)
        if finished:
            for row, place, _ in finished:
                self._remember(row, place)
            order = self._keep(keep)
            chosen = chosen[order]
        for row, _, stopped in finished:
            self._finish(row, stopped)
        if self._rows:
            self._cache.extend()
            self._last = self._forward(chosen[:, None], 1)[:, -1]

    def _keep(self, places: list[int]) -> list[int]:
        """Let all other rows go. Returns the places that the rows had, in their new order."""
        if not places:
            self._rows, self._cache = [], RowCache(MAX_TOKENS)
            return places
        order = self._cache.keep(places)
        self._rows = [self._rows[place] for place in order]
        return order

    def _remember(self, row: _Row, place: int) -> None:
        """Keep what a row has read, for the next turn that begins with it."""
        if self._model.full_attention and not row.request.job.scores_prompt:
            read = np.concatenate([row.request.job.prompt, row.tokens[:-1]]).astype(np.int64)
            self._prefixes.keep(read, self._cache.row(place, read.size))

    def _completes_text(self, row: _Row) -> bool:
        """Tell whether the row's last token completed one of its stop strings."""
        strings = row.request.job.stop_strings
        if not strings:
            return False
        # A token is a byte of the text at least, so a string reaches no further back than this.
        longest = max(len(text.encode()) for text in strings) + 4
        text = self._tokenizer().decode(row.tokens[-longest:], skip_special_tokens=False)
        return any(string in text for string in strings)

    def _finish(self, row: _Row, stopped: bool) -> None:
        """Hand a row's sequence to its request, and answer the request when it was the last."""
        request = row.request
        request.sequences[row.number] = SampledSequence(
            np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32), stopped
        )
        sequences = [sequence for sequence in request.sequences if sequence is not None]
        if len(sequences) == request.job.num_samples:
            scores = request.scores
            self._taken.remove(request)
            request.done(Samples(sequences, scores.prompt_logprobs, scores.topk_ids, scores.topk_logprobs))
