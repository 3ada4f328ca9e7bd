"""Everything that is said to the training server, through the `tinker` SDK.

Any Tinker-compatible server serves: Spindle, the hosted service, or the local one. Knows nothing of tasks,
sandboxes or rewards.

A server's trouble costs no work. What is sampled is asked for again, in a new session where the old one is gone. A
batch's training is one transaction: where any call of it fails, nobody knows what the adapter has become, so a new
one takes over the last checkpoint and the same batch is trained again. Thus no update is lost or made twice.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .calls import PolicyError, Trouble, cancel, in_thread, is_done, pause, wait, when_done
from .config import TrainingConfig
from .halt import Halt, Stopped
from .minibatch import datum
from .sampler import PolicySampler
from .session import START_TIMEOUT, Line, Session, settle
from .watch import WaitingCall, Watch, ailment

if TYPE_CHECKING:
    import tinker
    from tinker import types

# Tries of one piece of work; lost calls have no limit. A server that restarts again and again knows nothing each time.
LIMITS = {Trouble.REFUSED: 2, Trouble.GONE: 5, Trouble.FAILED: 8}

Minibatches = Callable[[], Iterable[list["types.Datum"]]]
Result = TypeVar("Result")


class CheckpointGone(PolicyError):
    """The server cannot load a checkpoint any more: it has expired, or was deleted."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"the server cannot load the checkpoint {path}: {why}", Trouble.GONE)
        self.path = path


@dataclass(frozen=True)
class Update:
    """What one batch has made of the policy. Times in seconds."""

    checkpoint: str  # the path of the training state
    sampler: str  # the path of the published weights
    minibatches: int
    metrics: dict[str, float]  # the last minibatch's, as the server names them
    train_seconds: float  # from the first minibatch's submission to the last one's answers
    publish_seconds: float


class PolicyClient:
    """One LoRA adapter, which outlives the server's own: trains, saves, publishes. Used by one thread."""

    def __init__(self, service: PolicyService, job: int, halt: threading.Event) -> None:
        self.job, self.halt = job, halt
        self.checkpoint: str | None = None  # the state that a new adapter takes over; None: an untrained one
        self._service, self._config = service, service.config
        self._session: Session | None = None
        self._adapter: tinker.TrainingClient | None = None
        self._fresh = False  # whether it was made for the work that is being done
        self._pending: list[Any] = []  # calls whose answers are still to come
        self._waiting: WaitingCall | None = None  # the work that is being done, as the watch knows it

    def begin(self) -> None:
        """Make an untrained adapter, or one in the checkpoint's state. Raises PolicyError, CheckpointGone, Stopped."""
        self._safely("making the adapter", lambda name: None, "")

    def restore(self, checkpoint: str) -> None:
        """Go on from a checkpoint. Raises as `begin`."""
        self.checkpoint = checkpoint
        self._safely("loading the checkpoint", lambda name: None if self._fresh else self._load(), "")

    def publish(self, name: str) -> Update:
        """Save and publish the adapter as it is. Raises as `update`."""
        return self._safely("publishing", lambda name: self._publish(name, time.monotonic(), 0, {}), name)

    def update(self, minibatches: Minibatches, step: int, name: str) -> Update:
        """Train on a batch, one forward_backward and optim_step a minibatch, save the state and publish it.

        minibatches: called anew for each try; it may take its time with each, as its caller may still be collecting
        it. name: of what is saved; a further try adds its number. Both calls of a minibatch are submitted before the
        last one's answers are waited for, so that the server always has the next. Raises PolicyError where the server
        refuses, or fails again and again; CheckpointGone; Stopped; and what the minibatches raise, with no second try
        unless it is a PolicyError.
        """

        def work(name: str) -> Update:
            began, count, metrics = self._train(minibatches(), step)
            return self._publish(name, began, count, metrics)

        return self._safely(f"training step {step + 1}", work, name)

    def rehearse(self, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Run the loss once with zero advantages: adds nothing to the gradient. Raises PolicyError, Stopped.

        tokens, logprobs: shape (tokens,), as of a rollout.
        """
        data = [datum(tokens, logprobs, np.zeros(len(tokens), np.float32))]
        with self._service.watch.waiting("forward_backward"):
            forward = self._trainer.forward_backward(data, "ppo", loss_fn_config=self._clip())
            wait(forward, self.halt, "forward_backward")

    def publish_once(self, name: str) -> str:
        """Publish without a checkpoint and without a second try; returns the path. Raises PolicyError, Stopped."""
        with self._service.watch.waiting("publishing"):
            return wait(self._trainer.save_weights_for_sampler(name=name), self.halt, "publishing").path

    def tokenizer_name(self) -> str:
        """Ask what tokenizes the server's model: a path or a hub name. Raises PolicyError, Stopped."""
        session, trainer = self._session, self._trainer
        assert session is not None
        with self._service.watch.waiting("asking for the model's tokenizer"):
            asked = session.call(trainer.get_info, "asking for the model's tokenizer", self.halt)
        if not asked.model_data.tokenizer_id:
            raise PolicyError("the server does not say what tokenizes its model: name it with --tokenizer")
        return asked.model_data.tokenizer_id

    def close(self) -> None:
        """End the session, which frees the adapter. Waits for no server."""
        pending, self._pending = self._pending, []
        session, self._session, self._adapter = self._session, None, None
        for future in pending:
            cancel(future)
        if session is not None:
            session.close()

    # -- One transaction ---------------------------------------------------------------------------

    def _safely(self, what: str, work: Callable[[str], Result], name: str) -> Result:
        """Do work on the adapter; where a call of it fails, do it again on a new one in the last checkpoint's state."""
        failed = math.inf  # when it first did
        met: Counter[Trouble] = Counter()
        reason, checkpoint = "", self.checkpoint
        with self._service.watch.waiting(what) as waiting:
            self._waiting = waiting
            for tries in itertools.count(1):
                try:
                    self._fresh = self._adapter is None
                    if self._fresh:
                        self._make()
                    result = work(name if tries == 1 else f"{name}-try{tries}")
                    break
                except PolicyError as error:
                    self.close()
                    failed = min(failed, time.monotonic())
                    met[error.trouble] += 1
                    if met[error.trouble] >= LIMITS.get(error.trouble, math.inf):
                        raise
                    reason = str(error)
                    waiting.hear(reason)
                except BaseException:
                    self.close()
                    raise
                if self.halt.wait(pause(tries)):
                    raise Stopped(what)
        if reason:
            self._service.recovered(self.job, checkpoint, reason, time.monotonic() - failed)
        return result

    def _make(self) -> None:
        self._session = session = self._service.session()
        self._adapter = session.adapter(self.job, self.halt)
        if self.checkpoint is not None:
            self._load()

    def _load(self) -> None:
        assert self.checkpoint is not None
        loading = self._trainer.load_state_with_optimizer(self.checkpoint)
        try:
            wait(loading, self.halt, f"loading {self.checkpoint}")
        except PolicyError as error:
            if error.trouble in (Trouble.REFUSED, Trouble.GONE):
                raise CheckpointGone(self.checkpoint, str(error)) from error
            raise

    @property
    def _trainer(self) -> tinker.TrainingClient:
        if self._adapter is None:
            self._make()
        assert self._adapter is not None
        return self._adapter

    def _train(
        self, minibatches: Iterable[list[types.Datum]], step: int
    ) -> tuple[float, int, dict[str, float]]:
        """Return when the first minibatch was submitted, how many there were, and the last one's metrics."""
        from tinker import types

        config = self._config
        adam = types.AdamParams(
            learning_rate=config.learning_rate_at(step),
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            eps=config.adam_eps,
            grad_clip_norm=config.grad_clip_norm,
        )
        calls = []
        began = math.inf
        for data in self._collected(minibatches):
            began = min(began, time.monotonic())
            for future in self._pending:  # what has failed by now is not trained on
                if is_done(future):
                    wait(future, self.halt, "training on an earlier minibatch")
            forward = self._trainer.forward_backward(data, "ppo", loss_fn_config=self._clip())
            calls.append((forward, self._trainer.optim_step(adam)))
            when_done(calls[-1][1], partial(self._service.minibatch_done, self.job, step, time.monotonic()))
            self._pending += calls[-1]
            del data  # while the next is collected; the SDK has it, until it is answered
        metrics: dict[str, float] = {}
        for forward, update in calls:
            metrics = dict(wait(forward, self.halt, "forward_backward").metrics)
            metrics |= wait(update, self.halt, "optim_step").metrics or {}
        self._pending.clear()
        return min(began, time.monotonic()), len(calls), metrics

    def _collected(self, minibatches: Iterable[list[types.Datum]]) -> Iterator[list[types.Datum]]:
        """Yield the minibatches; what their collecting takes is no waiting for the server."""
        iterator = iter(minibatches)
        assert self._waiting is not None
        while True:
            with self._waiting.aside():
                data = next(iterator, None)
            if data is None:
                return
            yield data
            del data

    def _publish(self, name: str, began: float, count: int, metrics: dict[str, float]) -> Update:
        trained = time.monotonic()
        self._pending = saving, publishing = [
            self._trainer.save_state(name),
            self._trainer.save_weights_for_sampler(name=name),
        ]
        sampler = wait(publishing, self.halt, "publishing").path
        checkpoint = wait(saving, self.halt, "saving a checkpoint").path
        self._pending = []
        self.checkpoint = checkpoint
        return Update(checkpoint, sampler, count, metrics, trained - began, time.monotonic() - trained)

    def _clip(self) -> dict[str, float]:
        config = self._config
        return {"clip_low_threshold": config.clip_low, "clip_high_threshold": config.clip_high}


class PolicyService:
    """One training server: its samplers, and the clients that train on it. close() ends all that was begun."""

    def __init__(
        self,
        config: TrainingConfig,
        address: tuple[str, str],
        halt: Halt,
        log: Callable[..., None] = lambda event, **fields: None,
    ) -> None:
        """address: the server's URL and key. log: of a run folder, or what takes its place."""
        self.config = config
        self.stop_tokens: list[int] = []
        self._address = address
        self._halt, self._log = halt, log
        self._clients: list[PolicyClient] = []
        self._sessions = weakref.WeakSet[Session]()
        self._closed = False
        self.watch = Watch(log, lambda: ailment(*self._address))
        self._line = Line(self.session, self.watch)

    def session(self) -> Session:
        """Return a new session, which the caller closes. Raises Stopped after close()."""
        if self._closed:
            raise Stopped
        self._sessions.add(made := Session(self.config, self._address))
        return made

    def client(self, job: int, halt: threading.Event | None = None) -> PolicyClient:
        """Return a job's client, whose adapter is made by its first call. halt: ends its waiting."""
        made = PolicyClient(self, job, halt or self._halt)
        self._clients.append(made)
        return made

    def tokenizer(self, client: PolicyClient) -> Any:
        """Return the configured tokenizer, else the one that the server names (a path or a hub name)."""
        name, revision = self.config.tokenizer, self.config.tokenizer_revision
        if name is None:
            name = client.tokenizer_name()

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

        return in_thread(load, self._halt, f"loading the tokenizer {name}", START_TIMEOUT)

    def sampler(
        self, path: str, *, temperature: float | None = None, halt: threading.Event | None = None
    ) -> PolicySampler:
        """Return the policy that was published under a path. halt: ends its waiting."""
        chosen = self.config.temperature if temperature is None else temperature
        return PolicySampler(self._line, path, self.stop_tokens, chosen, halt or self._halt)

    def base_sampler(
        self, *, temperature: float | None = None, halt: threading.Event | None = None
    ) -> PolicySampler:
        """Return the base model itself: the reference of the KL term, and what training starts from."""
        return self.sampler(self.config.base_model, temperature=temperature, halt=halt)

    def recovered(self, job: int, checkpoint: str | None, reason: str, seconds: float) -> None:
        """Log that a job's adapter was made anew from a checkpoint, or with None from the start."""
        about = {"checkpoint": checkpoint, "reason": reason, "seconds": round(seconds, 1)}
        self._log("recovered", job=f"train-job{job}", **about)

    def minibatch_done(self, job: int, step: int, submitted: float) -> None:
        """Log that a minibatch was trained on, and how long after its submission (by time.monotonic())."""
        took = time.monotonic() - submitted
        self._log("minibatch", job=f"train-job{job}", step=step, seconds=round(took, 4))

    def close(self) -> None:
        """End all sessions, with the heartbeats that the SDK sends for them. Waits for a server a moment at most."""
        self._closed = True
        for client in self._clients:
            client.close()
        self._line.close()
        self.watch.close()
        settle(self._sessions)
