"""Train again on a run's own batches, and print how a held-out family fares on the way.

    python tests/benchmarks/replay.py runs/demo [--set cooldown_share=0] [--family index] [--every 5] [--attempts 2]

The groups that each step of the run was trained on are read from its folder and given to a fresh adapter, in the same
minibatches and order: under the run's own settings that repeats its updates, as the gradients' norms show. With others
it tells what they would have made of the same attempts, which stay those of the run's own policies. So what a run did
to a skill for which it gave no reward is seen step by step, in a minute or two. For runs of one client with the local
server.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swegym_tutorial import load_tasks, sandbox
from swegym_tutorial.attempts import AttemptRunner
from swegym_tutorial.bundled.generate import SEED, drafts
from swegym_tutorial.connect import connect, first_client, saved_config
from swegym_tutorial.episode_files import read_rollout
from swegym_tutorial.evaluate import evaluate
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.grading import Episode
from swegym_tutorial.halt import Halt
from swegym_tutorial.minibatch import Group, prepare_minibatch, split_evenly
from swegym_tutorial.tasks import Task
from swegym_tutorial.trust import make_grader, trust_in
from swegym_tutorial.verdicts import Outcome, Verdict

JOB = "train-job0"


@dataclass(frozen=True)
class Trial:
    """What is told after some steps: the norms of the last gradient, and what the policy then resolved."""

    steps: int
    norm_told: float  # the run's
    norm: float  # here
    resolved: int
    attempts: int


def steps_of(folder: Path) -> list[tuple[list[Group], dict[str, float]]]:
    """Return the groups that each step was trained on, with their attempts as they were recorded, and its metrics."""
    told: dict[int, dict[str, Any]] = {}
    steps = []
    for event in EventReader(folder / "events.jsonl").read():
        if event["event"] == "group" and event["job"] == JOB:
            told[event["group"]] = event
        elif event["event"] == "step_done" and event["job"] == JOB:
            groups = [_group(folder, told[number]) for number in event["trained_groups"]]
            steps.append((groups, event["metrics"]))
    return steps


def _group(folder: Path, told: dict[str, Any]) -> Group:
    attempts = sorted((folder / "episodes").glob(f"run-*/{JOB}/g{told['group']:06d}-a*"))
    if len(attempts) != len(told["rewards"]):
        raise SystemExit(
            f"group {told['group']}: {len(attempts)} attempts are recorded, of {len(told['rewards'])}"
        )
    episodes = tuple(
        Episode(read_rollout(attempt), Verdict(Outcome.RESOLVED if reward else Outcome.UNRESOLVED))
        for attempt, reward in zip(attempts, told["rewards"], strict=True)
    )
    return Group(told["group"], told["instance_id"], told["policy_version"], episodes)


def tasks_of(family: str) -> list[Task]:
    """Return the held-out tasks of a family."""
    names = {f"bundled__{draft.name}" for draft in drafts(SEED) if draft.world.target.family.name == family}
    splits = ("held-out", "held-out-families")
    return [task for split in splits for task in load_tasks(split=split) if task.instance_id in names]


def replay(run: Path, settings: list[str], family: str, every: int, attempts: int) -> Iterator[Trial]:
    """Train again, and tell after each `every` steps what is resolved."""
    steps, tasks = steps_of(run), tasks_of(family)
    config = saved_config(run).with_settings(settings)
    if not tasks:
        raise SystemExit(f"no held-out task is of a family {family!r}")
    with contextlib.ExitStack() as closing:
        folder = RunFolder(closing.enter_context(tempfile.TemporaryDirectory()))
        folder.open()
        closing.callback(folder.close)
        halt = Halt()
        service = connect(config, folder, None, halt, closing, print)
        client, chat = first_client(service, config)
        sandboxes = closing.enter_context(contextlib.closing(sandbox.backend("local", config)))
        closing.callback(halt.set)
        runner = AttemptRunner(
            chat, sandboxes, make_grader(sandboxes, config, trust_in(tasks)), folder, config
        )
        for number, (groups, metrics) in enumerate(steps):
            parts = split_evenly(groups, config.minibatch_groups)
            update = client.update(
                lambda parts=parts: map(prepare_minibatch, parts),  # type: ignore[misc]
                number,
                f"replay-{number}",
            )
            if (number + 1) % every == 0 or number + 1 == len(steps):
                policy = service.sampler(update.sampler)
                found = evaluate(
                    tasks,
                    policy,
                    runner,
                    folder,
                    attempts=attempts,
                    workers=config.rollout_workers,
                    label=f"step-{number + 1}",
                    halt=halt,
                )
                norms = metrics["grad_norm"], update.metrics["grad_norm"]
                yield Trial(number + 1, *norms, found.resolved, found.attempts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="another setting")
    parser.add_argument(
        "--family", default="index", help="whose held-out tasks are tried (default: %(default)s)"
    )
    parser.add_argument(
        "--every", type=int, default=5, help="steps between two trials (default: %(default)s)"
    )
    parser.add_argument("--attempts", type=int, default=2, help="at each task (default: %(default)s)")
    given = parser.parse_args()
    print(f"| steps | gradient's norm: then, now | {given.family}: resolved |", "|---|---|---|", sep="\n")
    for trial in replay(given.run, given.set, given.family, given.every, given.attempts):
        norms = f"{trial.norm_told:.4f}, {trial.norm:.4f}"
        print(f"| {trial.steps} | {norms} | {trial.resolved} of {trial.attempts} |", flush=True)


if __name__ == "__main__":
    main()
