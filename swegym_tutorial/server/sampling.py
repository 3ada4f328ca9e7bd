"""How a token is chosen, and the copy of the base model that a version's weights are merged into.

The log-probabilities that come back with samples are the model's own at temperature 1, whatever temperature, top_k
and top_p chose the token: they are those that training computes for the same token, so the probability ratio of an
update starts at 1. Knows nothing of batches, training or HTTP.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from .records import SampleJob, Samples
from .wire import MASKED


@dataclass(frozen=True)
class Adapter:
    """An immutable version of a policy: for each changed layer, A (rank, inputs) and B (outputs, rank)."""

    name: str
    scale: float
    layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


BASE = Adapter("", 0.0)
MIXED = Adapter("", 0.0)  # while weights are merged, or after that has failed midway
FLOPS_A_THREAD = 1e9  # a thread more for each of these; with less to do, threads only wait for each other


class SamplingModel:
    """A causal LM that takes on one adapter after the other. Merged, an adapter costs nothing while decoding."""

    def __init__(self, model: Any, threads: int) -> None:
        """threads: at most. Raises RuntimeError for an architecture that can't be sampled from in batches."""
        self.model = model
        self._threads = threads
        self._flops = 2 * sum(parameter.numel() for parameter in model.parameters())  # a token's
        taken = inspect.signature(model.forward).parameters
        if missing := {"position_ids", "attention_mask", "logits_to_keep"} - set(taken):
            raise RuntimeError(f"{type(model).__name__} does not take {', '.join(sorted(missing))}")
        layers = DynamicCache(config=model.config).layers
        if not all(isinstance(layer, DynamicLayer) for layer in layers):
            raise RuntimeError(f"{type(model).__name__} has layers other than attention: not supported")
        self.full_attention = all(type(layer) is DynamicLayer for layer in layers)  # no sliding windows
        self._cache_name = (
            "cache" if "cache" in taken else "past_key_values"
        )  # by the release of transformers
        self._originals: dict[str, torch.Tensor] = {}  # of the layers that were ever changed
        self._active = BASE

    def activate(self, adapter: Adapter) -> None:
        """Merge an adapter's weights into the model, in the place of the last one's."""
        if adapter is self._active:
            return
        self._active = MIXED
        with torch.no_grad():
            for layer in self._originals.keys() - adapter.layers.keys():
                self._weight(layer).copy_(self._originals[layer])
            for layer, (a, b) in adapter.layers.items():
                weight = self._weight(layer)
                if layer not in self._originals:
                    self._originals[layer] = weight.clone()
                delta = (b.to(weight) @ a.to(weight)) * adapter.scale
                # transformers' Conv1D keeps its weight as (inputs, outputs).
                turned = type(self.model.get_submodule(layer)).__name__ == "Conv1D"
                torch.add(self._originals[layer], delta.T if turned else delta, out=weight)
        self._active = adapter

    def forward(
        self,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache,
        keep: int,
    ) -> torch.Tensor:
        """Read tokens (rows, new) into the cache; return the logits of the last `keep` (0: all) of them, float32.

        seen: 1 for a token and 0 for padding, int64 (rows, cached + new). positions: int64 (rows, new).
        """
        torch.set_num_threads(min(self._threads, 1 + int(tokens.numel() * self._flops // FLOPS_A_THREAD)))
        answer = self.model(
            input_ids=tokens,
            attention_mask=seen,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=keep,
            **{self._cache_name: cache},
        )
        return answer.logits.float()

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.model.device)

    def _weight(self, layer: str) -> torch.Tensor:
        module = self.model.get_submodule(layer)
        if module.weight is self.model.get_input_embeddings().weight:
            # An adapter of the output layer must not change the embedding that shares its weights.
            module.weight = torch.nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        return module.weight.data


def choose(
    logits: torch.Tensor, jobs: Sequence[SampleJob], uniforms: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token and its log-probability at temperature 1 for each row.

    logits: float32 (rows, vocabulary). jobs: each row's. uniforms: float64 (rows,) in [0, 1), the only randomness:
    the token is the first at which the cumulated probability passes the row's number, so that a row's choice
    doesn't depend on the other rows.
    """
    logprobs = torch.log_softmax(logits, -1)
    temperatures = np.array([job.temperature for job in jobs], np.float32)
    if (temperatures == 1).all():
        probabilities = logprobs.exp()
    else:
        scale = torch.from_numpy(np.where(temperatures > 0, temperatures, 1)).to(logits)
        probabilities = torch.softmax(logits / scale[:, None], -1)
    if any(job.top_k > 0 or job.top_p < 1 for job in jobs):
        probabilities = _filtered(probabilities, jobs)
    cumulated = probabilities.double().cumsum(-1)
    # Rounding must not carry a number to the very end, where tokens of probability 0 may be.
    thresholds = torch.from_numpy(uniforms * (1 - 1e-12)).to(cumulated)[:, None] * cumulated[:, -1:]
    # Clamped for outputs that aren't numbers, which the log-probability then tells.
    tokens = torch.searchsorted(cumulated, thresholds, right=True).clamp(max=logits.shape[1] - 1)
    if (temperatures == 0).any():
        greedy = torch.from_numpy(temperatures == 0).to(logits.device)
        tokens = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


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


def score(job: SampleJob, logits: torch.Tensor) -> Samples:
    """Return a prompt's log-probabilities as the job asks for them, without sequences.

    logits: float32 (width, vocabulary), of which the prompt's are the last ones.
    """
    size = job.prompt.size
    logprobs = torch.log_softmax(logits[logits.shape[0] - size : -1], -1)
    unscored = size - job.prompt_logprobs_last_n if job.prompt_logprobs_last_n else 1
    values = ids = best = None
    if job.prompt_logprobs:
        values = np.full(size, np.nan, np.float32)
        targets = torch.from_numpy(job.prompt[1:, None]).to(logits.device)
        values[1:] = logprobs.gather(1, targets)[:, 0].cpu().numpy()
        values[:unscored] = np.nan
    if k := job.topk_prompt_logprobs:
        ids, best = np.zeros((size, k), np.int32), np.full((size, k), MASKED, np.float32)
        top = logprobs.topk(k)
        ids[1:], best[1:] = top.indices.cpu().numpy(), top.values.cpu().numpy()
        ids[:unscored], best[:unscored] = 0, MASKED
    return Samples([], values, ids, best)
