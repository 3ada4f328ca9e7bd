"""One attempt from its start to its verdict, with retries, recorded in the run folder.

This is the first of the two borders where exceptions are caught: an infrastructure fault is tried again, and
then costs this attempt only. Knows nothing of groups' fates or of training.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from .calls import PolicyError
from .config import TrainingConfig
from .events import RunFolder
from .faults import Faults
from .grading import Episode, Grader, Outcome, Reward, rewarded
from .habits import habits_of
from .halt import Stopped
from .heap import give_back
from .rollout import Chat, Ending, RecordingLost, Rollout, Sampler, Turn, generate_rollout
from .sandbox import BackendClosed, SandboxBackend, SandboxError
from .tasks import Task

LONGEST_REASON = 2000  # characters of a fault that are logged


@dataclass(frozen=True)
class Identity:
    """Which attempt this is: the keys of its events and the names of its folder."""

    phase: str
    job: str
    group: int
    attempt: int
    instance_id: str
    policy_version: int


def sampling_seed(seed: int, identity: Identity) -> int:
    """Return the seed of an attempt's sampling: the same in every run and after a resume, and for evaluations."""
    kind = "evaluation" if _is_evaluation(identity) else identity.job
    return random.Random(f"{seed} {kind} {identity.group} {identity.attempt}").randrange(2**31)


def _is_evaluation(identity: Identity) -> bool:
    return identity.phase.startswith("evaluation")


class AttemptRunner:
    """Runs and grades attempts for one run. Safe for many threads."""

    def __init__(
        self,
        chat: Chat,
        sandboxes: SandboxBackend,
        grader: Grader,
        folder: RunFolder,
        config: TrainingConfig,
        paused: threading.Event | None = None,
        reward: Reward | None = None,
    ) -> None:
        """paused: while it is set no attempt begins. reward: in place of 1 for resolved and 0 for all else, in training;
        evaluations tell what was resolved."""
        give_back()
        self._chat = chat
        self._sandboxes = sandboxes
        self._grader = grader
        self._folder = folder
        self._config = config
        self._paused = paused or threading.Event()
        self._reward = reward
        self._lock = threading.Lock()
        self._faults: dict[str, Faults] = {}  # of each job

    @property
    def paused(self) -> bool:
        return self._paused.is_set()

    def rollout(
        self, task: Task, sampler: Sampler, identity: Identity, halt: threading.Event
    ) -> Rollout | None:
        """Return the attempt, or None where infrastructure faults took it. A long one is kept on disk alone.

        halt: nobody waits for it any more: ends it after the turn, with Stopped. Raises TooManyFaults, BackendClosed.
        """
        while self._paused.is_set():
            if halt.wait(0.1):
                raise Stopped
        key = asdict(identity)
        self._folder.log("rollout_start", **key)
        seed = sampling_seed(self._config.seed, identity)

        def on_turn(turn: Turn) -> None:
            self._folder.log(
                "sample", **key, tokens=turn.sampled_tokens, seconds=round(turn.sampling_seconds, 4)
            )
            for result in turn.results:
                self._folder.log("tool", **key, exit_code=result.exit_code, seconds=round(result.seconds, 4))
            if halt.is_set():
                raise Stopped

        rollout = self._with_retries(
            lambda: generate_rollout(
                task, sampler, self._chat, self._sandboxes, self._config, seed=seed, on_turn=on_turn
            ),
            identity,
            halt,
        )
        if rollout is None:
            return None
        where = self._where(identity)
        self._folder.save_rollout(where, rollout)
        self._folder.log(
            "rollout_ready",
            **key,
            ending=rollout.ending,
            turns=len(rollout.turns),
            broken_turns=sum(bool(turn.errors) for turn in rollout.turns),
            tokens=len(rollout.tokens),
            sampled_tokens=rollout.sampled_tokens,
            seconds=round(rollout.seconds, 4),
            sampling_seconds=round(rollout.sampling_seconds, 4),
            tool_seconds=round(rollout.tool_seconds, 4),
        )
        return self._folder.shelve(where, rollout, key)

    def grade(
        self, task: Task, rollout: Rollout, identity: Identity, halt: threading.Event
    ) -> Episode | None:
        """Return the graded attempt, or None where infrastructure faults took it. Raises as rollout().

        Neither the patch nor what the tests told is kept: it is on disk, and nobody asks for it here.
        """
        key = asdict(identity)
        self._folder.log("grading_start", **key)
        start = time.monotonic()
        verdict = self._with_retries(lambda: self._grader.grade(task, rollout.patch), identity, halt)
        if verdict is None:
            return None
        try:
            whole = rollout.whole()  # read once
            if self._reward is not None and not _is_evaluation(identity):
                verdict = rewarded(task, whole, verdict, self._reward)
            self._folder.save_episode(self._where(identity), whole, verdict)
            habits = habits_of(whole.turns)
        except RecordingLost as error:
            self._lose(identity, f"RecordingLost: {error}")
            return None
        self._faults_of(identity.job).ended()
        self._folder.log(
            "episode",
            **key,
            reward=verdict.reward,
            outcome=verdict.outcome,
            ending=rollout.ending,
            grading_seconds=round(time.monotonic() - start, 4),
            shared_verdict=verdict.shared,
            habits=habits,
            sampled_tokens=rollout.sampled_tokens,
        )
        return Episode(replace(rollout, patch=b""), replace(verdict, tests={}, log=""), habits)

    def _where(self, identity: Identity) -> Any:
        return self._folder.episode(identity.phase, identity.job, identity.group, identity.attempt)

    def _with_retries(self, work: Callable[[], Any], identity: Identity, halt: threading.Event) -> Any:
        faults = self._faults_of(identity.job)
        for tries in range(self._config.attempt_retries + 1):
            try:
                return work()
            except (SandboxError, PolicyError) as error:
                if halt.is_set():  # what fails while everything is being closed is no fault
                    raise Stopped from error
                if isinstance(error, BackendClosed):
                    raise
                reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
            self._folder.log("attempt_fault", **asdict(identity), reason=reason, tries=tries + 1)
            if tries < self._config.attempt_retries and halt.wait(faults.pause(tries)):
                raise Stopped
        self._lose(identity, reason)
        return None

    def _lose(self, identity: Identity, reason: str) -> None:
        """Log an attempt that infrastructure faults took. Raises TooManyFaults."""
        self._folder.log(
            "episode",
            **asdict(identity),
            reward=None,
            outcome=Outcome.INFRASTRUCTURE,
            ending=Ending.INFRASTRUCTURE,
            reason=reason,
        )
        self._faults_of(identity.job).lost(reason)

    def _faults_of(self, job: str) -> Faults:
        with self._lock:
            return self._faults.setdefault(job, Faults(job, self._config))


class Workers:
    """Daemon threads that take calls from a queue, so that no interpreter ever waits for them at its end."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call on one of the threads. It must not raise."""
        self._calls.put(call)

    def waiting(self) -> int:
        """Return how many calls no thread has taken yet."""
        return self._calls.qsize()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and what it holds, not to be kept while the next is waited for

    def close(self) -> None:
        """Drop what is queued, and have the threads end with what they do; returns at once."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for the threads' end after close(); returns whether all have ended."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
