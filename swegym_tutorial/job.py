"""The asynchronous loop of one LoRA client: rollouts, grading and training, joined by queues.

A producer starts groups under the newest published policy, workers run and grade their attempts, and the
trainer takes finished groups, updates the policy and publishes it. This is the second border where exceptions
are caught: an error in any thread ends the job and is raised by `run()`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .attempts import AttemptRunner, Identity, Workers
from .batches import WORK, Assembly, Batch, NoLearningSignal, read_checkpoint, task_at, why_fruitless
from .config import TrainingConfig
from .events import RunFolder, dumps, write_atomically
from .grading import Episode
from .minibatch import Fate, Group, fate_of, prepare_minibatch, split_evenly
from .policy import PolicyClient, PolicySampler, PolicyService, Stopped
from .rollout import Rollout
from .tasks import Task


class TrainingJob:
    """Trains one LoRA client. `run()` is called once, from a thread of its own."""

    def __init__(
        self,
        index: int,
        config: TrainingConfig,
        tasks: Sequence[Task],
        service: PolicyService,
        client: PolicyClient,
        attempts: AttemptRunner,
        folder: RunFolder,
        stop: threading.Event,
        paused: threading.Event,
    ) -> None:
        self.index = index
        self.name = f"train-job{index}"
        self._config = config
        self._tasks = tasks
        self._service = service
        self._client = client
        self._attempts = attempts
        self._folder = folder
        self._stop = stop
        self._paused = paused
        self._reference: PolicySampler | None = service.base_sampler() if config.kl_coef else None
        self._completed: queue.Queue[Group | BaseException] = queue.Queue()
        self._change = threading.Condition()  # guards what follows, and wakes the producer
        self._version = 0
        self._sampler: PolicySampler | None = None
        self._restart: list[int] = []  # groups that a resumed run has to start anew
        self._next_group = 0
        self._started: set[int] = set()  # in flight, or waiting for the trainer
        self._inflight = 0
        self._room_in_batch = 0  # groups that the batch being filled may still take
        self._over = threading.Event()

    # -- The trainer: this thread ------------------------------------------------------------------

    def run(self, phase: str, deadline: float) -> PolicySampler:
        """Train until all steps are done or the deadline (time.time()) is over; returns the last policy.

        Raises Stopped when the run is told to stop, NoLearningSignal, PolicyError, and what any worker raised.
        """
        config = self._config
        step = self._restore()
        if step >= config.steps:  # a finished run that was resumed
            return self._service.sampler(self._read_checkpoint()["sampler"])
        self._sampler = self._publish(f"{phase}-{self.name}-start")
        rollouts = Workers(config.rollout_workers, f"{self.name}-rollout")
        graders = Workers(config.grading_workers, f"{self.name}-grading")
        waiting = threading.BoundedSemaphore(config.grading_queue_size)
        producer = threading.Thread(
            target=self._guard,
            args=(self._produce, phase, rollouts, graders, waiting),
            daemon=True,
            name=self.name,
        )
        producer.start()
        try:
            while step < config.steps:
                batch = self._fill_batch(deadline)
                if batch is None:
                    self._folder.log("out_of_time", job=self.name, step=step, hours=config.hours)
                    break
                self._train_on(batch, phase, step)
                step += 1
            return self._sampler
        finally:
            self._over.set()
            with self._change:
                self._change.notify_all()
            for workers in (rollouts, graders):
                workers.close(timeout=1.0)

    def _fill_batch(self, deadline: float) -> Batch | None:
        """Take finished groups until the batch is full. Returns None when time is over."""
        config = self._config
        batch = Batch(began=time.monotonic())
        most = config.max_groups_per_batch
        useless = 0
        while True:
            seen = batch.fates.total()
            missing = config.groups_per_batch - len(batch.kept)
            if missing == 0 or (most is not None and seen >= most and batch.kept):
                self._set_room(0)
                return batch
            self._set_room(missing if most is None else max(1, min(missing, most - seen)))
            group = self._next_completed(deadline)
            if group is None:
                return None
            fate = fate_of(group, self._version, config.min_group_size)
            self._note(batch, group, fate)
            useless = useless + 1 if fate in (Fate.UNIFORM, Fate.FAILED) else 0
            if useless >= config.max_fruitless_groups:
                raise NoLearningSignal(why_fruitless(self._folder.events, self.name, useless))

    def _next_completed(self, deadline: float) -> Group | None:
        while time.time() < deadline:
            if self._stop.is_set():
                raise Stopped
            try:
                item = self._completed.get(timeout=0.2)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                raise item
            with self._change:
                self._started.discard(item.number)
                self._change.notify_all()
            return item
        return None

    def _note(self, batch: Batch, group: Group, fate: Fate) -> None:
        batch.fates[fate] += 1
        batch.lost += group.lost
        batch.rewards += group.rewards.tolist()
        for episode in group.episodes:
            batch.seconds["sampling"] += episode.rollout.sampling_seconds
            batch.seconds["tools"] += episode.rollout.tool_seconds
            batch.seconds["grading"] += 0.0 if episode.verdict.shared else episode.verdict.seconds
        if fate is Fate.KEPT:
            batch.kept.append(group)
            if self._reference is not None:
                batch.references[group.number] = [
                    self._reference.logprobs(episode.rollout.tokens) for episode in group.episodes
                ]
        self._folder.log(
            "group_failed" if fate is Fate.FAILED else "group",
            job=self.name,
            group=group.number,
            instance_id=group.task_id,
            policy_version=group.policy_version,
            fate=fate,
            rewards=group.rewards.tolist(),
            lost=group.lost,
        )

    def _minibatches(self, batch: Batch) -> Iterator[list[Any]]:
        for groups in split_evenly(batch.kept, self._config.minibatch_groups):
            references = None
            if self._reference is not None:
                references = [
                    [self._reference.reference_of(future) for future in batch.references[group.number]]
                    for group in groups
                ]
            yield prepare_minibatch(groups, references, self._config.kl_coef)

    def _train_on(self, batch: Batch, phase: str, step: int) -> None:
        """Update, save, publish, and write the checkpoint and the step's line."""
        filled = time.monotonic()
        trained = self._client.train(self._minibatches(batch), step)
        updated = time.monotonic()
        name = f"{phase}-{self.name}-step{step:05d}"
        saving = self._client.save(name)
        sampler = self._publish(name)
        state = self._client.path_of(saving, "saving a checkpoint")
        with self._change:
            self._sampler, self._version = sampler, self._version + 1
            unfinished = sorted({*self._started, *self._restart})
            next_group = self._next_group
            self._change.notify_all()
        path = self._folder.checkpoint(self.index)
        checkpoint = {
            "step": step,
            "policy_version": self._version,
            "checkpoint": state,
            "sampler": sampler.path,
            "next_group": next_group,
            "unfinished_groups": unfinished,
            "seed": self._config.seed,
            "phase": phase,
        }
        write_atomically(path, dumps(checkpoint) + "\n")
        published = time.monotonic()
        kept = [reward for group in batch.kept for reward in group.rewards.tolist()]
        self._folder.log(
            "step_done",
            job=self.name,
            step=step,
            policy_version=self._version,
            reward_mean=float(np.mean(batch.rewards)),
            reward_mean_kept=float(np.mean(kept)),
            checkpoint=state,
            attempts=len(batch.rewards),
            lost=batch.lost,
            groups={fate: batch.fates[fate] for fate in Fate},
            batch_seconds=round(published - batch.began, 3),
            fill_seconds=round(filled - batch.began, 3),
            train_seconds=round(updated - filled, 3),
            publish_seconds=round(published - updated, 3),
            work_seconds={kind: round(batch.seconds[kind], 3) for kind in WORK},
            minibatches=trained.minibatches,
            metrics=trained.metrics,
        )

    def _publish(self, name: str) -> PolicySampler:
        return self._service.sampler(self._client.path_of(self._client.publish(name), "publishing"))

    def _restore(self) -> int:
        """Take over the last checkpoint where there is one; returns the step to begin with."""
        if not self._folder.checkpoint(self.index).exists():
            return 0
        saved = self._read_checkpoint()
        self._client.load(saved["checkpoint"])
        self._version = saved["policy_version"]
        self._next_group = saved["next_group"]
        self._restart = list(saved["unfinished_groups"])
        self._folder.log("resumed", job=self.name, step=saved["step"], checkpoint=saved["checkpoint"])
        return saved["step"] + 1

    def _read_checkpoint(self) -> dict[str, Any]:
        return read_checkpoint(self._folder.checkpoint(self.index))

    @property
    def version(self) -> int:
        """How often this job has published: the version of its newest policy."""
        return self._version

    # -- The producer and the workers --------------------------------------------------------------

    def _guard(self, work: Any, *args: Any) -> None:
        """Run a worker's call; what it raises is raised again by the trainer."""
        try:
            work(*args)
        except Stopped:
            pass
        except BaseException as error:
            self._completed.put(error)

    def _set_room(self, room: int) -> None:
        with self._change:
            self._room_in_batch = room
            self._change.notify_all()

    def _may_start(self) -> bool:
        """Whether one more group would be trained on while its policy is at most one publication old.

        A group that is started now comes before the trainer in this batch or the next: so no more may be
        under way than these two can take.
        """
        config = self._config
        return (
            not self._paused.is_set()
            and self._inflight < config.inflight_groups
            and self._completed.qsize() < config.completed_group_buffer
            and len(self._started) < self._room_in_batch + config.groups_per_batch
        )

    def _produce(
        self, phase: str, rollouts: Workers, graders: Workers, waiting: threading.BoundedSemaphore
    ) -> None:
        while True:
            with self._change:
                while not self._may_start():
                    if self._over.is_set() or self._stop.is_set():
                        return
                    self._change.wait(0.2)
                if self._over.is_set() or self._stop.is_set():
                    return
                number = self._restart.pop(0) if self._restart else self._next_group
                self._next_group = max(self._next_group, number + 1)
                self._started.add(number)
                self._inflight += 1
                version, sampler = self._version, self._sampler
            task = task_at(self._tasks, self._config.seed, self.index, number)
            assembly = Assembly(number, task, version, self._config.group_size)
            for attempt in range(self._config.group_size):
                identity = Identity(phase, self.name, number, attempt, task.instance_id, version)
                rollouts.submit(
                    lambda identity=identity, assembly=assembly, sampler=sampler: self._guard(  # type: ignore[misc]
                        self._roll_out, assembly, sampler, identity, graders, waiting
                    )
                )

    def _roll_out(
        self,
        assembly: Assembly,
        sampler: PolicySampler,
        identity: Identity,
        graders: Workers,
        waiting: threading.BoundedSemaphore,
    ) -> None:
        if self._over.is_set():
            return
        rollout = self._attempts.rollout(assembly.task, sampler, identity, self._over)
        if rollout is None:
            self._finish(assembly, identity.attempt, None)
            return
        while not waiting.acquire(timeout=0.2):
            if self._over.is_set() or self._stop.is_set():
                return
        graders.submit(lambda: self._guard(self._grade, assembly, rollout, identity, waiting))

    def _grade(
        self, assembly: Assembly, rollout: Rollout, identity: Identity, waiting: threading.BoundedSemaphore
    ) -> None:
        try:
            if not self._over.is_set():
                self._finish(
                    assembly, identity.attempt, self._attempts.grade(assembly.task, rollout, identity)
                )
        finally:
            waiting.release()

    def _finish(self, assembly: Assembly, attempt: int, episode: Episode | None) -> None:
        group = assembly.put(attempt, episode)
        if group is not None:
            with self._change:
                self._inflight -= 1
            self._completed.put(group)
            with self._change:
                self._change.notify_all()
