"""Which group starts next: slow tasks begin early in a policy's life, so that no batch has to wait long for them.

A batch waits for groups that would be too old for the next one. A slow task's group that starts just before a
publication would hold up the batch after it; started just after, it is done in time. So a group that would be late is
put off to the next publication, and others go first. Then it starts before all others; where many were put off they
take the workers for so long that some are put off again, but three times at most: no number starves, and how often a
task is sampled does not hang on its speed. Knows nothing of threads or of what a group
holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .config import TrainingConfig

PUBLICATIONS = 4  # the last ones, whose distance says when the next is due
# In units of the time between two publications. A group may run on under the next policy, until the batch that takes
# it is full: nearly two of them. So much before that it must begin, if its task takes long; but a task that takes longer
# than that is late in any case, and no later than others if it begins right after a publication.
LIFE, LONGEST = 1.85, 1.65
MARGIN = 2.5  # a group may take so many times as long as its task's did in the mean
MOST = 3  # publications that a group is put off over
NEWEST = 0.5  # weight of the newest group in its task's mean


class Pace:
    """Of one client: what its tasks' groups took, and when it published. All times as of one clock, in seconds."""

    def __init__(self, config: TrainingConfig, task_of: Callable[[int], str]) -> None:
        """task_of: the task of a group's number. Without staleness nothing is put off: order is part of exactness."""
        self._ahead = config.groups_per_batch if config.max_staleness else 1  # numbers that are looked at
        self._task_of = task_of
        self._took: dict[str, float] = {}
        self._published: deque[float] = deque(maxlen=PUBLICATIONS)
        self._count = 0  # of the publications
        self._put_off: dict[int, int] = {}  # of each number that was put off, the count when it first was

    def completed(self, task: str, seconds: float) -> None:
        """A group of a task took so long from its start until its last attempt was graded."""
        self._took[task] = (1 - NEWEST) * self._took.get(task, seconds) + NEWEST * seconds

    def published(self, now: float) -> None:
        self._published.append(now)
        self._count += 1

    def choose(self, left: list[int], next_group: int, now: float) -> int:
        """Return the number to start: the lowest that is in time, or may not be put off; if none is, the lowest.

        left: lower numbers than next_group that are still to be started, ascending. Those below the result are put off.
        """
        numbers = [*left, *range(next_group, next_group + self._ahead - len(left))] or [next_group]
        for place, number in enumerate(numbers):
            if self._must(number, next_group) or self._in_time(number, now):
                for passed in numbers[:place]:
                    self._put_off.setdefault(passed, self._count)
                break
        else:
            number = numbers[0]
        self._put_off.pop(number, None)
        return number

    def _must(self, number: int, next_group: int) -> bool:
        """Whether a number was put off often enough; or is of an earlier part, which began it once already."""
        return number < next_group and self._count - self._put_off.get(number, -MOST) >= MOST

    def _in_time(self, number: int, now: float) -> bool:
        if self._ahead == 1 or len(self._published) < 2:
            return True
        apart = (self._published[-1] - self._published[0]) / (len(self._published) - 1)
        took = self._took.get(self._task_of(number), 0.0)  # one that is not known yet is tried at once
        return min(LONGEST * apart, MARGIN * took) <= LIFE * apart - (now - self._published[-1])
