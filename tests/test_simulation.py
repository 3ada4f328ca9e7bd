"""The simulation that the benchmarks of the loop stand on: its parts, and one short run of the real loop in it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from swegym_tutorial import TrainingConfig
from swegym_tutorial.attempts import Identity
from swegym_tutorial.halt import Halt

sys.path.append(str(Path(__file__).parent / "benchmarks"))  # last: it has names that tests have too

from simulation import Attempts, Clock, Simulation, Timing, Trainer, bound, make_world

ISSUE = Timing(attempt=45, grading=15)


def test_the_world_has_the_mixed_rate_of_the_published_tasks():
    world = make_world()
    assert len(world.tasks) == 31 and sum(rate == 0 for rate in world.rates.values()) == 15
    assert round(world.mixed_rate(8), 2) == 0.44 and world.mean_factor() == 1


def test_slow_tasks_are_as_many_among_the_solved_ones_as_among_the_others():
    world = make_world(slow_every=2)
    solved = {task for task, rate in world.rates.items() if rate}
    slow = {task.instance_id for task in world.tasks if world.slow(task.instance_id)}
    assert (len(slow & solved), len(slow - solved)) == (8, 7)
    assert world.mean_factor() == pytest.approx((15 * 8 + 16) / 31)


def test_the_bound_is_the_slowest_of_trainer_rollouts_and_gradings():
    world, config = make_world(), TrainingConfig.spindle(clients=1)
    best = bound(config, ISSUE, world)
    attempts = 32 * 8 / world.mixed_rate(8)
    assert best.trainer == 4 * (120 + 5) + 15 + 25 == best.seconds
    assert best.rollouts == pytest.approx(attempts * 45 * math.exp(0.18) / 64)
    assert best.gradings == pytest.approx(attempts * 15 * math.exp(0.125) / 64)
    assert bound(TrainingConfig.spindle(), ISSUE, world).seconds == 8 * 540


def test_the_trainer_serves_in_order_and_its_late_wakings_do_not_add_up():
    clock = Clock(1000)
    trainer = Trainer(clock)
    began = clock.now()
    calls = [trainer.call(5.0, n) for n in range(100)]
    assert [call.result(30) for call in calls] == list(range(100))
    assert clock.now() - began >= 500 - 1 and trainer.busy == 500
    trainer.close()


def test_what_is_drawn_for_an_attempt_depends_on_its_identity_alone():
    world, halt = make_world(), Halt()
    task = max(world.tasks, key=lambda task: world.rates[task.instance_id])

    def run(order):
        clock = Clock(1e9)  # no attempt takes any time
        attempts, rewards = Attempts(clock, ISSUE, world, 7), {}
        for number in order:
            identity = Identity("p", "train-job0", number, 0, task.instance_id, 0)
            rollout = attempts.rollout(task, None, identity, halt)
            rewards[number] = rollout.seconds, attempts.grade(task, rollout, identity, halt).reward
        return rewards

    assert run(range(20)) == run(reversed(range(20)))
    assert len(set(run(range(20)).values())) > 10


@pytest.mark.slow
def test_the_loop_runs_in_it_and_all_groups_are_accounted_for():
    world = make_world(slow_every=9)
    config = TrainingConfig.spindle(
        clients=2, steps=3, groups_per_batch=4, minibatch_groups=2, tasks="bundled"
    )
    seen = Simulation(config, Timing(2, 1, 5, 1, 1, 1, 1), world, compression=300).run(60)
    assert sorted(seen.steps) == ["train-job0", "train-job1"]
    assert all(len(times) == 3 and times == sorted(times) for times in seen.steps.values())
    fates = Counter(group["fate"] for group in seen.groups)
    assert fates["kept"] == 2 * 3 * 4 and fates["stale"] == fates["failed"] == 0
    assert {(g["job"], g["group"]): g["instance_id"] for g in seen.groups}.items() <= seen.started.items()
    assert 0 < seen.trainer_busy <= 1 and seen.batch_seconds() > 0
