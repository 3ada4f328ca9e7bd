"""Batched decoding of the requests for one version: they join while others are under way, and leave when done.

A step reads one token of every row. The rows' cached keys and values are aligned at the right, behind padding, so
a row joins or leaves by a pad or a selection. Beginnings that were read before are not read again. Knows nothing of
how tokens are chosen, or of training.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from .prefixes import NOTHING, Prefix, Prefixes
from .records import Limits, SampledSequence, SampleJob, Samples, UserError
from .sampling import BASE, Adapter, SamplingModel, choose, score

MAX_ROWS = 64  # sequences decoded at once,
MAX_TOKENS = 2**17  # and the tokens that their cache may hold
PREFILL_TOKENS = 8192  # padded prompt tokens read at once,
PREFILL_LOGITS = 2**27  # and the logits that they may make, where prompts are scored


@dataclass
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
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._sizes = torch.empty(0, dtype=torch.int64)  # of each row's tokens in the cache, at its right
        self._last = torch.empty(0)  # each row's logits of its next token, float32 (rows, vocabulary)

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    def add(self, job: SampleJob, done: Callable[[Samples | Exception], None]) -> None:
        self._waiting.append(_Request(job, done, sequences=[None] * job.num_samples))

    def fail(self, error: Exception) -> None:
        """Answer all requests, also those that wait, with an error."""
        requests = {id(row.request): row.request for row in self._rows}
        self._keep([])
        for request in requests.values():
            request.done(error)
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
        self._model.activate(adapter)
        deadline = time.monotonic() + seconds
        while self.busy:
            while self._waiting and self._admit():
                pass
            self._step()
            if time.monotonic() > deadline:
                return

    def _admit(self) -> bool:
        """Read the prompts of requests that wait, as many as fit, and add their rows. False where none fits."""
        scored = self._waiting[0].job.scores_prompt
        budget = PREFILL_LOGITS // self._limits.vocab if scored else PREFILL_TOKENS
        requests: list[_Request] = []
        rows, longest = len(self._rows), int(self._sizes.max()) if self._rows else 0
        width = 0
        while self._waiting and self._waiting[0].job.scores_prompt == scored:
            job = self._waiting[0].job
            rows += job.num_samples
            width = max(width, job.prompt.size)
            longest = max(longest, job.prompt.size + self._limit(job))
            full = rows > MAX_ROWS or rows * longest > MAX_TOKENS
            if full and (requests or self._rows):
                break
            if requests and (len(requests) + 1) * width > budget:
                break
            requests.append(self._waiting.popleft())
        if requests:
            self._prefill(requests, scored)
        return bool(requests)

    def _limit(self, job: SampleJob) -> int:
        room = self._limits.context - job.prompt.size + 1  # the last token is sampled and never read
        return room if job.max_tokens is None else min(room, job.max_tokens)

    def _prefill(self, requests: Sequence[_Request], scored: bool) -> None:
        """Read prompts and add a row for each of their sequences; equal prompts are read once."""
        prompts = {request.job.prompt.tobytes(): request.job.prompt for request in requests}
        places = {key: n for n, key in enumerate(prompts)}
        reuse = self._model.full_attention and not scored
        known = [self._prefixes.find(prompt) if reuse else NOTHING for prompt in prompts.values()]
        cache, logits = self._read(list(prompts.values()), known, scored)
        sizes = np.array([prompt.size for prompt in prompts.values()])
        if reuse:
            for row, prompt in enumerate(prompts.values()):
                self._prefixes.keep(prompt, _row_of(cache, row, prompt.size))
        chosen = []
        for request in requests:
            job = request.job
            place = places[job.prompt.tobytes()]
            if scored:
                request.scores = score(job, logits[place])
            stops = self._eos if job.stop_tokens is None else job.stop_tokens
            for number in range(job.num_samples):
                seed = None if job.seed is None else [job.seed % 2**64, number]
                random = np.random.default_rng(seed)
                self._rows.append(_Row(request, number, self._limit(job), stops, random))
                chosen.append(place)
        tensor = self._model.tensor
        self._join(cache, tensor(sizes), logits[:, -1], tensor(np.array(chosen)))

    def _read(
        self, prompts: list[np.ndarray], known: list[Prefix], scored: bool
    ) -> tuple[DynamicCache, torch.Tensor]:
        """Return the prompts' cache, aligned at the right, and the logits of their last (scored: all) tokens."""
        tensor = self._model.tensor
        sizes = np.array([prompt.size for prompt in prompts])
        old = np.array([prefix.size for prefix in known])
        cache, before = _cache_of(known), int(old.max())
        width = int((sizes - old).max())
        tokens = np.zeros((len(prompts), width), np.int64)
        for row, (prompt, prefix) in enumerate(zip(prompts, known, strict=True)):
            tokens[row, width - (prompt.size - prefix.size) :] = prompt[prefix.size :]
        positions = np.arange(width)[None] - (width - sizes)[:, None]
        seen = np.concatenate(
            [np.arange(before)[None] >= (before - old)[:, None], positions >= old[:, None]], axis=1
        )
        logits = self._model.forward(
            tensor(tokens),
            tensor(seen.astype(np.int64)),
            tensor(positions.clip(0)),
            cache,
            0 if scored else 1,
        )
        if before:
            # Close the gap of padding between what was known and what was read now.
            order = tensor(np.argsort(seen, axis=1, kind="stable")[:, -int(sizes.max()) :])
            rows = torch.arange(len(prompts), device=order.device)[:, None]
            for layer in _layers(cache):
                layer.keys = layer.keys[rows, :, order].transpose(1, 2)
                layer.values = layer.values[rows, :, order].transpose(1, 2)
        return cache, logits

    def _join(
        self, cache: DynamicCache, sizes: torch.Tensor, last: torch.Tensor, chosen: torch.Tensor
    ) -> None:
        """Add the chosen rows of a cache behind those that are there."""
        cache.batch_select_indices(chosen)
        if not self._sizes.numel():
            self._cache, self._sizes, self._last = cache, sizes[chosen], last[chosen]
            return
        self._sizes = torch.cat([self._sizes, sizes[chosen]])
        self._last = torch.cat([self._last, last[chosen]])
        width = max(self._cache.get_seq_length(), cache.get_seq_length())
        for old, new in zip(_layers(self._cache), _layers(cache), strict=True):
            old.keys = torch.cat([_widened(old.keys, width), _widened(new.keys, width)])
            old.values = torch.cat([_widened(old.values, width), _widened(new.values, width)])

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
            self._keep(keep)
            chosen = chosen[keep]
        for row, _, stopped in finished:
            _finish(row, stopped)
        if not self._rows:
            return
        width = self._cache.get_seq_length() + 1
        columns = torch.arange(width, device=self._sizes.device)
        seen = (columns[None] >= width - 1 - self._sizes[:, None]).long()
        logits = self._model.forward(chosen[:, None], seen, self._sizes[:, None], self._cache, 1)
        self._last = logits[:, -1]
        self._sizes = self._sizes + 1

    def _keep(self, places: list[int]) -> None:
        """Let all other rows go, and the padding that is then common to all."""
        self._rows = [self._rows[place] for place in places]
        if not places:
            self._cache, self._sizes, self._last = DynamicCache(), self._sizes[:0], self._last[:0]
            return
        chosen = self._model.tensor(np.array(places))
        self._sizes, self._last = self._sizes[chosen], self._last[chosen]
        spare = self._cache.get_seq_length() - int(self._sizes.max())
        for layer in _layers(self._cache):
            layer.keys, layer.values = layer.keys[chosen, :, spare:], layer.values[chosen, :, spare:]

    def _remember(self, row: _Row, place: int) -> None:
        """Keep what a row has read, for the next turn that begins with it."""
        if self._model.full_attention and not row.request.job.scores_prompt:
            read = np.concatenate([row.request.job.prompt, row.tokens[:-1]]).astype(np.int64)
            self._prefixes.keep(read, _row_of(self._cache, place, read.size))

    def _completes_text(self, row: _Row) -> bool:
        """Tell whether the row's last token completed one of its stop strings."""
        strings = row.request.job.stop_strings
        if not strings:
            return False
        # A token is a byte of the text at least, so a string reaches no further back than this.
        longest = max(len(text.encode()) for text in strings) + 4
        text = self._tokenizer().decode(row.tokens[-longest:], skip_special_tokens=False)
        return any(string in text for string in strings)


def _layers(cache: DynamicCache) -> list[Any]:
    """A cache's layers, each with keys and values (rows, heads, tokens, size)."""
    return cache.layers


def _cache_of(known: Sequence[Prefix]) -> DynamicCache:
    """Return a cache with a row for each prefix, aligned at the right behind zeros; empty where all are."""
    cache = DynamicCache()
    width = max(prefix.size for prefix in known)
    layers = max((prefix.layers for prefix in known), key=len)
    for n, pair in enumerate(layers):
        keys, values = (kind.new_zeros(len(known), kind.shape[0], width, kind.shape[2]) for kind in pair)
        for row, prefix in enumerate(known):
            if prefix.size:
                keys[row, :, width - prefix.size :] = prefix.layers[n][0][:, : prefix.size]
                values[row, :, width - prefix.size :] = prefix.layers[n][1][:, : prefix.size]
        cache.update(keys, values, n)
    return cache


def _row_of(cache: DynamicCache, row: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the keys and values of a row's tokens, each (heads, tokens, size)."""
    return [(layer.keys[row, :, -size:], layer.values[row, :, -size:]) for layer in _layers(cache)]


def _widened(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pad keys or values at the left to `width` tokens."""
    return pad(values, (0, 0, width - values.shape[2], 0))


def _finish(row: _Row, stopped: bool) -> None:
    """Hand a row's sequence to its request, and answer the request when it was the last."""
    request = row.request
    request.sequences[row.number] = SampledSequence(
        np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32), stopped
    )
    sequences = [sequence for sequence in request.sequences if sequence is not None]
    if len(sequences) == request.job.num_samples:
        scores = request.scores
        request.done(Samples(sequences, scores.prompt_logprobs, scores.topk_ids, scores.topk_logprobs))
