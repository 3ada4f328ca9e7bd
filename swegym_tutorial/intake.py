"""What a job has under way: the groups that were started, those that are complete, and which the trainer takes next.

A group may be trained on as long as its policy is at most `max_staleness` publications old. So no more groups are
started than the batch being filled and the next ones can take, and the batch keeps room for those that would be too
old after the next publication, and waits for them: a task is never lost for being slow. Knows nothing of what a
group holds but its number and its version.
"""

from __future__ import annotations

import threading
from collections import deque

from .config import TrainingConfig
from .minibatch import Group


class Intake:
    """Shared by a job's producer, workers and trainer; `change` guards all of it, and is notified of all changes."""

    def __init__(self, config: TrainingConfig) -> None:
        self.change = threading.Condition()
        self.version = 0  # of the newest policy
        self.next_group = 0
        self.restart: deque[int] = deque()  # groups that a resumed run has to start anew
        self.room = 0  # groups that the batch being filled may still take; 0 while none is filled
        self._config = config
        self._versions: dict[int, int] = {}  # of each group under way, its policy's version
        self._running = 0  # groups whose attempts are not all over
        self._complete: list[Group] = []
        self._error: BaseException | None = None

    # -- The producer's side -----------------------------------------------------------------------

    def may_start(self) -> bool:
        """Whether one more group would find room while its policy is fresh enough. Call it under `change`."""
        config = self._config
        return (
            self._running < config.inflight_groups
            and len(self._complete) < max(config.completed_group_buffer, self.room)
            and len(self._versions) < self.room + config.groups_per_batch * config.max_staleness
        )

    def start(self) -> int:
        """Return the number of the next group, which counts as under way from now. Call it under `change`."""
        number = self.restart.popleft() if self.restart else self.next_group
        self.next_group = max(self.next_group, number + 1)
        self._versions[number] = self.version
        self._running += 1
        return number

    # -- The workers' side -------------------------------------------------------------------------

    def completed(self, group: Group) -> None:
        with self.change:
            self._running -= 1
            self._complete.append(group)
            self.change.notify_all()

    def failed(self, error: BaseException) -> None:
        """A thread has raised: the trainer raises it again."""
        with self.change:
            self._error = self._error or error
            self.change.notify_all()

    # -- The trainer's side ------------------------------------------------------------------------

    def error(self) -> BaseException | None:
        return self._error

    def choose(self) -> Group | None:
        """Return the group that the batch takes next, if it is there. Call it under `change`."""
        aging = [group for group in self._complete if self._ages(group.policy_version)]
        if aging:
            return aging[0]
        return self._complete[0] if self._complete and self.room > self._aging_on_their_way() else None

    def taken(self, group: Group, room: int) -> None:
        """The batch has taken a group, and has so much room left."""
        with self.change:
            self._complete.remove(group)
            del self._versions[group.number]
            self.room = room
            self.change.notify_all()

    def may_close(self) -> bool:
        """Whether no group would be too old after the next publication. Call it under `change`."""
        return not any(self._ages(version) for version in self._versions.values())

    def published(self, version: int) -> tuple[int, list[int]]:
        """Take the new version; returns the next group's number, and those under way or to be started anew."""
        with self.change:
            self.version = version
            self.change.notify_all()
            return self.next_group, sorted({*self._versions, *self.restart})

    def _ages(self, version: int) -> bool:
        return self.version + 1 - version > self._config.max_staleness

    def _aging_on_their_way(self) -> int:
        here = {group.number for group in self._complete}
        return sum(self._ages(version) for number, version in self._versions.items() if number not in here)
