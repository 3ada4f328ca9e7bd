"""Measures regimes in processes of their own, some at a time, and prints a table with a line for each.

Knows nothing of what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from typing import Protocol, TypeVar

import numpy as np
from simulation import make_world

from swegym_tutorial.minibatch import datum


class Regime(Protocol):
    def real_seconds(self) -> float:
        """Return how long simulating it takes at least."""


R = TypeVar("R", bound=Regime)


def _prepare(barrier: Barrier) -> None:
    """Let no process begin while others still import: that would make its threads wake late."""
    make_world()
    datum(np.zeros(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.float32))
    barrier.wait()


def print_table(
    columns: Sequence[str], regimes: Sequence[R], cells: Callable[[R], list[str]], at_once: int
) -> None:
    """Print the table, and how long it took. cells: a function of a module, as it runs in another process."""
    began = time.monotonic()
    print("| " + " | ".join(columns) + " |", "|---" * len(columns) + "|", sep="\n", flush=True)
    # Spawned processes: a simulation has up to a thousand threads, which forking would not survive.
    context, count = get_context("spawn"), min(at_once, len(regimes))
    with ProcessPoolExecutor(count, context, _prepare, (context.Barrier(count),)) as pool:
        longest_first = sorted(range(len(regimes)), key=lambda n: -regimes[n].real_seconds())
        rows = {n: pool.submit(cells, regimes[n]) for n in longest_first}
        for n in range(len(regimes)):
            print("| " + " | ".join(rows[n].result()) + " |", flush=True)
    print(
        f"\n{time.monotonic() - began:.0f} s. A sleep error over 2 %: the machine was busy, run that regime again."
    )
