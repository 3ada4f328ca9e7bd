"""What is asked of the engine and what it answers: plain records, their checks, and the error a user gets.

Knows nothing of HTTP, of the wire's encodings or of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

ALPHA = 32  # LoRA's alpha, the same for every adapter: its output is scaled by ALPHA / rank
MAX_RANK = 256
MAX_SAMPLES = 256  # sequences that one request may ask for


class UserError(Exception):
    """A request that can't be served as it was asked. The text is shown to the user; status is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class LossName(StrEnum):
    """The losses that the server knows. Each is a sum over tokens, never a mean."""

    CROSS_ENTROPY = "cross_entropy"  # -weight * logprob
    IMPORTANCE_SAMPLING = "importance_sampling"  # -ratio * advantage, ratio = exp(logprob - sampled logprob)
    PPO = "ppo"  # -min(ratio * advantage, clamp(ratio, low, high) * advantage)


@dataclass(frozen=True)
class LoraSpec:
    """The shape of an adapter. seed: of its start; None takes a random one."""

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MAX_RANK:
            raise UserError(f"lora rank must lie between 1 and {MAX_RANK}, not {self.rank}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise UserError("nothing to train: set train_attn, train_mlp or train_unembed")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"the seed must lie between 0 and 2**63 - 1, not {self.seed}")


@dataclass(frozen=True)
class Datum:
    """One sequence to train on. Every array has the shape (tokens,); those that the loss doesn't use are None."""

    tokens: np.ndarray  # int64, the model's input
    targets: np.ndarray  # int64, what it should say next at each position
    weights: np.ndarray | None = None  # float32, cross_entropy's; None: 1 everywhere
    logprobs: np.ndarray | None = None  # float32, of the targets under the policy that sampled them
    advantages: np.ndarray | None = None  # float32


@dataclass(frozen=True)
class TrainBatch:
    """What one forward or forward_backward call computes."""

    data: Sequence[Datum]
    loss: LossName
    clip_low: float = 0.8  # ppo's bounds of the ratio
    clip_high: float = 1.2
    backward: bool = True  # False: no gradients


@dataclass(frozen=True)
class Trained:
    """The answer: each datum's log-probabilities of its targets, float32 (tokens,); metrics named name:reduction."""

    logprobs: Sequence[np.ndarray]
    metrics: dict[str, float]


@dataclass(frozen=True)
class AdamStep:
    """The parameters of one optim_step; AdamW's, and the norm to clip the gradient to (0: don't)."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "weight_decay", "grad_clip_norm"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise UserError(f"{name} must be a number that is not negative, not {value}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must lie in [0, 1), not {getattr(self, name)}")


@dataclass(frozen=True)
class SampleJob:
    """What one sampling request asks for."""

    prompt: np.ndarray  # int64 (tokens,)
    max_tokens: int | None = None  # None: as many as the context holds
    num_samples: int = 1
    temperature: float = 1.0  # 0: the likeliest token
    top_k: int = -1  # -1: no limit
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: frozenset[int] | None = None  # None: the model's own end-of-sequence tokens
    stop_strings: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None  # None: of the whole prompt

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise UserError(f"num_samples must lie between 1 and {MAX_SAMPLES}, not {self.num_samples}")
        if not (np.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature must be a number that is not negative, not {self.temperature}")
        if self.top_k < -1 or self.top_k == 0:
            raise UserError(f"top_k must be at least 1, or -1 for no limit, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")
        if any(not text for text in self.stop_strings):
            raise UserError("an empty stop string would stop before the first token")
        if self.topk_prompt_logprobs < 0:
            raise UserError(f"topk_prompt_logprobs must not be negative, not {self.topk_prompt_logprobs}")
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and 1 <= last < len(self.prompt)):
            raise UserError("prompt_logprobs_last_n needs prompt_logprobs and must lie within the prompt")

    @property
    def scores_prompt(self) -> bool:
        return self.prompt_logprobs or self.topk_prompt_logprobs > 0


@dataclass(frozen=True)
class SampledSequence:
    """tokens int32 and logprobs float32, shape (tokens,); the token or string that stopped it is included."""

    tokens: np.ndarray
    logprobs: np.ndarray
    stopped: bool  # by a stop token or string; else the length limit was reached


@dataclass(frozen=True)
class Samples:
    """The answer to a SampleJob. prompt_logprobs: float32 (prompt,), NaN where there is none (the first)."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: np.ndarray | None = None
    topk_ids: np.ndarray | None = None  # int32 (prompt, k)
    topk_logprobs: np.ndarray | None = None  # float32 (prompt, k)


@dataclass(frozen=True)
class Limits:
    """What a base model can take."""

    context: int  # tokens
    vocab: int

    def check_sample(self, job: SampleJob) -> None:
        """Raise UserError for a prompt or stop token that the model can't take. The last sampled token isn't read."""
        if job.prompt.size == 0:
            raise UserError("the prompt is empty: at least one token is needed")
        self._check_tokens(job.prompt, "the prompt")
        longest = job.prompt.size + (job.max_tokens or 1) - 1
        if longest > self.context:
            raise UserError(
                f"the prompt has {job.prompt.size} tokens and max_tokens is {job.max_tokens}, "
                f"but the model's context holds {self.context}"
            )
        if job.topk_prompt_logprobs > self.vocab:
            raise UserError(
                f"topk_prompt_logprobs is {job.topk_prompt_logprobs}, the vocabulary {self.vocab}"
            )
        if job.stop_tokens and not all(0 <= token < self.vocab for token in job.stop_tokens):
            raise UserError(f"stop tokens must lie in the vocabulary, below {self.vocab}")

    def check_train(self, batch: TrainBatch) -> None:
        """Raise UserError that names the datum for one that the model can't be trained on."""
        if not batch.data:
            raise UserError("no data: at least one datum is needed")
        if not 0 <= batch.clip_low <= batch.clip_high < np.inf:
            raise UserError(
                f"0 <= clip_low_threshold <= clip_high_threshold must hold, not {batch.clip_low}, {batch.clip_high}"
            )
        for n, datum in enumerate(batch.data):
            size = datum.tokens.size
            if size == 0:
                raise UserError(f"datum {n} is empty: at least one token is needed")
            if size > self.context:
                raise UserError(f"datum {n} has {size} tokens, but the model's context holds {self.context}")
            self._check_tokens(datum.tokens, f"datum {n}: model_input")
            self._check_tokens(datum.targets, f"datum {n}: target_tokens")
            for name in ("targets", "weights", "logprobs", "advantages"):
                values = getattr(datum, name)
                if values is None:
                    continue
                told = "target_tokens" if name == "targets" else name
                if values.shape != (size,):
                    raise UserError(
                        f"datum {n}: {told} has shape {values.shape}, but model_input has {size} tokens"
                    )
                if name != "targets" and not np.isfinite(values).all():
                    raise UserError(f"datum {n}: {told} has values that are not finite (NaN or infinite)")

    def _check_tokens(self, tokens: np.ndarray, what: str) -> None:
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self.vocab):
            wrong = tokens[(tokens < 0) | (tokens >= self.vocab)][0]
            raise UserError(f"{what}: token {wrong} is not in the vocabulary, which has {self.vocab} tokens")
