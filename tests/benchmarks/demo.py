"""Run the laptop preset under several seeds; print what came of each, and where its seconds went.

    python tests/benchmarks/demo.py [--seeds 0 11 12 13 14 15] [--set FIELD=VALUE] [--output runs/seeds]

Each run is what `make demo` does: evaluation, training, evaluation. Exits with 1 where a run misses a bound:
mean reward of the last five steps at least 0.8 from at most 0.4 in the first step, held-out at least 0.8 from
at most 0.35, each further held-out split at least 0.2 above where it began, the training under 240 s and the whole
run under 360 s. Meant for an otherwise idle machine: six minutes a seed at most. All but the seconds is the seed's and
the machine's timing's, so no two runs are equal.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from swegym_tutorial.bundled.generate import SEED, drafts
from swegym_tutorial.events import scan
from swegym_tutorial.records import StepResult
from swegym_tutorial.terminal import summarise

SPLITS = ("held-out", "held-out-phrasings", "held-out-families")
HEADER = (
    "| seed | first step | last five | "
    + " | ".join(f"{split}: before, after" for split in SPLITS)
    + " | training s | whole s | kept / uniform / stale / failed |"
)
SERVER = "swegym_tutorial.server"
TRAINING_SECONDS, WHOLE_SECONDS = 240, 360  # at most


@dataclass(frozen=True)
class Run:
    """One finished run. Seconds by the clock, and of processors by who took them."""

    folder: Path
    whole: float
    processors: Mapping[str, float]


def run(seed: int, folder: Path, settings: Sequence[str] = ()) -> Run:
    """Run the laptop preset in a process of its own, and wait for its end."""
    began, busy = time.monotonic(), _busy()
    command = [sys.executable, "-m", "swegym_tutorial", "train", "--preset", "laptop", "--evaluate"]
    command += ["--seed", str(seed), "--output", str(folder), *(f"--set={each}" for each in settings)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    own = {"the driver": 0.0, "the server": 0.0}
    while process.poll() is None:
        for name, found in _processes(process.pid):
            try:
                times = found.cpu_times()
                own[name] = max(own[name], times.user + times.system)
            except psutil.Error:  # it has ended
                continue
        time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"the run under seed {seed} failed: see {folder}")
    # What a sandbox's processes took is told to nobody where they are ended with their namespace.
    rest = _busy() - busy - sum(own.values())
    return Run(folder, time.monotonic() - began, own | {"the sandboxes, and all else here": rest})


def _busy() -> float:
    """Return the seconds that all processors together have worked since the machine's start."""
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0))


def _processes(driver: int) -> list[tuple[str, psutil.Process]]:
    try:
        found = [("the driver", psutil.Process(driver))]
        for child in found[0][1].children():
            if SERVER in child.cmdline():
                found.append(("the server", child))
    except psutil.Error:
        return []
    return found


def row(seed: int, done: Run) -> tuple[str, bool]:
    """Return a run's row of the table, and whether every bound held."""
    summary = summarise(done.folder)
    steps = summary.steps["train-job0"]
    first, last = steps[0].reward_mean, sum(s.reward_mean for s in steps[-5:]) / 5
    rates = {(e.split, e.label): e.rate for e in summary.evaluations}
    changes = [(rates[split, "before"], rates[split, "after"]) for split in SPLITS]
    training = sum(s.batch_seconds for s in steps)
    fates = " / ".join(
        str(sum(s.groups[fate] for s in steps)) for fate in ("kept", "uniform", "stale", "failed")
    )
    told = " | ".join(f"{before:.3f}, {after:.3f}" for before, after in changes)
    text = f"| {seed} | {first:.3f} | {last:.3f} | {told} | {training:.0f} | {done.whole:.0f} | {fates} |"
    (before, after), *further = changes
    good = first <= 0.4 and last >= 0.8 and before <= 0.35 and after >= 0.8
    good = good and all(later - earlier >= 0.2 for earlier, later in further)
    return text, good and training < TRAINING_SECONDS and done.whole < WHOLE_SECONDS


def phases(done: Run) -> dict[str, float]:
    """Return the seconds of each phase of a run; the training's filling is shared out by the work done in it."""
    events = list(scan(done.folder, ("run_start", "phase", "step_done", "run_done")))
    seconds: Counter[str] = Counter()
    for event, following in zip(events, [*events[1:], events[-1]], strict=True):
        if event["event"] == "phase" and event["name"] != "training":
            seconds[event["name"]] += following["time"] - event["time"]
        elif event["event"] == "step_done":
            step = StepResult.of(event)
            for kind, part in step.fill_parts.items():
                seconds[f"training: filling the batch, {kind}"] += part
            seconds["training: gradients and updates"] += step.train_seconds
            seconds["training: saving and publishing"] += step.publish_seconds
    seconds["processes' start and end"] = done.whole - seconds.total()
    return dict(seconds)


def print_phases(runs: list[Run]) -> None:
    """Print the mean of all runs' phases and processors' seconds."""
    print("\n| where the seconds go, mean of the runs | s | |", "|---|---|---|", sep="\n")
    whole = sum(done.whole for done in runs) / len(runs)
    total: Counter[str] = Counter()
    for done in runs:
        total.update(phases(done))
    for name, seconds in total.items():
        print(f"| {name} | {seconds / len(runs):.1f} | {seconds / len(runs) / whole:.0%} |")
    print(f"| all | {whole:.1f} | |")
    for name in runs[0].processors:
        seconds = sum(done.processors[name] for done in runs) / len(runs)
        print(f"| a processor's time: {name} | {seconds:.1f} | {seconds / whole:.2f} at once |")


def print_families(runs: list[Run]) -> None:
    """Print what share of each family's held-out attempts the trained policies resolved, over all runs and in the run
    where it was least, and the training tasks that the policies of the last six steps resolved least."""
    families: defaultdict[tuple[str, str], list[list[bool]]] = defaultdict(list)
    tasks: defaultdict[str, list[bool]] = defaultdict(list)
    worlds = {f"bundled__{draft.name}": draft for draft in drafts(SEED)}
    for done in runs:
        episodes = [event for event in scan(done.folder, ("episode",)) if event["reward"] is not None]
        newest = max(event["policy_version"] for event in episodes)
        mine: defaultdict[tuple[str, str], list[bool]] = defaultdict(list)
        for event in episodes:
            name, resolved = event["instance_id"], event["outcome"] == "resolved"
            if event["phase"] == "evaluation-after":
                mine[worlds[name].split, worlds[name].world.target.family.name].append(resolved)
            elif not event["phase"].startswith("evaluation") and event["policy_version"] >= newest - 6:
                tasks[name].append(resolved)
        for family, told in mine.items():
            families[family].append(told)
    print(
        "\n| split | family | resolved after training | in the run with the least |",
        "|---|---|---|---|",
        sep="\n",
    )
    for (split, family), each in sorted(families.items()):
        told, least = [*itertools.chain(*each)], min(each, key=lambda told: sum(told) / len(told))
        shares = [f"{sum(some) / len(some):.2f} of {len(some)}" for some in (told, least)]
        print(f"| {split} | {family} | {' | '.join(shares)} |")
    for name, told in sorted(tasks.items(), key=lambda each: sum(each[1]) / len(each[1]))[:3]:
        family = worlds[name].world.target.family.name
        print(f"| train, last six steps | {family}: {name} | {sum(told) / len(told):.2f} of {len(told)} | |")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 11, 12, 13, 14, 15])
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting")
    parser.add_argument(
        "--output", type=Path, default=Path("runs") / f"seeds-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    args = parser.parse_args()
    print(HEADER, "|---" * HEADER.count(" | ") + "|---|", sep="\n", flush=True)
    good, runs = True, []
    for seed in args.seeds:
        runs.append(run(seed, args.output / f"seed{seed}", args.set))
        text, held = row(seed, runs[-1])
        good = good and held
        print(text, "" if held else " <- a bound was missed", flush=True)
    print_phases(runs)
    print_families(runs)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
