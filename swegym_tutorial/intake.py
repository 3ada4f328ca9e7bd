"""What a job has under way: the groups that were started, those that are complete, and which the trainer takes next.

A group may be trained on as long as its policy is at most `max_staleness` publications old. So no more groups are
started than the batch being filled and the next ones can take, and the batch keeps room for those that would be too
old after the next publication, and waits for them: a task is never lost for being slow. After the last batch nothing
follows: for it so many are started as will give it its groups, by the share that had a signal until now.

Production never waits for what costs nothing: a complete group without a signal gives its place to another at once,
where a batch takes any number of such groups. And no group starts while attempts wait for a worker: it would only age.
Without staleness groups start in the order of their numbers, one for each place: order is part of exactness there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from .config import TrainingConfig
from .minibatch import Fate, Group, fate_of, without_tokens
from .pace import Pace


class Intake:
    """Shared by a job's producer, workers and trainer; `change` guards all of it, and is notified of all changes."""

    def __init__(self, config: TrainingConfig, task_of: Callable[[int], str] = str) -> None:
        """task_of: the task of a group's number."""
        self.change = threading.Condition()
        self.version = 0  # of the newest policy
        self.next_group = 0
        self.left: list[int] = []  # lower numbers to be started yet, ascending: an earlier part's, or put off
        self.batches_left = config.steps  # that follow the one being filled
        self.room = 0  # groups that the batch being filled may still take; 0 while none is filled
        self.queued: Callable[[], int] = lambda: 0  # attempts that wait for a worker
        self._config = config
        self._pace = Pace(config, task_of)
        self._drains = config.max_staleness > 0 and config.max_groups_per_batch is None
        self._versions: dict[int, int] = {}  # of each group under way, its policy's version
        self._began: dict[int, float] = {}  # of each whose attempts are not all over, by time.monotonic()
        self._drained: set[int] = set()  # of those under way, the complete ones that take no place
        self._complete: list[Group] = []
        self._with_signal = self._all_over = 0  # groups, of this part
        self._error: BaseException | None = None

    # -- The producer's side -----------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether one more group would find a worker, and room while its policy is fresh. Call it under `change`."""
        config = self._config
        places = self._places()
        return (
            len(self._began) < config.inflight_groups
            and len(self._versions) - len(self._drained) < places
            and len(self._complete) < config.completed_group_buffer * places
            and self._workers_are_free()
        )

    def _places(self) -> int:
        """How many groups may be under way, without those that take no place."""
        batch, staleness = self._config.groups_per_batch, self._config.max_staleness
        if self.batches_left or not self._drains:
            return self.room + batch * min(staleness, self.batches_left)
        share = (self._with_signal + 1) / (self._all_over + 2)  # a half, before anything is known
        return min(math.ceil(self.room / share), self.room + batch * staleness)

    def start(self) -> int:
        """Return the number of the next group, which counts as under way from now. Call it under `change`."""
        now = time.monotonic()
        number = self._pace.choose(self.left, self.next_group, now)
        if number < self.next_group:
            self.left.remove(number)
        self.left += range(self.next_group, number)  # put off
        self.next_group = max(self.next_group, number + 1)
        self._versions[number] = self.version
        self._began[number] = now
        return number

    def _workers_are_free(self) -> bool:
        return self._config.max_staleness == 0 or self.queued() < self._config.group_size

    # -- The workers' side -------------------------------------------------------------------------

    def attempt_began(self) -> None:
        """A worker has taken an attempt from the queue."""
        with self.change:
            if self._workers_are_free():
                self.change.notify_all()

    def completed(self, group: Group) -> None:
        """All attempts of a group are over."""
        with self.change:
            self._pace.completed(group.task_id, time.monotonic() - self._began.pop(group.number))
            useless = self._is_useless(group)
            self._all_over += 1
            self._with_signal += not useless
            if self._drains and useless:
                self._drained.add(group.number)
                group = without_tokens(group)  # many may wait for the trainer, to be counted
            self._complete.append(group)
            self.change.notify_all()

    def _is_useless(self, group: Group) -> bool:
        fate = fate_of(group, group.policy_version, self._config.min_group_size)
        return fate in (Fate.UNIFORM, Fate.FAILED)

    def failed(self, error: BaseException) -> None:
        """A thread has raised: the trainer raises it again."""
        with self.change:
            self._error = self._error or error
            self.change.notify_all()

    # -- The trainer's side ------------------------------------------------------------------------

    def error(self) -> BaseException | None:
        return self._error

    def choose(self) -> Group | None:
        """Return the group that the batch takes next, if it is there. Call it under `change`.

        It keeps room for those that would be too old for the next batch, and the last batch does too, as a task is
        never lost for being slow.
        """
        aging = [group for group in self._complete if self._ages(group.policy_version)]
        if aging:
            return aging[0]
        return self._complete[0] if self._complete and self.room > self._aging_on_their_way() else None

    def taken(self, group: Group, room: int) -> None:
        """The batch has taken a group, and has so much room left."""
        with self.change:
            self._complete.remove(group)
            del self._versions[group.number]
            self._drained.discard(group.number)
            self.room = room
            self.change.notify_all()

    def may_close(self) -> bool:
        """Whether no group would be too old after the next publication. Call it under `change`."""
        return not any(self._ages(version) for version in self._versions.values())

    def published(self, version: int) -> tuple[int, list[int]]:
        """Take the new version; returns the next group's number, and those under way or left to be started."""
        with self.change:
            self.version = version
            self._pace.published(time.monotonic())
            self.change.notify_all()
            return self.next_group, sorted({*self._versions, *self.left})

    def _ages(self, version: int) -> bool:
        return self.version + 1 - version > self._config.max_staleness

    def _aging_on_their_way(self) -> int:
        here = {group.number for group in self._complete}
        return sum(self._ages(version) for number, version in self._versions.items() if number not in here)
