"""The real TrainingJob and PolicyClient between simulated parts, with time compressed.

Attempts and gradings sleep for as long as drawn, and one trainer serves the calls of all clients one after another:
what is measured is what the loop's own rules cost. A simulated second lasts 1 / compression real ones. Knows nothing
of tables.
"""

from __future__ import annotations

import math
import queue
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.attempts import AttemptRunner, Identity
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt
from swegym_tutorial.job import TrainingJob
from swegym_tutorial.minibatch import datum
from swegym_tutorial.policy import PolicyClient, PolicyService
from swegym_tutorial.rollout import Ending, Rollout
from swegym_tutorial.tasks import Task
from swegym_tutorial.watch import Watch

ATTEMPT_SIGMA, GRADING_SIGMA = 0.6, 0.5  # of the logarithms of the durations


@dataclass(frozen=True)
class Timing:
    """How long everything takes, in simulated seconds."""

    attempt: float  # the median
    grading: float  # the median
    forward_backward: float = 120.0  # a minibatch
    optim_step: float = 5.0
    save_state: float = 15.0
    publish: float = 25.0
    reference: float = 8.0  # an episode; all of them at once


@dataclass(frozen=True)
class World:
    """The tasks, how often each is solved, and how many times as long as others it takes."""

    tasks: tuple[Task, ...]
    rates: dict[str, float]
    factors: dict[str, float]

    def mixed_rate(self, group_size: int) -> float:
        """Return the share of groups that will have mixed rewards, over all tasks."""
        return sum(1 - p**group_size - (1 - p) ** group_size for p in self.rates.values()) / len(self.rates)

    def mean_factor(self) -> float:
        return sum(self.factors.values()) / len(self.factors)

    def slow(self, instance_id: str) -> bool:
        return self.factors[instance_id] > 1


def make_world(seed: int = 3, slow_every: int | None = None, factor: float = 8.0) -> World:
    """Return 31 tasks: 15 never solved, 16 at rates drawn from 0.05-0.9; one in `slow_every` of each is slow.

    Seed 3 makes 44 of 100 groups of 8 mixed, and the slow tasks' as often as the others'.
    """
    draw = random.Random(f"world {seed}")
    rates = [0.0] * 15 + [draw.uniform(0.05, 0.9) for _ in range(16)]
    (some, *_) = load_tasks()
    tasks = tuple(replace(some, instance_id=f"simulated__task-{n}") for n in range(31))
    factors = [1.0] * 31
    for first, count in ((0, 15), (15, 16)):
        if slow_every is not None:
            for n in range(slow_every // 2, count, slow_every):
                factors[first + n] = factor
    ids = [task.instance_id for task in tasks]
    return World(tasks, dict(zip(ids, rates, strict=True)), dict(zip(ids, factors, strict=True)))


class Clock:
    """Compressed time. Sums up what was slept against what was asked for."""

    def __init__(self, compression: float) -> None:
        self.compression = compression
        self.over = threading.Event()  # ends all sleeping
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._asked = self._slept = 0.0

    def now(self) -> float:
        """Return the simulated seconds since the start."""
        return (time.monotonic() - self._began) * self.compression

    def sleep(self, seconds: float) -> None:
        asked, began = seconds / self.compression, time.monotonic()
        # An event that a thousand threads wait on would cost more than all the rest of the simulation.
        while (left := began + asked - time.monotonic()) > 0 and not self.over.is_set():
            time.sleep(min(left, 0.5))
        if not self.over.is_set():
            with self._lock:
                self._asked += asked
                self._slept += time.monotonic() - began

    @property
    def error(self) -> float:
        """How much longer the sleeping took than was asked for, as a share."""
        return self._slept / self._asked - 1 if self._asked else 0.0


class Trainer:
    """One trainer for all clients: it serves calls in the order in which they come."""

    def __init__(self, clock: Clock) -> None:
        self.busy = 0.0  # simulated seconds
        self._clock = clock
        self._calls: queue.SimpleQueue[tuple[float, float, Any, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="simulated-trainer", daemon=True)
        self._thread.start()

    def call(self, seconds: float, answer: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((self._clock.now(), seconds, answer, future))
        return future

    def _serve(self) -> None:
        free = 0.0
        while (call := self._calls.get()) is not None:
            came, seconds, answer, future = call
            # From when it could begin, not from now: late wakings don't add up.
            free = max(free, came) + seconds
            self._clock.sleep(max(0.0, free - self._clock.now()))
            self.busy += seconds
            future.set_result(answer)

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(10)


class Adapter:
    """What the SDK calls a training client: its calls go to the one trainer."""

    def __init__(self, trainer: Trainer, timing: Timing) -> None:
        self._trainer, self._timing = trainer, timing

    def forward_backward(self, data: Any, loss: str, loss_fn_config: Any = None) -> Future[Any]:
        return self._trainer.call(self._timing.forward_backward, SimpleNamespace(metrics={}))

    def optim_step(self, adam: Any) -> Future[Any]:
        return self._trainer.call(self._timing.optim_step, SimpleNamespace(metrics={}))

    def save_state(self, name: str) -> Future[Any]:
        return self._trainer.call(self._timing.save_state, SimpleNamespace(path=f"tinker://m/weights/{name}"))

    def save_weights_for_sampler(self, name: str) -> Future[Any]:
        return self._trainer.call(
            self._timing.publish, SimpleNamespace(path=f"tinker://m/sampler_weights/{name}")
        )


class Service:
    """What the clients take for the training server. Names policies by their paths."""

    def __init__(self, config: TrainingConfig, clock: Clock, trainer: Trainer, timing: Timing) -> None:
        self.config = config
        self.watch = Watch(lambda event, **fields: None, lambda: None)
        self._clock, self._trainer, self._timing = clock, trainer, timing

    def session(self) -> Any:
        return SimpleNamespace(
            adapter=lambda job, halt: Adapter(self._trainer, self._timing), close=lambda: None
        )

    def minibatch_done(self, job: int, step: int, submitted: float) -> None:
        """Nobody looks."""

    def sampler(self, path: str, halt: Any = None) -> Any:
        return SimpleNamespace(path=path)

    def base_sampler(self, halt: Any = None) -> Any:
        """Return the reference: its answers take their time, any number at once."""

        def reference(tokens: np.ndarray, settled: Any) -> Any:
            asked: list[float] = []

            def begin() -> None:
                asked.append(self._clock.now())

            def result() -> np.ndarray:
                ready = (asked or [self._clock.now()])[0] + self._timing.reference
                self._clock.sleep(max(0.0, ready - self._clock.now()))
                return np.full(tokens.shape, -1.0)

            return SimpleNamespace(begin=begin, result=result)

        return SimpleNamespace(path="base", reference=reference)


class Attempts:
    """Attempts that sleep, and are solved at their task's rate. What is drawn depends on the identity alone."""

    def __init__(self, clock: Clock, timing: Timing, world: World, seed: int) -> None:
        self.paused = False
        self.started: dict[tuple[str, int], str] = {}  # of each job's groups, the task
        self._clock, self._timing, self._world, self._seed = clock, timing, world, seed
        self._lock = threading.Lock()

    def _draw(self, identity: Identity) -> random.Random:
        return random.Random(f"{self._seed} {identity.job} {identity.group} {identity.attempt}")

    def rollout(self, task: Task, sampler: Any, identity: Identity, halt: Any) -> Rollout:
        with self._lock:
            self.started[identity.job, identity.group] = task.instance_id
        seconds = self._timing.attempt * math.exp(self._draw(identity).gauss(0, ATTEMPT_SIGMA))
        self._clock.sleep(seconds * self._world.factors[task.instance_id])
        mask = np.array([False, True, True])
        tokens, logprobs = np.array([1, 2, 3], np.int32), -mask.astype(np.float32)
        return Rollout(task.instance_id, tokens, mask, logprobs, (), Ending.FINAL, b"x", seconds)

    def grade(self, task: Task, rollout: Rollout, identity: Identity, halt: Any) -> Episode:
        draw = self._draw(identity)
        draw.gauss(0, ATTEMPT_SIGMA)
        solved = draw.random() < self._world.rates[task.instance_id]
        seconds = self._timing.grading * math.exp(draw.gauss(0, GRADING_SIGMA))
        self._clock.sleep(seconds)
        return Episode(rollout, Verdict(Outcome.RESOLVED if solved else Outcome.UNRESOLVED, seconds=seconds))


@dataclass(frozen=True)
class Bound:
    """The shortest possible mean time of a batch, in simulated seconds, and what it is made of."""

    trainer: float  # all clients' calls, one after another
    rollouts: float
    gradings: float

    @property
    def seconds(self) -> float:
        return max(self.trainer, self.rollouts, self.gradings)


def bound(config: TrainingConfig, timing: Timing, world: World) -> Bound:
    """Return what no rule can beat: a batch of mixed groups, made and trained at full speed.

    Where max_groups_per_batch is set, a batch is that many groups, whatever their rewards.
    """
    rate = world.mixed_rate(config.group_size)
    groups = config.max_groups_per_batch or config.groups_per_batch / rate
    kept = groups * rate
    attempts = groups * config.group_size
    minibatches = max(1.0, kept / config.minibatch_groups)
    calls = minibatches * (timing.forward_backward + timing.optim_step) + timing.save_state + timing.publish
    attempt = timing.attempt * math.exp(ATTEMPT_SIGMA**2 / 2) * world.mean_factor()
    grading = timing.grading * math.exp(GRADING_SIGMA**2 / 2)
    return Bound(
        config.clients * calls,
        attempts * attempt / config.rollout_workers,
        attempts * grading / config.grading_workers,
    )


@dataclass(frozen=True)
class Outcomes:
    """What a simulation has seen. Times in simulated seconds."""

    groups: tuple[dict[str, Any], ...]  # the log's events of finished groups
    steps: dict[str, list[float]]  # of each job, when its batches were published
    started: dict[tuple[str, int], str]  # of each job's groups that were begun, the task
    trainer_busy: float  # share of the time until the last publication
    clock_error: float  # see Clock

    def batch_seconds(self) -> float:
        """Return a client's mean time for a batch after the first, while all clients are at work on such ones."""
        begin = max(times[0] for times in self.steps.values())
        end = min(times[-1] for times in self.steps.values())
        if end <= begin:
            raise ValueError("too few batches: some client was done before another had its first")
        done = [
            np.diff(np.interp([begin, end], times, np.arange(len(times)))) for times in self.steps.values()
        ]
        return float((end - begin) / np.mean(done))

    def first_batch(self) -> float:
        """Return when the first batch was published, the mean over the clients."""
        return float(np.mean([times[0] for times in self.steps.values()]))


class Simulation:
    """All clients of a run with their parts. `run()` is called once."""

    def __init__(
        self, config: TrainingConfig, timing: Timing, world: World, compression: float = 300.0
    ) -> None:
        self.config, self.timing, self.world = config, timing, world
        datum(np.zeros(2, np.int32), *[np.zeros(2, np.float32)] * 2)  # imports the SDK, before the clock runs
        self.clock = Clock(compression)
        self.trainer = Trainer(self.clock)
        self.service = Service(config, self.clock, self.trainer, timing)
        self.attempts = Attempts(self.clock, timing, world, config.seed)
        self.halt = Halt()

    def job(self, index: int, folder: RunFolder) -> TrainingJob:
        halt, service = self.halt.child(), cast(PolicyService, self.service)
        client = PolicyClient(service, index, halt)
        attempts = cast(AttemptRunner, self.attempts)
        return TrainingJob(index, self.config, self.world.tasks, service, client, attempts, folder, halt)

    def run(self, seconds: float = 600.0) -> Outcomes:
        """Train all clients for config.steps batches; raises what a job raised. seconds: real ones, at most."""
        with tempfile.TemporaryDirectory(prefix="simulation-") as path:
            folder = RunFolder(Path(path) / "run")
            folder.open()
            jobs = [self.job(n, folder) for n in range(self.config.clients)]
            began, offset = time.time(), self.clock.now()
            try:
                self._run_all(jobs, time.time() + seconds)
            finally:
                self.clock.over.set()
                self.halt.set()
                self.trainer.close()
                self.service.watch.close()
                folder.close()
            return self._outcomes(EventReader(folder.path).read(), began - offset / self.clock.compression)

    def _run_all(self, jobs: Sequence[TrainingJob], deadline: float) -> None:
        errors: list[BaseException] = []

        def work(job: TrainingJob) -> None:
            try:
                job.run("simulated", deadline)
            except BaseException as error:
                errors.append(error)
                self.halt.set()

        threads = [threading.Thread(target=work, args=(job,), name=job.name) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _outcomes(self, events: Sequence[dict[str, Any]], began: float) -> Outcomes:
        steps: dict[str, list[float]] = {}
        for event in events:
            if event["event"] == "step_done":
                steps.setdefault(event["job"], []).append(event["time"] - began)
        short = [job for job, times in steps.items() if len(times) < self.config.steps]
        if short or len(steps) < self.config.clients:
            raise TimeoutError(
                f"the simulated hours ended before all batches were done: {short or 'no step'}"
            )
        scaled = {job: [t * self.clock.compression for t in times] for job, times in steps.items()}
        return Outcomes(
            tuple(e for e in events if e["event"] in ("group", "group_failed")),
            scaled,
            self.attempts.started,
            self.trainer.busy / max(times[-1] for times in scaled.values()),
            self.clock.error,
        )
