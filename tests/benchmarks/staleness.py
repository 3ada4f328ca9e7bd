"""Run the loop with slow tasks among fast ones, and print what becomes of each kind.

    python tests/benchmarks/staleness.py [--times 1] [--only TEXT] [--at-once 4]

Slow tasks take eight times as long as others. No group may be trained on that is more than `max_staleness`
publications old: those that come too late are lost, and where the slow ones come too late, the policy never learns
them. The goal: under 5 % of finished groups are stale, and slow tasks are kept as often as fast ones.
Simulated (see simulation.py): sandboxes and trainer sleep, the loop is the real one. All times in simulated seconds.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from dataclasses import dataclass

from side_by_side import print_table
from simulation import Outcomes, Simulation, Timing, World, bound, make_world

from swegym_tutorial import TrainingConfig


@dataclass(frozen=True)
class Regime:
    """Which workers and durations, how many clients, which tasks are slow, and how many batches are enough."""

    workers: str  # laptop | spindle: whose worker counts and sizes of a batch
    clients: int
    slow_every: int  # one task in so many
    batches: int  # a client
    timing: Timing
    # Threads wake a little late: a thousand of them by 1 or 2 % of what they sleep, and more on a busy machine.
    compression: float

    @property
    def name(self) -> str:
        one_in = {9: "one in nine", 2: "every second"}[self.slow_every]
        seconds = f"{self.timing.attempt:.0f} + {self.timing.grading:.0f} s"
        return f"{self.workers}, {self.clients} client{'s' * (self.clients > 1)}, {seconds}, {one_in} slow"

    def config(self, times: float) -> TrainingConfig:
        preset = TrainingConfig.spindle if self.workers == "spindle" else TrainingConfig.laptop
        return preset(clients=self.clients, steps=max(2, round(self.batches * times)), tasks="bundled")

    def real_seconds(self) -> float:
        """Return how long simulating it takes at least."""
        best = bound(self.config(1.0), self.timing, make_world(slow_every=self.slow_every))
        return self.batches * best.seconds / self.compression


SMALL = Timing(attempt=45, grading=5, forward_backward=60)  # 2 graders; minibatches half as large
SHORT, LONG = Timing(attempt=45, grading=15), Timing(attempt=540, grading=90)
REGIMES = [
    Regime("laptop", 1, 9, 20, SMALL, 400),
    Regime("laptop", 1, 2, 12, SMALL, 400),
    Regime("laptop", 8, 9, 8, SMALL, 400),
    Regime("laptop", 8, 2, 8, SMALL, 400),
    Regime("spindle", 1, 9, 8, SHORT, 400),
    Regime("spindle", 1, 2, 6, SHORT, 400),
    Regime("spindle", 1, 9, 6, LONG, 2000),
    Regime("spindle", 8, 9, 3, SHORT, 300),
    Regime("spindle", 8, 2, 3, SHORT, 300),
]
COLUMNS = (
    "regime",
    "seconds a batch",
    "bound",
    "groups finished",
    "stale",
    "stale of the slow",
    "stale of the fast",
    "slow among started",
    "slow among kept",
    "mixed slow ones kept",
    "attempts used",
    "sleep error",
)


def row(regime: Regime, config: TrainingConfig, world: World, seen: Outcomes) -> list[str]:
    """Return a line of the table."""
    slow = [world.slow(group["instance_id"]) for group in seen.groups]
    fates = Counter((group["fate"], kind) for group, kind in zip(seen.groups, slow, strict=True))
    mixed = sum(
        kind and len(set(group["rewards"])) > 1 for group, kind in zip(seen.groups, slow, strict=True)
    )
    kept = fates["kept", True] + fates["kept", False]
    return [
        regime.name,
        f"{seen.batch_seconds():.0f}",
        f"{bound(config, regime.timing, world).seconds:.0f}",
        f"{len(slow)}",
        _share(fates["stale", True] + fates["stale", False], len(slow)),
        _share(fates["stale", True], sum(slow)),
        _share(fates["stale", False], len(slow) - sum(slow)),
        _share(sum(map(world.slow, seen.started.values())), len(seen.started)),
        _share(fates["kept", True], kept),
        f"{fates['kept', True]} of {mixed}",
        f"{kept / len(slow):.2f} of {world.mixed_rate(config.group_size):.2f}",
        f"{seen.clock_error:.1%}",
    ]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def measure(regime: Regime, compression: float | None, times: float) -> list[str]:
    """Simulate a regime; returns its line of the table."""
    config, world = regime.config(times), make_world(slow_every=regime.slow_every)
    seen = Simulation(config, regime.timing, world, compression or regime.compression).run()
    return row(regime, config, world, seen)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compression", type=float, help="simulated seconds in a real one, in all regimes")
    parser.add_argument("--times", type=float, default=1.0, help="so many times the usual batches")
    parser.add_argument("--at-once", type=int, default=4, help="regimes simulated at the same time")
    parser.add_argument("--only", default="", help="regimes whose names have this in them")
    args = parser.parse_args()
    regimes = [regime for regime in REGIMES if args.only in regime.name]
    cells = functools.partial(measure, compression=args.compression, times=args.times)
    print_table(COLUMNS, regimes, cells, args.at_once)
    return 0


if __name__ == "__main__":
    sys.exit(main())
