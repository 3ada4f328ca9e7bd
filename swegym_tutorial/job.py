"""The asynchronous loop of one LoRA client: rollouts, grading and training, joined by queues.

A producer starts groups under the newest published policy, workers run and grade their attempts, and the
trainer takes finished groups, updates the policy and publishes it. Where a batch has a fixed number of groups, its
first minibatches are trained on while the last ones are still collected. This is the second border where exceptions
are caught: an error in any thread ends the job and is raised by `run()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator, Sequence
from typing import Any

from .attempts import AttemptRunner, Identity, Workers
from .batches import Assembly, Batch, NoLearningSignal, References, task_at, why_fruitless
from .checkpoints import (
    checkpoint_of,
    go_back,
    gone,
    log_last_step,
    read_checkpoint,
    write_checkpoint,
)
from .config import TrainingConfig
from .events import RunFolder
from .grading import Episode
from .halt import Halt, HoursOver, OutOfTime, Stopped
from .intake import Intake
from .minibatch import Fate, Group, fate_of, split_evenly
from .policy import CheckpointGone, PolicyClient, PolicyService, Update
from .rollout import Rollout
from .sampler import PolicySampler
from .tasks import Task


class WorkerFailed(Exception):
    """Carries a worker's error through the update, which would take a PolicyError for the trainer's own."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


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
        halt: Halt,
        *,
        missing: Container[str] = (),
        from_step: int | None = None,
    ) -> None:
        """halt: ends all that the job does; client and samplers wait on it too. missing: ids of tasks that cannot be
        opened now. from_step: go on from the checkpoint after so many steps, and not from the last one."""
        self.index, self.name = index, f"train-job{index}"
        self._config = config
        self._tasks = tasks
        self._service = service
        self._client = client
        self._attempts = attempts
        self._folder = folder
        self._halt = halt
        self._missing, self._from_step = missing, from_step
        self._time_is_up = False
        base = service.base_sampler(halt=halt) if config.kl_coef else None
        self._references = References(base, config, self.name, folder.log)
        self._intake = Intake(config, lambda number: task_at(tasks, config.seed, index, number).instance_id)
        self._sampler: PolicySampler | None = None
        self._pools: list[Workers] = []

    @property
    def version(self) -> int:
        """How often this job has published: the version of its newest policy."""
        return self._intake.version

    def end_of_time(self) -> None:
        """Have the job end now, without the batch that it fills or trains on."""
        self._time_is_up = True
        self._halt.set()

    def join(self, timeout: float) -> bool:
        """Wait for the threads, after run(); returns whether all have ended."""
        deadline = time.monotonic() + timeout
        return all(pool.join(deadline - time.monotonic()) for pool in self._pools)

    # -- The trainer: this thread ------------------------------------------------------------------

    def run(self, phase: str, deadline: float) -> PolicySampler:
        """Train until all steps are done or the deadline (time.time()) is over; returns the last policy.

        Raises Stopped when told to stop, NoLearningSignal, TooManyFaults, PolicyError, CheckpointError, and what any
        worker raised.
        """
        step = 0
        try:
            step = self._restore(phase)
            if step < self._config.steps:
                self._start_workers(phase)
            while step < self._config.steps:
                self._do_step(step, phase, deadline)
                step += 1
        except (OutOfTime, Stopped) as end:
            if isinstance(end, Stopped) and not self._time_is_up:
                raise
            self._folder.log("out_of_time", job=self.name, step=step, hours=self._config.hours)
        finally:
            self._halt.set()
            for pool in self._pools:
                pool.close()
        if self._sampler is None:
            raise HoursOver(f"{self.name}: the run's hours were over before its training could begin")
        return self._service.sampler(self._sampler.path)  # one that the job's end does not halt

    def _start_workers(self, phase: str) -> None:
        config = self._config
        rollouts = Workers(config.rollout_workers, f"{self.name}-rollout")
        graders = Workers(config.grading_workers, f"{self.name}-grading")
        producer = Workers(1, f"{self.name}-producer")
        self._asker = Workers(1, f"{self.name}-references")
        self._pools = [producer, rollouts, graders, self._asker]
        self._intake.queued = rollouts.waiting
        waiting = threading.BoundedSemaphore(config.grading_queue_size)
        producer.submit(lambda: self._guard(self._produce, phase, rollouts, graders, waiting))

    def _do_step(self, step: int, phase: str, deadline: float) -> None:
        """Fill a batch and train on it, save, publish, and write the checkpoint and the step's line.

        Raises OutOfTime, Stopped and the like before the batch is full: what of it was trained on is then dropped.
        """
        batch = Batch(time.monotonic(), self._config.min_group_size)
        self._intake.batches_left = self._config.steps - step - 1
        name = f"{phase}-{self.name}-step{step:05d}"
        try:
            update = self._client.update(lambda: self._minibatches(batch, step, deadline), step, name)
        except CheckpointGone as error:
            raise gone(self._folder.checkpoint(self.index), self.name, error.path, error) from error
        except WorkerFailed as failed:
            raise failed.error from None
        version = self._intake.version + 1
        # What is logged is in the checkpoint too: of a process that is killed between the two, the next part logs it.
        result = batch.result(step, version, update, time.monotonic())
        self._take_over(update, step, version, phase, result)
        self._folder.log("step_done", job=self.name, **result)

    def _minibatches(self, batch: Batch, step: int, deadline: float) -> Iterator[list[Any]]:
        """Yield each minibatch when its groups are in, where their number is known before; else when the batch is full.

        Called anew where an update failed: it first yields what the batch holds already. Without staleness nothing is
        trained on before the batch is full, as the trainer's timing must not change what is sampled.
        """
        config = self._config
        known = config.groups_per_batch if config.max_groups_per_batch is None and config.max_staleness else 0
        for places in split_evenly(range(known), config.minibatch_groups):
            self._fill(batch, deadline, places[-1] + 1)
            yield from filter(None, [self._prepare(batch, places)])
        self._fill(batch, deadline)
        if batch.filled is None:
            batch.filled = time.monotonic()
            numbers = [group.number for group in batch.trained()]
            self._folder.log("training_start", job=self.name, step=step, groups=numbers)
        for places in split_evenly(range(known, len(batch.kept)), config.minibatch_groups):
            yield from filter(None, [self._prepare(batch, places)])

    def _prepare(self, batch: Batch, places: list[int]) -> list[Any]:
        return batch.minibatch(places, self._config.kl_coef, self._folder.log)

    def _fill(self, batch: Batch, deadline: float, kept: int | None = None) -> None:
        """Take finished groups until the batch has so many kept ones; None: until it is full. Raises OutOfTime."""
        intake = self._intake
        with intake.change:
            intake.room = batch.room(self._config)
            intake.change.notify_all()
        while kept is None or len(batch.kept) < kept:
            if (group := self._next_group(batch, deadline)) is None:
                return
            fate = fate_of(group, intake.version, self._config.min_group_size, self._config.max_staleness)
            self._note(batch, group, fate)
            intake.taken(group, batch.room(self._config))
            if batch.useless >= self._config.max_fruitless_groups:
                raise NoLearningSignal(why_fruitless(self._folder.events, self.name, batch.useless))

    def _next_group(self, batch: Batch, deadline: float) -> Group | None:
        """Wait for a group that the batch may take; None: it is full, and no group would be too old for the next."""
        intake = self._intake
        with intake.change:
            while True:
                if self._halt.is_set():
                    raise Stopped
                if error := intake.error():
                    raise WorkerFailed(error)
                if batch.room(self._config) == 0 and intake.may_close():
                    return None
                if (group := intake.choose()) is not None:
                    return group
                if time.time() >= deadline:
                    raise OutOfTime
                intake.change.wait(0.2)

    def _note(self, batch: Batch, group: Group, fate: Fate) -> None:
        batch.take(group, fate, self._references.take(group, fate))
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

    def _take_over(
        self, update: Update, step: int, version: int, phase: str, result: dict[str, Any] | None
    ) -> None:
        """Go on with what was published, and write the checkpoint."""
        with self._intake.change:  # the producer sees both, or neither
            self._sampler = self._service.sampler(update.sampler, halt=self._halt)
            next_group, unfinished = self._intake.published(version)
        checkpoint = {
            "step": step,
            "policy_version": version,
            "checkpoint": update.checkpoint,
            "sampler": update.sampler,
            "next_group": next_group,
            "unfinished_groups": unfinished,
            "seed": self._config.seed,
            "phase": phase,
        }
        keep = self._config.keep_checkpoints
        self._folder.sync()
        write_checkpoint(self._folder.checkpoint(self.index), checkpoint, result, keep)

    def _restore(self, phase: str) -> int:
        """Take over the last checkpoint, or make one of the start; returns the step to begin with."""
        path = self._folder.checkpoint(self.index)
        if not path.exists():
            self._take_over(self._client.publish(f"{phase}-{self.name}-start"), -1, 0, phase, None)
            return 0
        saved = read_checkpoint(path)
        log_last_step(self._folder, self.name, saved)
        back = self._from_step is not None
        if self._from_step is not None:
            saved = checkpoint_of(path, self._from_step - 1)
        done = saved["step"] + 1
        if done < self._config.steps or back:  # else: a finished run that was resumed
            try:
                self._client.restore(saved["checkpoint"])
            except CheckpointGone as error:
                raise gone(self._folder.checkpoint(self.index), self.name, error.path, error) from error
        if back:
            go_back(path, saved["step"])  # only now: the server has it
            self._folder.log("rolled_back", job=self.name, step=saved["step"])
        intake = self._intake
        intake.version, intake.next_group = saved["policy_version"], saved["next_group"]
        intake.left.extend(saved["unfinished_groups"])
        self._sampler = self._service.sampler(saved["sampler"], halt=self._halt)
        self._folder.log(
            "resumed",
            job=self.name,
            step=saved["step"],
            checkpoint=saved["checkpoint"],
            restarted=saved["unfinished_groups"] if done < self._config.steps else [],
        )
        return done

    # -- The producer and the workers --------------------------------------------------------------

    def _guard(self, work: Any, *args: Any) -> None:
        """Run a worker's call; what it raises is raised again by the trainer."""
        try:
            work(*args)
        except Stopped:
            pass
        except BaseException as error:
            self._intake.failed(error)

    def _produce(
        self, phase: str, rollouts: Workers, graders: Workers, waiting: threading.BoundedSemaphore
    ) -> None:
        intake = self._intake
        while True:
            with intake.change:
                while self._attempts.paused or not intake.may_start():
                    if self._halt.is_set():
                        return
                    intake.change.wait(0.2)
                if self._halt.is_set():
                    return
                number = intake.start()
                version, sampler = intake.version, self._sampler
            task = task_at(self._tasks, self._config.seed, self.index, number)
            if task.instance_id in self._missing:
                self._intake.completed(Group(number, task.instance_id, version, (), self._config.group_size))
                continue
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
        if self._halt.is_set():
            return
        self._intake.attempt_began()
        rollout = self._attempts.rollout(assembly.task, sampler, identity, self._halt)
        if rollout is None:
            self._finish(assembly, identity.attempt, None)
            return
        while not waiting.acquire(timeout=0.2):
            if self._halt.is_set():
                return
        graders.submit(lambda: self._guard(self._grade, assembly, rollout, identity, waiting))

    def _grade(
        self, assembly: Assembly, rollout: Rollout, identity: Identity, waiting: threading.BoundedSemaphore
    ) -> None:
        try:
            if not self._halt.is_set():
                episode = self._attempts.grade(assembly.task, rollout, identity, self._halt)
                self._finish(assembly, identity.attempt, episode)
        finally:
            waiting.release()

    def _finish(self, assembly: Assembly, attempt: int, episode: Episode | None) -> None:
        if (group := assembly.put(attempt, episode)) is not None:
            number = group.number
            self._references.expect(group)
            self._intake.completed(group)
            self._asker.submit(lambda: self._guard(self._references.ask, number))
