"""Which group starts next, and that none starves for being slow."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swegym_tutorial import TrainingConfig
from swegym_tutorial.pace import Pace

CONFIG = replace(TrainingConfig.laptop(), groups_per_batch=8)
SLOW = 7  # numbers that it divides have a slow task


def task_of(number: int) -> str:
    return "quick" if number % SLOW else "slow"


class Numbers:
    """What is started and what is left, as the intake has it."""

    def __init__(self, config: TrainingConfig) -> None:
        self.pace = Pace(config, task_of)
        self.left: list[int] = []
        self.next_group = 0
        self.started: list[int] = []

    def start(self, now: float) -> int:
        number = self.pace.choose(self.left, self.next_group, now)
        if number < self.next_group:
            self.left.remove(number)
        self.left += range(self.next_group, number)
        self.next_group = max(self.next_group, number + 1)
        self.started.append(number)
        return number


def known(config: TrainingConfig = CONFIG) -> Numbers:
    """Two publications 100 s apart, the last at 100; slow tasks take as long as a policy lives, quick ones 5 s."""
    numbers = Numbers(config)
    numbers.pace.published(0.0)
    numbers.pace.published(100.0)
    numbers.pace.completed("slow", 100.0)
    numbers.pace.completed("quick", 5.0)
    return numbers


def test_a_slow_group_starts_early_in_a_policys_life_and_else_right_after_the_next_publication():
    numbers = known()
    assert [numbers.start(110.0) for _ in range(3)] == [0, 1, 2]  # early enough
    assert [numbers.start(160.0) for _ in range(7)] == [3, 4, 5, 6, 8, 9, 10]
    assert numbers.left == [7]
    assert numbers.start(180.0) == 11
    numbers.pace.published(200.0)
    assert [numbers.start(210.0) for _ in range(2)] == [7, 12]


def test_a_group_is_put_off_three_times_at_most():
    numbers = known()
    numbers.next_group = 7
    for publication in range(3):
        assert numbers.start(190.0 + 100 * publication) == 8 + publication
        numbers.pace.published(200.0 + 100 * publication)
    assert [numbers.start(490.0) for _ in range(2)] == [7, 11]


def test_where_no_group_is_in_time_the_lowest_starts():
    numbers = known()
    numbers.pace.completed("quick", 1000.0)
    assert [numbers.start(190.0) for _ in range(3)] == [0, 1, 2]


def test_what_an_earlier_part_left_is_never_put_off():
    numbers = known()
    numbers.left, numbers.next_group = [14, 17], 21
    assert [numbers.start(190.0) for _ in range(3)] == [14, 17, 22]
    assert numbers.left == [21]


def test_until_two_publications_and_of_unknown_tasks_numbers_start_in_their_order():
    numbers = Numbers(CONFIG)
    numbers.pace.published(0.0)
    numbers.pace.completed("slow", 1e6)
    assert [numbers.start(99.0) for _ in range(20)] == list(range(20))
    numbers = Numbers(CONFIG)
    numbers.pace.published(0.0)
    numbers.pace.published(100.0)
    assert [numbers.start(199.0) for _ in range(20)] == list(range(20))


@given(st.integers(100, 400))
def test_without_staleness_numbers_start_in_their_order(now):
    numbers = known(replace(CONFIG, max_staleness=0))
    assert [numbers.start(float(now)) for _ in range(20)] == list(range(20))


moves = st.one_of(
    st.tuples(st.just("start"), st.just(0.0)),
    st.tuples(st.just("wait"), st.floats(0, 60)),
    st.tuples(st.just("publish"), st.just(0.0)),
    st.tuples(st.sampled_from(["slow", "quick"]), st.floats(1, 300)),
)


@given(st.lists(moves, max_size=200))
def test_each_number_starts_once_and_none_is_put_off_over_more_than_three_publications(moves):
    numbers, now = known(), 100.0
    over: Counter[int] = Counter()  # publications that each number was put off over
    for move, value in moves:
        if move == "start":
            due = [number for number in numbers.left if over[number] >= 3]
            assert numbers.start(now) <= min(due, default=math.inf)
        elif move == "wait":
            now += value
        elif move == "publish":
            numbers.pace.published(now)
            over.update(numbers.left)
        else:
            numbers.pace.completed(move, value)
        assert numbers.left == sorted(numbers.left) and len(numbers.left) < CONFIG.groups_per_batch
        assert sorted(numbers.started + numbers.left) == list(range(numbers.next_group))
