"""Which group is started, which the batch takes, and when it may close."""

from dataclasses import replace

from swegym_tutorial import TrainingConfig
from swegym_tutorial.intake import Intake
from swegym_tutorial.minibatch import Group

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
    intake.restart.extend([12, 17])
    assert [intake.start() for _ in range(4)] == [12, 17, 20, 21]
    assert intake.published(1) == (22, [12, 17, 20, 21])


def test_an_error_is_kept_for_the_trainer():
    intake = Intake(CONFIG)
    first = ValueError("first")
    intake.failed(first)
    intake.failed(ValueError("second"))
    assert intake.error() is first
