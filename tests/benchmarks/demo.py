"""Run the laptop preset under several seeds and print what came of each.

    python tests/benchmarks/demo.py [--seeds 0 11 12 13] [--output runs/seeds]

Each run is what `make demo` does: evaluation, training, evaluation. Exits with 1 where a run misses a bound:
mean reward of the last five steps at least 0.85 from at most 0.4 in the first step, held-out at least 0.8 from
at most 0.35, training under 240 s and the whole run under 480 s. Meant for an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from swegym_tutorial.terminal import summarise

HEADER = "| seed | first step | last five | held-out before | held-out after | training s | whole s | kept / uniform / stale / failed |"


def measure(seed: int, folder: Path) -> tuple[str, bool]:
    """Run one seed; returns its row of the table, and whether every bound held."""
    began = time.monotonic()
    command = [sys.executable, "-m", "swegym_tutorial.cli", "train", "--preset", "laptop", "--evaluate"]
    subprocess.run(
        [*command, "--seed", str(seed), "--output", str(folder)], check=True, stdout=subprocess.DEVNULL
    )
    whole = time.monotonic() - began
    summary = summarise(folder)
    steps = summary.steps["train-job0"]
    first, last = steps[0].reward_mean, sum(s.reward_mean for s in steps[-5:]) / 5
    before, after = (
        next(e for e in summary.evaluations if e.label == label) for label in ("before", "after")
    )
    training = sum(s.batch_seconds for s in steps)
    fates = " / ".join(
        str(sum(s.groups[fate] for s in steps)) for fate in ("kept", "uniform", "stale", "failed")
    )
    row = (
        f"| {seed} | {first:.3f} | {last:.3f} | {before.rate:.3f} ({before.resolved}/{before.attempts}) "
        f"| {after.rate:.3f} ({after.resolved}/{after.attempts}) | {training:.0f} | {whole:.0f} | {fates} |"
    )
    good = first <= 0.4 and last >= 0.85 and before.rate <= 0.35 and after.rate >= 0.8
    return row, good and training < 240 and whole < 480


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 11, 12, 13])
    parser.add_argument(
        "--output", type=Path, default=Path("runs") / f"seeds-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    args = parser.parse_args()
    print(HEADER, "|---" * 8 + "|", sep="\n", flush=True)
    good = True
    for seed in args.seeds:
        row, held = measure(seed, args.output / f"seed{seed}")
        good = good and held
        print(row, "" if held else " <- a bound was missed", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
