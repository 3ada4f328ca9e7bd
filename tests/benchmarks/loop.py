"""Run the loop with even tasks, and print how near it comes to the fastest that its workers and trainer allow.

    python tests/benchmarks/loop.py [--times 1] [--only TEXT] [--at-once 2]

Four regimes with the worker counts of the full run: attempts that take long, eight clients on one trainer, and two in
which the trainer is what everything waits for. The goals: a batch takes at most bound / 0.95; at least 0.42 of all
attempts are trained on, where 0.44 of all groups have mixed rewards; and the first batch takes at most 1.25 times the
bound and one attempt with its grading. Simulated (see simulation.py): sandboxes and trainer sleep, the loop is the real
one. All times in simulated seconds.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from dataclasses import dataclass

from side_by_side import print_table
from simulation import ATTEMPT_SIGMA, GRADING_SIGMA, Outcomes, Simulation, Timing, bound, make_world

from swegym_tutorial import TrainingConfig

EFFICIENCY, USED, FIRST = 0.95, 0.42, 1.25  # the goals
COLUMNS = (
    "attempt + grading",
    "clients",
    "seconds a batch",
    "bound",
    "efficiency",
    "trainer idle",
    "attempts used",
    "stale groups",
    "first batch",
    "last batch",
    "begun in vain",
    "sleep error",
)


@dataclass(frozen=True)
class Regime:
    """Median durations, how many clients, and how many batches each does."""

    attempt: float
    grading: float
    clients: int
    batches: int
    compression: float

    @property
    def name(self) -> str:
        return f"{self.attempt:.0f} + {self.grading:.0f} s, {self.clients} client{'s' * (self.clients > 1)}"

    @property
    def timing(self) -> Timing:
        return Timing(self.attempt, self.grading)

    def config(self, times: float = 1.0) -> TrainingConfig:
        steps = max(2, round(self.batches * times))
        return TrainingConfig.spindle(clients=self.clients, steps=steps, tasks="bundled")

    def bound(self) -> float:
        return bound(self.config(), self.timing, make_world()).seconds

    def real_seconds(self) -> float:
        return self.batches * self.bound() / self.compression


REGIMES = [
    Regime(540, 90, 1, 5, 400),
    Regime(120, 90, 8, 3, 300),
    Regime(45, 15, 1, 12, 300),
    Regime(20, 10, 1, 12, 300),
]


def cells(regime: Regime, compression: float | None, times: float) -> list[str]:
    """Simulate a regime; returns its line of the table."""
    config, world = regime.config(times), make_world()
    seen = Simulation(config, regime.timing, world, compression or regime.compression).run()
    best, took = regime.bound(), seen.batch_seconds()
    kept = sum(group["fate"] == "kept" for group in seen.groups)
    mixed = world.mixed_rate(config.group_size)
    one = regime.attempt * math.exp(ATTEMPT_SIGMA**2 / 2) + regime.grading * math.exp(GRADING_SIGMA**2 / 2)
    return [
        f"{regime.attempt:.0f} + {regime.grading:.0f} s",
        f"{regime.clients}",
        f"{took:.0f}",
        f"{best:.0f}",
        f"{best / took:.2f} ({EFFICIENCY:.2f})",
        f"{_idle(seen, config, regime.timing):.0%}",
        f"{kept / len(seen.groups):.2f} ({USED:.2f}), mixed {mixed:.2f}",
        f"{sum(group['fate'] == 'stale' for group in seen.groups) / len(seen.groups):.1%}",
        f"{seen.first_batch():.0f} ({FIRST * best + one:.0f})",
        f"{max(times[-1] - times[-2] for times in seen.steps.values()):.0f}",
        f"{len(seen.started) - len(seen.groups)} of {len(seen.started)} groups",
        f"{seen.clock_error:.1%}",
    ]


def _idle(seen: Outcomes, config: TrainingConfig, timing: Timing) -> float:
    """Return the share of the time after the first batch in which the trainer had nothing to do."""
    needed = bound(config, timing, make_world()).trainer
    return max(0.0, 1 - needed / seen.batch_seconds())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", type=float, help="simulated seconds in a real one, in all regimes")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the usual batches")
    parser.add_argument("--at-once", type=int, default=2, help="regimes simulated at the same time")
    parser.add_argument("--only", default="", help="regimes whose names have this in them")
    args = parser.parse_args()
    regimes = [regime for regime in REGIMES if args.only in regime.name]
    print("In brackets: the goal.\n")
    measure = functools.partial(cells, compression=args.compression, times=args.times)
    print_table(COLUMNS, regimes, measure, args.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
