"""Grade every hostile patch of tests/cheats as SWE-Gym alone would, and as we do, and print a table.

    python tests/benchmarks/cheats.py [--task ID] [--workers 2]

Runs in local sandboxes. What the grader is known not to hold (docs/threat-model.md) stands apart. Exits with 1
where another cheat earns a reward, and where the gold patch earns none.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cheats import CHEATS, UNHELD, Cheat, patch_of

from swegym_tutorial import TrainingConfig, load_tasks
from swegym_tutorial.grading import Bench, Outcome, grade
from swegym_tutorial.sandbox import backend

HEADER = "| cheat | SWE-Gym's way | ours | why |\n|---|---|---|---|"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", help="of the bundled ones; the first where none is named")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    (task, *_) = load_tasks(ids=[args.task]) if args.task else load_tasks()
    sandboxes, config = backend("local"), TrainingConfig.laptop()
    bench = Bench(sandboxes, config)

    def row(cheat: Cheat) -> tuple[str, Outcome | None, Outcome]:
        patch = patch_of(cheat, sandboxes, task)
        plain, verdict = bench.plain(task, patch), grade(task, patch, sandboxes, config, bench)
        why = verdict.detail.replace("|", "/")
        return (
            f"| {cheat.name} | {plain or 'nothing ran'} | {verdict.outcome} | {why} |",
            plain,
            verdict.outcome,
        )

    try:
        with ThreadPoolExecutor(args.workers) as pool:
            print(HEADER, flush=True)
            rows = []
            for text, *outcomes in pool.map(row, CHEATS):
                print(text, flush=True)
                rows.append(outcomes)
            print(f"\nNot held:\n\n{HEADER}", flush=True)
            for text, *_ in pool.map(row, UNHELD):
                print(text, flush=True)
            gold = grade(task, task.patch.encode(), sandboxes, config, bench).outcome
    finally:
        sandboxes.close()
    plain, ours = (
        sum(outcome is Outcome.RESOLVED for outcome in column) for column in zip(*rows, strict=True)
    )
    print(
        f"\nOf {len(rows)} cheats {plain} earn a reward by SWE-Gym's way, and {ours} by ours; the gold patch is {gold}."
    )
    return int(ours > 0 or gold is not Outcome.RESOLVED)


if __name__ == "__main__":
    raise SystemExit(main())
