"""Everything that is said to the training server, through the `tinker` SDK.

Any Tinker-compatible server serves: Spindle, the hosted service, or the local one. Knows nothing of tasks,
sandboxes or rewards.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .config import TrainingConfig
from .minibatch import datum
from .rollout import Sample

if TYPE_CHECKING:
    import tinker
    from tinker import types

CALL_TIMEOUT = 7200.0  # seconds for one call to the server; a cold start takes long
START_TIMEOUT = 600.0


class PolicyError(RuntimeError):
    """The training server failed or refused; an infrastructure fault. The text says what it was asked for."""


class Stopped(Exception):
    """The run was told to stop while it waited."""


def wait(future: Any, stop: threading.Event, what: str, timeout: float = CALL_TIMEOUT) -> Any:
    """Wait for a future of the SDK's, and leave at once when `stop` is set.

    Raises PolicyError with the server's words, or that it didn't answer in time; Stopped after `stop`.
    """
    inner: concurrent.futures.Future[Any] = future.future() if hasattr(future, "future") else future
    deadline = time.monotonic() + timeout
    while not inner.done():
        if stop.is_set():
            raise Stopped(what)
        if time.monotonic() > deadline:
            raise PolicyError(f"{what}: the server did not answer within {timeout:.0f} s")
        concurrent.futures.wait([inner], timeout=0.2)
    return _translated(inner.result, what)


def in_thread(call: Any, stop: threading.Event, what: str, timeout: float) -> Any:
    """Run a call that blocks in a thread of its own, so that stopping isn't held up by it; see wait()."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="policy-call", daemon=True).start()
    return wait(future, stop, what, timeout)


def _translated(call: Any, what: str) -> Any:
    import tinker

    try:
        return call()
    except (tinker.TinkerError, OSError, ValueError, ImportError) as error:
        raise PolicyError(f"{what}: {type(error).__name__}: {error}") from error


class PolicySampler:
    """One published policy; or the base model, as the reference. Safe for many threads."""

    def __init__(
        self,
        client: tinker.SamplingClient,
        path: str,
        stop_tokens: list[int],
        temperature: float,
        stop: threading.Event,
    ) -> None:
        self.path = path  # where the server keeps it; the base model's name for the base
        self._client = client
        self._stop_tokens = stop_tokens
        self._temperature = temperature
        self._stop = stop

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Sample one continuation. Raises PolicyError where the server fails or sends no finite log-probability."""
        from tinker import types

        parameters = types.SamplingParams(
            max_tokens=max_tokens, temperature=self._temperature, seed=seed, stop=self._stop_tokens
        )
        future = self._client.sample(types.ModelInput.from_ints(prompt), 1, parameters)
        sequence = wait(future, self._stop, "sampling").sequences[0]
        tokens = list(sequence.tokens)
        logprobs = list(sequence.logprobs or [])
        if not tokens or len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
            raise PolicyError("sampling: the server did not send a finite log-probability for each token")
        return Sample(tokens, logprobs, stopped=sequence.stop_reason == "stop")

    def logprobs(self, tokens: np.ndarray) -> concurrent.futures.Future[Any]:
        """Ask for every token's log-probability under this policy; `reference_of` reads the answer."""
        from tinker import types

        return self._client.compute_logprobs(types.ModelInput.from_ints(tokens.tolist()))

    def reference_of(self, future: concurrent.futures.Future[Any]) -> np.ndarray:
        """Return float64 of shape (tokens,), 0 for the first, which has none. Raises PolicyError."""
        values = wait(future, self._stop, "reference log-probabilities")
        if not values:
            raise PolicyError("reference log-probabilities: the server sent none")
        array = np.array([0.0, *(np.nan if value is None else value for value in values[1:])])
        if not np.isfinite(array).all():
            raise PolicyError("reference log-probabilities: the server sent some that are not finite")
        return array


@dataclass(frozen=True)
class Trained:
    """What the server told of one batch's updates."""

    minibatches: int
    metrics: dict[str, float]  # the last minibatch's, as the server names them


class PolicyClient:
    """One LoRA adapter on the server: trains, saves, publishes. Used by one thread."""

    def __init__(
        self,
        trainer: tinker.TrainingClient,
        config: TrainingConfig,
        stop: threading.Event,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._stop = stop

    def train(self, minibatches: Iterable[list[types.Datum]], step: int) -> Trained:
        """Update the policy with one forward_backward and optim_step a minibatch.

        Both calls of a minibatch are submitted before the last one's answers are waited for, so that the
        server always has the next. Raises PolicyError, Stopped.
        """
        from tinker import types

        config = self._config
        rate = config.learning_rate * min(1.0, (step + 1) / max(1, config.warmup_steps))
        adam = types.AdamParams(
            learning_rate=rate,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            grad_clip_norm=config.grad_clip_norm,
        )
        pending = []
        for data in minibatches:
            pending.append(
                (
                    self._trainer.forward_backward(data, "ppo", loss_fn_config=self._clip()),
                    self._trainer.optim_step(adam),
                )
            )
        metrics: dict[str, float] = {}
        for forward, update in pending:
            metrics = dict(wait(forward, self._stop, "forward_backward").metrics)
            metrics |= wait(update, self._stop, "optim_step").metrics or {}
        return Trained(len(pending), metrics)

    def rehearse(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Run the loss once with zero advantages: adds nothing to the gradient. Raises PolicyError, Stopped.

        tokens, logprobs: shape (tokens,), as of a rollout.
        """
        forward = self._trainer.forward_backward(
            [datum(tokens, logprobs, np.zeros(len(tokens), np.float32))], "ppo", loss_fn_config=self._clip()
        )
        wait(forward, self._stop, "forward_backward")

    def _clip(self) -> dict[str, float]:
        config = self._config
        return {"clip_low_threshold": config.clip_low, "clip_high_threshold": config.clip_high}

    def save(self, name: str) -> Any:
        """Ask for a checkpoint with optimizer state; returns the SDK's future, whose result has a path."""
        return self._trainer.save_state(name)

    def publish(self, name: str) -> Any:
        """Ask for sampling weights under a name; returns the SDK's future, whose result has a path."""
        return self._trainer.save_weights_for_sampler(name=name)

    def path_of(self, future: Any, what: str) -> str:
        return wait(future, self._stop, what).path

    def tokenizer_name(self) -> str:
        """Ask what tokenizes the server's model: a path or a hub name. Blocks."""
        name = self._trainer.get_info().model_data.tokenizer_id
        if not name:
            raise PolicyError("the server does not say what tokenizes its model: name it with --tokenizer")
        return name

    def load(self, path: str) -> None:
        """Take over a checkpoint, optimizer state included. Raises PolicyError."""
        wait(self._trainer.load_state_with_optimizer(path), self._stop, f"loading {path}")


class PolicyService:
    """The connection to one server. Its calls that wait raise PolicyError and Stopped."""

    def __init__(self, config: TrainingConfig, url: str, key: str, stop: threading.Event) -> None:
        import tinker

        bypass_proxy_for(url)
        self._config = config
        self._stop = stop
        self._service = _translated(
            lambda: tinker.ServiceClient(base_url=url, api_key=key), f"connecting to {url}"
        )
        self._holder: Any = None  # the session, which the SDK begins at the first call
        self._closed = False
        self.stop_tokens: list[int] = []

    def create_client(self, job: int) -> PolicyClient:
        """Make job's own adapter, and learn from the first one how the server's model is tokenized."""
        config = self._config
        # The seed is asked of our own server only: the published recipe leaves it out, and servers may refuse it.
        seed = config.seed * 1000 + job if config.preset == "laptop" else None
        trainer = self._in_thread(
            lambda: self._service.create_lora_training_client(
                base_model=config.base_model,
                rank=config.lora_rank,
                seed=seed,
                train_unembed=config.train_unembed,
            ),
            f"creating a rank-{config.lora_rank} LoRA client of {config.base_model}",
        )
        return PolicyClient(trainer, config, self._stop)

    def tokenizer(self, client: PolicyClient) -> Any:
        """Return the configured tokenizer, else the one that the server names (a path or a hub name)."""
        name = self._config.tokenizer
        if name is None:
            name = self._in_thread(client.tokenizer_name, "asking for the model's tokenizer")
        revision = self._config.tokenizer_revision

        def load() -> Any:
            # Our tokenizers need no torch, and its absence here is no news.
            os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
            from transformers import AutoTokenizer

            try:
                return AutoTokenizer.from_pretrained(name, **({"revision": revision} if revision else {}))
            except (OSError, ValueError) as error:
                why = " ".join(str(error).split())[:300]
                raise PolicyError(
                    f"the tokenizer {name} cannot be loaded: {why}. Name another or a folder that holds it with "
                    "--tokenizer"
                ) from error

        return self._in_thread(load, f"loading the tokenizer {name}")

    def sampler(self, path: str, *, temperature: float | None = None) -> PolicySampler:
        """Return the policy that was published under a path."""
        client = self._in_thread(
            lambda: self._service.create_sampling_client(model_path=path), f"sampling from {path}"
        )
        return self._sampler(client, path, temperature)

    def base_sampler(self, *, temperature: float | None = None) -> PolicySampler:
        """Return the base model itself: the reference of the KL term, and what training starts from."""
        name = self._config.base_model
        client = self._in_thread(
            lambda: self._service.create_sampling_client(base_model=name), f"sampling from {name}"
        )
        return self._sampler(client, name, temperature)

    def _sampler(self, client: tinker.SamplingClient, path: str, temperature: float | None) -> PolicySampler:
        chosen = self._config.temperature if temperature is None else temperature
        return PolicySampler(client, path, self.stop_tokens, chosen, self._stop)

    def close(self) -> None:
        """End the session, with the heartbeats that the SDK sends for it in the background. Waits for no server."""
        self._closed = True
        if self._holder is not None:  # asking the SDK for it would begin a session
            self._holder.close()

    def _in_thread(self, call: Any, what: str) -> Any:
        def in_session() -> Any:
            self._holder = self._service.holder
            if self._closed:  # while the server kept this thread waiting
                self._holder.close()
                raise Stopped(what)
            return call()

        timeout = START_TIMEOUT if self._config.preset == "laptop" else CALL_TIMEOUT
        return in_thread(in_session, self._stop, what, timeout)


def bypass_proxy_for(url: str) -> None:
    """A proxy that the environment names must not be asked for a server on this machine."""
    if any(host in url for host in ("127.0.0.1", "localhost", "[::1]")):
        for name in ("no_proxy", "NO_PROXY"):
            known = os.environ.get(name, "")
            if "127.0.0.1" not in known:
                os.environ[name] = ",".join(filter(None, [known, "127.0.0.1,localhost,::1"]))
