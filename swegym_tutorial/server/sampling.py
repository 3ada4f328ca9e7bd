"""Sampling from one base model under many adapters: batched decoding, and log-probabilities of prompts.

This is a second copy of the base model, in which the weights of the wanted adapter are merged before a batch is
decoded, so that a decode step costs no more than the base model's. The log-probabilities that come back are the
model's own at temperature 1, whatever the temperature, top_k and top_p that chose the token: they are those that
training computes for the same token, so the probability ratio of an update starts at 1. Used by one thread. Knows
nothing of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from .records import SampledSequence, SampleJob, Samples, UserError
from .wire import MASKED


@dataclass(frozen=True)
class Adapter:
    """An immutable version of a policy: for each changed layer, A (rank, inputs) and B (outputs, rank)."""

    name: str
    scale: float
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


BASE = Adapter("", 0.0)


class Sampler:
    """One base model to sample from; `activate` a version, then `run` jobs with it."""

    def __init__(self, model: Any, limit: int, eos: frozenset[int], tokenizer: Callable[[], Any]) -> None:
        """limit: the context in tokens. tokenizer: loads it, for stop strings alone."""
        self._model = model
        self._limit = limit
        self._eos = eos
        self._load_tokenizer = tokenizer
        self._originals: dict[str, torch.Tensor] = {}  # of the layers that were ever changed
        self._active = BASE

    def activate(self, adapter: Adapter) -> None:
        """Merge an adapter's weights into the model, in the place of the last one's."""
        if adapter is self._active:
            return
        with torch.no_grad():
            for layer in self._active.layers.keys() - adapter.layers.keys():
                self._weight(layer).copy_(self._originals[layer])
            for layer, (a, b) in adapter.layers.items():
                weight = self._weight(layer)
                if layer not in self._originals:
                    self._originals[layer] = weight.clone()
                delta = (b.to(weight) @ a.to(weight)) * adapter.scale
                # transformers' Conv1D keeps its weight as (inputs, outputs).
                torch.add(
                    self._originals[layer], delta if delta.shape == weight.shape else delta.T, out=weight
                )
        self._active = adapter

    def _weight(self, layer: str) -> torch.Tensor:
        module = self._model.get_submodule(layer)
        if module.weight is self._model.get_input_embeddings().weight:
            # An adapter of the output layer must not change the embedding that shares its weights.
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        return module.weight.data

    @torch.inference_mode()
    def run(self, jobs: Sequence[SampleJob], deliver: Callable[[int, Samples], None]) -> None:
        """Decode a batch of jobs; deliver(n, answer) is called for each as soon as it is done.

        Raises UserError where the policy's outputs aren't finite; some jobs may have been delivered then.
        """
        prompts = {job.prompt.tobytes(): job.prompt for job in jobs}  # equal prompts are read once
        rank = {key: n for n, key in enumerate(prompts)}
        decoding = _Decoding(jobs, [rank[job.prompt.tobytes()] for job in jobs], self._limit, self._eos)
        sizes = np.array([prompt.size for prompt in prompts.values()])
        width = int(sizes.max())
        tokens = np.zeros((len(prompts), width), np.int64)
        mask = np.zeros((len(prompts), width + decoding.longest), np.int64)
        for row, prompt in enumerate(prompts.values()):
            tokens[row, width - prompt.size :] = prompt
            mask[row, width - prompt.size :] = 1
        cache = DynamicCache(config=self._model.config)
        scored = any(job.scores_prompt for job in jobs)
        seen = self._tensor(mask)
        positions = self._tensor(np.maximum(mask.cumsum(1) - 1, 0)[:, :width])
        logits = self._forward(self._tensor(tokens), seen[:, :width], positions, cache, 0 if scored else 1)
        if scored:
            decoding.scores = [
                self._score(job, logits[row]) for job, row in zip(jobs, decoding.prompt_rows, strict=True)
            ]

        rows = self._tensor(np.repeat(decoding.prompt_rows, [job.num_samples for job in jobs]))
        if not torch.equal(rows, torch.arange(len(prompts), device=rows.device)):
            cache.batch_select_indices(rows)
        seen, position, last = seen[rows], self._tensor(sizes)[rows], logits[:, -1].float()[rows]
        for step in range(decoding.longest):
            chosen, logprobs = decoding.choose(last, step)
            if not bool(torch.isfinite(logprobs).all()):
                raise UserError("the policy's outputs are not finite: its weights have diverged")
            keep = decoding.accept(step, chosen.cpu().numpy(), logprobs.cpu().numpy(), self._stop_text)
            for n in decoding.take_finished():
                deliver(n, decoding.answer(n))
            if not keep.size:
                return
            if keep.size < len(chosen):
                kept = self._tensor(keep)
                cache.batch_select_indices(kept)
                seen, position, chosen = seen[kept], position[kept], chosen[kept]
            logits = self._forward(chosen[:, None], seen[:, : width + step + 1], position[:, None], cache, 1)
            last, position = logits[:, -1].float(), position + 1

    def _forward(self, tokens: Any, seen: Any, positions: Any, cache: Any, keep: int) -> torch.Tensor:
        return self._model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits

    def _score(self, job: SampleJob, logits: torch.Tensor) -> Samples:
        """Return a prompt's log-probabilities, from the logits of a left-padded row (width, vocabulary)."""
        size = job.prompt.size
        logprobs = torch.log_softmax(logits[logits.shape[0] - size : -1].float(), -1)
        answer = Samples([])
        unscored = size - job.prompt_logprobs_last_n if job.prompt_logprobs_last_n else 1
        if job.prompt_logprobs:
            values = np.full(size, np.nan, np.float32)
            values[1:] = logprobs.gather(1, self._tensor(job.prompt[1:, None]))[:, 0].cpu().numpy()
            values[:unscored] = np.nan
            answer = Samples([], values)
        if k := job.topk_prompt_logprobs:
            ids = np.zeros((size, k), np.int32)
            best = np.full((size, k), MASKED, np.float32)
            top = logprobs.topk(k)
            ids[1:], best[1:] = top.indices.cpu().numpy(), top.values.cpu().numpy()
            ids[:unscored], best[:unscored] = 0, MASKED
            answer = Samples([], answer.prompt_logprobs, ids, best)
        return answer

    def _stop_text(self, tokens: np.ndarray, strings: tuple[str, ...]) -> bool:
        """Tell whether the text of sampled tokens contains a stop string that its last token completed."""
        # A token is at least a byte of the text, so a string can't reach further back than this.
        longest = max(len(text.encode()) for text in strings) + 4
        text = self._load_tokenizer().decode(tokens[-longest:].tolist(), skip_special_tokens=False)
        return any(string in text for string in strings)

    def _tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._model.device)


class _Decoding:
    """The rows of a batch while it is decoded: a row for each sample of each job."""

    def __init__(
        self, jobs: Sequence[SampleJob], prompt_rows: list[int], context: int, eos: frozenset[int]
    ) -> None:
        self.prompt_rows = np.array(prompt_rows)
        self.scores: list[Samples] = [Samples([])] * len(jobs)
        self._jobs = jobs
        self._of = np.repeat(np.arange(len(jobs)), [job.num_samples for job in jobs])
        self._limits = np.array([self._limit(jobs[n], context) for n in self._of.tolist()])
        self.longest = int(self._limits.max())
        self._stops = [eos if (stops := jobs[n].stop_tokens) is None else stops for n in self._of.tolist()]
        self._tokens = np.zeros((len(self._of), self.longest), np.int32)
        self._logprobs = np.zeros((len(self._of), self.longest), np.float32)
        self._uniforms = self._draw()
        self._sequences: list[list[SampledSequence | None]] = [[None] * job.num_samples for job in jobs]
        self._missing = [job.num_samples for job in jobs]
        self._finished: list[int] = []
        self._alive = np.arange(len(self._of))

    @staticmethod
    def _limit(job: SampleJob, context: int) -> int:
        room = context - job.prompt.size + 1  # the last token is sampled and never read
        return room if job.max_tokens is None else min(room, job.max_tokens)

    def _draw(self) -> np.ndarray:
        """Return a number in [0, 1) for each row and step; a row's depend on its own seed and number alone."""
        drawn = np.empty((len(self._of), self.longest))
        row = 0
        for job in self._jobs:
            for n in range(job.num_samples):
                seed = None if job.seed is None else [job.seed % 2**64, n]
                drawn[row, : self._limits[row]] = np.random.default_rng(seed).random(self._limits[row])
                row += 1
        return drawn

    def choose(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token and its log-probability at temperature 1 for each living row. logits: float32 (rows, vocabulary)."""
        jobs = [self._jobs[n] for n in self._of[self._alive].tolist()]
        logprobs = torch.log_softmax(logits, -1)
        temperatures = np.array([job.temperature for job in jobs], np.float32)
        if (temperatures == 1).all():
            probabilities = logprobs.exp()
        else:
            scale = torch.from_numpy(np.where(temperatures > 0, temperatures, 1)).to(logits)
            probabilities = torch.softmax(logits / scale[:, None], -1)
        if any(job.top_k > 0 or job.top_p < 1 for job in jobs):
            probabilities = _filtered(probabilities, jobs)
        # The token at which the cumulated probability passes the row's number.
        cumulated = probabilities.double().cumsum(-1)
        uniforms = torch.from_numpy(self._uniforms[self._alive, step]).to(cumulated)
        threshold = (uniforms * (1 - 1e-12))[:, None] * cumulated[:, -1:]
        tokens = torch.searchsorted(cumulated, threshold, right=True)
        if (temperatures == 0).any():
            greedy = torch.from_numpy(temperatures == 0).to(logits.device)
            tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    def accept(
        self, step: int, tokens: np.ndarray, logprobs: np.ndarray, stop_text: Callable[..., bool]
    ) -> np.ndarray:
        """Take over the chosen tokens and return which of the living rows go on, by their place among them."""
        self._tokens[self._alive, step] = tokens
        self._logprobs[self._alive, step] = logprobs
        keep = []
        for place, (row, token) in enumerate(zip(self._alive.tolist(), tokens.tolist(), strict=True)):
            strings = self._jobs[self._of[row]].stop_strings
            stopped = token in self._stops[row] or bool(
                strings and stop_text(self._tokens[row, : step + 1], strings)
            )
            if stopped or step + 1 == self._limits[row]:
                self._finish(row, step + 1, stopped)
            else:
                keep.append(place)
        places = np.array(keep, dtype=np.int64)
        self._alive = self._alive[places]
        return places

    def _finish(self, row: int, size: int, stopped: bool) -> None:
        n = int(self._of[row])
        first = int(np.searchsorted(self._of, n))
        sequence = SampledSequence(
            self._tokens[row, :size].copy(), self._logprobs[row, :size].copy(), stopped
        )
        self._sequences[n][row - first] = sequence
        self._missing[n] -= 1
        if not self._missing[n]:
            self._finished.append(n)

    def take_finished(self) -> list[int]:
        finished, self._finished = self._finished, []
        return finished

    def answer(self, n: int) -> Samples:
        score = self.scores[n]
        sequences = [sequence for sequence in self._sequences[n] if sequence is not None]
        return Samples(sequences, score.prompt_logprobs, score.topk_ids, score.topk_logprobs)


def _filtered(probabilities: torch.Tensor, jobs: Sequence[SampleJob]) -> torch.Tensor:
    """Set to zero what lies outside a row's top_k likeliest tokens, or outside the fewest that hold top_p."""
    vocab = probabilities.shape[-1]
    ordered, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    k = torch.tensor([min(job.top_k, vocab) if job.top_k > 0 else vocab for job in jobs]).to(order)
    p = torch.tensor([job.top_p for job in jobs], dtype=torch.float64).to(order.device)
    before = ordered.double().cumsum(-1) - ordered.double()
    places = torch.arange(vocab, device=order.device)
    # A top_p of 1 keeps every token, also where rounding takes the sum past 1.
    kept = (places[None] < k[:, None]) & ((before < p[:, None]) | (p[:, None] == 1))
    return torch.zeros_like(probabilities).scatter(1, order, torch.where(kept, ordered, 0.0))
