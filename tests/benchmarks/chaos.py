"""Break training runs on purpose for a long time, and print what came of it.

    python tests/benchmarks/chaos.py [--minutes 20] [--kills 30] [--seed 0] [--output runs/chaos]

First a killer ends runs with SIGKILL and resumes them: `--kills` of runs with one attempt at a time, each of which must
end exactly as one that was left alone, and a third as many of runs of two clients with attempts side by side, in which
no step and no group may get lost or come twice. Each second process is `swegym-tutorial train --resume`, the others use
the package. Then asynchronous runs of two clients go through a proxy that drops, delays, doubles and fails their calls,
in sandboxes that fail, die, hang and flood, while the server is killed and started again and the runs are paused, until
the minutes are over, which count from the start. Exits with 1 where a resume is not exact or not whole, a batch is lost,
a run fails, or something is left.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # before this folder, whose chaos.py is not meant

from chaos.chaotic import Meddling, Result, run_in, world
from chaos.killer import KilledRun, Killer
from chaos.proxy import Rates
from chaos.sandboxes import Shares

from swegym_tutorial import TrainingConfig

RATES = Rates.of_each(0.02, outage_every=90, outage_seconds=15)
SHARES = Shares(open=0.02, die=0.02, hang=0.01, flood=0.03)
MEDDLING = Meddling(restart_every=60, pause_every=60, pause_seconds=10)
SETTINGS = {"clients": 2, "steps": 16, "groups_per_batch": 4, "max_groups_per_batch": 4, "group_size": 6}
SETTINGS |= {"rollout_workers": 8, "attempt_retries": 4}
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{(time.monotonic() - BEGAN) / 60:5.1f} min  {text}", flush=True)


def chaos(folder: Path, seed: int, until: float) -> list[Result]:
    """Make one chaotic run after the other until time.monotonic() says `until`; the last one comes to its end."""
    results: list[Result] = []
    with world(folder / "server", RATES, seed) as place:
        while not results or time.monotonic() < until:
            number = len(results)
            config = TrainingConfig.laptop(**SETTINGS, seed=seed + number)
            run = folder / f"chaos{number:02d}"
            told = lambda text, run=run: say(f"{run.name}: {text}")  # noqa: E731
            result = run_in(place, config, run, SHARES, seed=seed + number, meddling=MEDDLING, say=told)
            results.append(result)
            say(
                f"{run.name}: {result.batches} batches, {result.batches_lost} lost; {result.attempts} attempts, "
                f"{result.attempts_lost} lost; {sum(result.injected.values())} faults; "
                + ("; ".join([*result.wrong, *result.left_words]) or "nothing wrong")
            )
    return results


def table(killed: list[KilledRun], results: list[Result], minutes: float) -> tuple[str, bool]:
    """Return the table, and whether every bound held."""
    exact, beside = ([run for run in killed if run.mode == mode] for mode in ("exact", "side by side"))
    kills = [kill for run in killed for kill in run.kills]
    by_cli = sum(kill.cli for kill in kills)
    injected: Counter[str] = sum((result.injected for result in results), Counter())
    left: Counter[str] = sum((result.left for result in results), Counter())
    left["processes"] += sum(word.startswith("process") for run in killed for word in run.left)
    left["folders"] += sum(not word.startswith("process") for run in killed for word in run.left)
    batches_lost = sum(result.batches_lost for result in results)
    told = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in sorted(injected.items()))
    rows = {
        "minutes": f"{minutes:.1f}",
        "kills with SIGKILL": f"{len(kills)}, in {len(killed)} runs; {by_cli} of the command, the others of a script",
        "exact resumes": f"{resumes([run for run in exact if not run.wrong])} of {resumes(exact)}, "
        f"{resumes([run for run in exact if run.identical])} of them to the last bit",
        "asynchronous resumes": f"{resumes([run for run in beside if not run.wrong])} of {resumes(beside)} whole",
        "chaotic runs": str(len(results)),
        "faults injected": f"{injected.total()}: {told}",
        "attempts made / lost": f"{sum(r.attempts for r in results)} / {sum(r.attempts_lost for r in results)}",
        "batches done / lost": f"{sum(r.batches for r in results)} / {batches_lost}",
        "trainings begun anew": str(sum(result.recovered for result in results)),
        "left: processes, folders, threads": ", ".join(
            str(left[kind]) for kind in ("processes", "folders", "threads")
        ),
    }
    good = (
        not any(run.wrong for run in killed)
        and not batches_lost
        and not left.total()
        and not any(r.wrong for r in results)
    )
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines), good


def resumes(runs: list[KilledRun]) -> int:
    """Count the kills: after each the run was resumed."""
    return sum(len(run.kills) for run in runs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20, help="in all")
    parser.add_argument(
        "--kills", type=int, default=30, help="of exact runs; a third as many more of asynchronous ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/chaos"), help="must not exist yet")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(f"{args.output} exists: name another folder, or move it away")
    folder = args.output.resolve()
    folder.mkdir(parents=True)
    killed = Killer(folder, seed=args.seed, steps=5, say=say).run(args.kills, seeds=3)
    beside = Killer(folder, mode="side by side", seed=args.seed, steps=4, say=say)
    killed += beside.run(math.ceil(args.kills / 3), seeds=3)
    results = chaos(folder, args.seed, BEGAN + args.minutes * 60)
    words, good = table(killed, results, (time.monotonic() - BEGAN) / 60)
    print(words, flush=True)
    for name, wrong in [(r.folder.name, [*r.wrong, *r.left]) for r in killed] + [
        (r.folder.name, [*r.wrong, *r.left_words]) for r in results
    ]:
        for text in wrong:
            print(f"{name}: {text}")
    print("every bound held" if good else "a bound was missed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
