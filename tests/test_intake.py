"""Which group is started, which the batch takes, and when it may close."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swegym_tutorial import TrainingConfig
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.intake import Intake
from swegym_tutorial.minibatch import Group
from swegym_tutorial.rollout import Ending, Rollout

CONFIG = replace(TrainingConfig.laptop(), groups_per_batch=4, max_groups_per_batch=4, inflight_groups=100)


def begin(intake: Intake) -> int:
    """Start as many groups as may be; returns how many."""
    count = 0
    while intake.may_start():
        intake.start()
        count += 1
    return count


def complete(intake: Intake, number: int, version: int) -> None:
    intake.completed(Group(number, "task", version, ()))


def graded(number: int, version: int, solved: int) -> Group:
    """Return a group of four attempts, so many of them solved."""
    tokens, mask = np.array([1, 2, 3], np.int32), np.array([False, True, True])
    rollout = Rollout("task", tokens, mask, -mask.astype(np.float32), (), Ending.FINAL, b"x", 1.0)
    outcomes = [Outcome.RESOLVED if n < solved else Outcome.UNRESOLVED for n in range(4)]
    return Group(number, "task", version, tuple(Episode(rollout, Verdict(each)) for each in outcomes))


def test_no_more_is_started_than_this_batch_and_the_next_can_take():
    intake = Intake(CONFIG)
    intake.room = 4
    assert begin(intake) == 8
    for number in range(3):
        complete(intake, number, 0)
        intake.taken(intake.choose(), 3 - number)
    assert begin(intake) == 0  # 5 are under way, and room for 1 + 4
    intake.room = 4  # the next batch, say
    assert begin(intake) == 3


def test_a_batch_keeps_room_for_what_would_be_too_old_for_the_next():
    intake = Intake(CONFIG)
    intake.room = 4
    assert begin(intake) == 8
    for number in (0, 1, 2, 3):
        complete(intake, number, 0)
        intake.taken(intake.choose(), 3 - number)
    assert intake.may_close()  # groups 4 to 7 may be trained on in the next batch
    assert intake.published(1) == (8, [4, 5, 6, 7])
    intake.room = 4
    assert begin(intake) == 4  # 8 to 11
    complete(intake, 9, 1)
    assert intake.choose() is None  # all the room is for 4 to 7
    complete(intake, 5, 0)
    assert intake.choose().number == 5
    intake.taken(intake.choose(), 3)
    for number in (4, 6):
        complete(intake, number, 0)
        intake.taken(intake.choose(), 2)
    intake.room = 2  # two of them were uniform, say
    assert intake.choose().number == 9  # there is room beside group 7
    intake.taken(intake.choose(), 1)
    complete(intake, 10, 1)
    assert intake.choose() is None and not intake.may_close()
    complete(intake, 7, 0)
    intake.taken(intake.choose(), 0)
    assert intake.may_close()


def test_nothing_is_started_for_a_batch_that_never_comes():
    intake = Intake(CONFIG)
    intake.room, intake.batches_left = 4, 0
    assert begin(intake) == 4


@pytest.mark.parametrize("limit", [4, None])
def test_no_more_is_started_than_the_batches_that_are_left_can_take(limit):
    intake = Intake(replace(CONFIG, max_groups_per_batch=limit, max_staleness=2))
    intake.room, intake.batches_left = 4, 1
    assert begin(intake) == 4 + 4  # though groups may be two publications old
    intake.batches_left = 2
    assert begin(intake) == 4
    intake.batches_left = 9
    assert begin(intake) == 0


def test_the_last_batch_too_keeps_room_for_what_is_slow():
    intake = Intake(CONFIG)
    intake.room, intake.batches_left = 4, 1
    assert begin(intake) == 8
    for number in range(4):
        complete(intake, number, 0)
        intake.taken(intake.choose(), 3 - number)
    intake.published(1)
    intake.room, intake.batches_left = 4, 0
    assert begin(intake) == 0  # 4 to 7 are all that it can take
    for number in (5, 6, 7):
        complete(intake, number, 0)
        intake.taken(intake.choose(), 7 - number + 1)
    assert not intake.may_close()  # group 4 would have no batch to come
    complete(intake, 4, 0)
    assert intake.choose().number == 4


def test_for_the_last_batch_so_many_are_started_as_will_have_a_signal():
    """As many as it has places would leave the workers idle at its end, as most of them come to nothing."""
    intake = Intake(NO_LIMIT)
    intake.room, intake.batches_left = 2, 0
    assert begin(intake) == 4  # nothing is known yet: every second one
    for number in range(4):
        intake.completed(graded(number, 0, 0))
    assert begin(intake) == 6  # of now perhaps 12, but no more than for any batch: its own and the next one's
    for number in range(4, 10):
        intake.completed(graded(number, 0, 2))
    intake.room = 1
    assert begin(intake) == 0  # six wait, and one of them is enough
    intake.room = 0
    assert intake.may_close() and not intake.may_start()


@pytest.mark.parametrize("change", [{"max_groups_per_batch": 4}, {"max_staleness": 0}])
def test_where_each_group_has_its_place_the_last_batch_has_no_more_than_those(change):
    intake = Intake(replace(NO_LIMIT, **change))
    intake.room, intake.batches_left = 2, 0
    assert begin(intake) == 2


def test_without_staleness_nothing_is_started_while_training():
    intake = Intake(replace(CONFIG, max_staleness=0))
    assert begin(intake) == 0
    intake.room = 4
    assert begin(intake) == 4
    for number in (2, 0, 1, 3):
        assert not intake.may_close()
        complete(intake, number, 0)
        intake.taken(intake.choose(), 0)
    assert intake.may_close() and begin(intake) == 0


def test_groups_of_an_earlier_part_come_first_and_keep_their_numbers():
    intake = Intake(CONFIG)
    intake.next_group, intake.room = 20, 4
    intake.left.extend([12, 17])
    assert [intake.start() for _ in range(4)] == [12, 17, 20, 21]
    assert intake.published(1) == (22, [12, 17, 20, 21])


def test_an_error_is_kept_for_the_trainer():
    intake = Intake(CONFIG)
    first = ValueError("first")
    intake.failed(first)
    intake.failed(ValueError("second"))
    assert intake.error() is first


NO_LIMIT = replace(CONFIG, max_groups_per_batch=None)


@pytest.mark.parametrize("solved", [0, 4])
def test_a_group_without_a_signal_gives_its_place_up_and_its_tokens(solved):
    intake = Intake(NO_LIMIT)
    assert begin(intake) == 4  # while training: the next batch's
    intake.completed(graded(2, 0, 2))
    assert begin(intake) == 0
    intake.completed(graded(1, 0, solved))
    assert begin(intake) == 1
    assert [len(intake.choose().episodes[0].rollout.tokens) for intake.room in (9,)] == [3]
    intake.taken(intake.choose(), 8)
    group = intake.choose()
    assert group.number == 1 and len(set(group.rewards)) == 1 and len(group.episodes[0].rollout.tokens) == 0
    assert intake.published(1) == (5, [0, 1, 3, 4])


@pytest.mark.parametrize("change", [{"max_groups_per_batch": 4}, {"max_staleness": 0}])
def test_with_a_limit_or_without_staleness_each_group_keeps_its_place(change):
    intake = Intake(replace(NO_LIMIT, **change))
    intake.room = 4
    begin(intake)
    intake.completed(graded(0, 0, 0))
    assert begin(intake) == 0 and len(intake.choose().episodes[0].rollout.tokens) == 3


def test_only_so_many_groups_without_a_signal_wait_for_the_trainer():
    intake = Intake(replace(NO_LIMIT, completed_group_buffer=3))
    assert begin(intake) == 4
    for number in range(12):
        intake.completed(graded(number, 0, 0))
        begin(intake)
    assert intake.next_group == 4 + 11  # for each of the next batch's four places three have come in
    intake.room = 4
    assert begin(intake) > 0


def test_no_group_starts_while_another_waits_for_workers():
    intake = Intake(NO_LIMIT)
    intake.room, intake.queued = 4, lambda: NO_LIMIT.group_size
    assert begin(intake) == 0
    intake.queued = lambda: NO_LIMIT.group_size - 1
    assert begin(intake) == 8
    exact = Intake(replace(NO_LIMIT, max_staleness=0))
    exact.room, exact.queued = 4, lambda: 1000
    assert begin(exact) == 4


def test_what_is_put_off_is_named_to_the_checkpoint_and_comes_first_in_the_next_part(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("swegym_tutorial.intake.time.monotonic", lambda: now[0])
    intake = Intake(NO_LIMIT, lambda number: "slow" if number == 1 else "quick")
    intake.published(0)
    now[0] = 100.0
    intake.published(1)
    intake.start()
    now[0] = 195.0
    intake.completed(replace(graded(0, 1, 2), task_id="slow"))
    assert [intake.start() for _ in range(2)] == [2, 3]
    next_group, unfinished = intake.published(2)
    assert (next_group, unfinished) == (4, [0, 1, 2, 3])
    resumed = Intake(NO_LIMIT)
    resumed.next_group = next_group
    resumed.left.extend(unfinished)
    assert [resumed.start() for _ in range(5)] == [0, 1, 2, 3, 4]


@given(st.integers(0, 2**32), st.integers(0, 1))
def test_whatever_happens_no_group_is_lost_or_grows_too_old(seed, staleness):
    chance = random.Random(seed)
    intake = Intake(replace(NO_LIMIT, max_staleness=staleness))
    running: dict[int, int] = {}
    seen: set[int] = set()
    for version in range(5):
        kept, intake.room = 0, 4
        while kept < 4 or not intake.may_close():
            while intake.may_start() and (not running or chance.random() < 0.7):
                running[intake.start()] = version
            if running and chance.random() < 0.6:
                number = chance.choice(sorted(running))
                intake.completed(graded(number, running.pop(number), chance.randrange(5)))
            if (group := intake.choose()) is not None:
                assert version - group.policy_version <= staleness
                seen.add(group.number)
                kept += len(set(group.rewards)) > 1
                intake.taken(group, 4 - kept)
        assert kept == 4  # those that would be too old have found their room
        while intake.may_start() and chance.random() < 0.9:
            running[intake.start()] = version
        next_group, unfinished = intake.published(version + 1)
        assert sorted([*seen, *unfinished]) == list(range(next_group))
