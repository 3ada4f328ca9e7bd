"""What a run finds that goes on in a used folder: the log and the sandboxes of its earlier parts.

Knows nothing of servers and of training.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoints import CheckpointError, all_checkpoints, read_checkpoint, told_steps
from .config import TrainingConfig
from .connect import RunError, anywhere, changed_settings, check_same, saved_config
from .events import RunFolder, mark_unfinished, scan
from .sandbox.leftovers import reap_runs
from .tasks import Task


def begin_log(
    folder: RunFolder,
    config: TrainingConfig,
    *,
    run: str,
    reward: str | None,
    evaluate: bool,
    resumed: bool,
) -> None:
    """Log the start of a run, and before it which attempts an earlier part began and did not end.

    run: the id of this part. reward: the name of the run's own reward. evaluate: whether it is measured.
    """
    for attempt in mark_unfinished(folder.events) if resumed else []:
        folder.log("attempt_unfinished", **attempt)
    names = ("preset", "steps", "clients", "groups_per_batch")
    settings = {name: getattr(config, name) for name in names}
    folder.log("run_start", run=run, **settings, reward=reward, evaluate=evaluate, resumed=resumed)


def measured_before(folder: RunFolder, tasks: Sequence[Task], attempts: int) -> set[str]:
    """Return the splits of these tasks on which an earlier part has measured the base policy, as it would be now.

    attempts: at each task. Where their number or the tasks were others (evaluation_tasks has changed, or a task could
    not be opened) a split is not among them, so that "before" and "after" are of the same. Its last measuring counts.
    """
    now: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        now[task.split].add(task.instance_id)
    done: set[str] = set()
    for event in scan(folder.events, ("evaluation",)):
        if event.get("label") != "before" or (split := event.get("split")) not in now:
            continue
        made = event["attempts"] + event.get("lost", 0)
        same = made == len(now[split]) * attempts and now[split].issuperset(event.get("tasks", ()))
        (done.add if same else done.discard)(split)
    return done


def check_settings(folder: RunFolder, config: TrainingConfig, reward: str | None) -> dict[str, list[Any]]:
    """Return the settings that differ from the earlier parts', as name -> [old, new].

    reward: the name of the run's own reward. Raises RunError where something has changed that must stay the same.
    """
    saved = anywhere(saved_config(folder.path))
    check_same(saved, config)
    began = [event.get("reward") for event in scan(folder.events, ("run_start",))]
    if began and began[-1] != reward:
        was, now = (f"the reward {name}" if name else "the plain reward" for name in (began[-1], reward))
        raise RunError(
            f"{folder.path} began with {was} and would go on with {now}: a run is resumed with the reward that it began "
            "with, in Python, by TrainingRun(..., resume=True, reward=...)"
        )
    return changed_settings(saved, config)


def check_step(folder: RunFolder, config: TrainingConfig, step: int) -> None:
    """Refuse to go back to the checkpoint after so many steps where a client has none. Raises RunError."""
    paths = [folder.checkpoint(job) for job in range(config.clients)]
    there = [path for path in paths if path.exists()]
    if not there:
        raise RunError(f"{folder.path} has no checkpoint yet, so there is no step to go back to")
    for path in there:
        try:
            kept = all_checkpoints(read_checkpoint(path))
        except CheckpointError as error:
            raise RunError(str(error)) from error
        if step - 1 not in [each["step"] for each in kept]:
            raise RunError(f"{path} has no checkpoint of step {step}: {told_steps(kept)}")


def reap_dead(folder: RunFolder, kind: str, own: str) -> None:
    """End, in the background, what earlier parts of this run, and other dead runs of this machine, left.

    kind: of sandboxes. own: the id of the part that runs now.
    """
    runs = [event["run"] for event in scan(folder.events, ("run_start",)) if event.get("run")]
    dead = [run for run in runs if run != own]

    def work() -> None:
        if count := reap_runs(kind, dead, lambda text: folder.log("note", text=text)):
            folder.log("reaped", kind=kind, count=count, runs=dead)

    threading.Thread(target=work, name="reaping", daemon=True).start()


def was_evaluated(folder: Path) -> bool:
    """Whether the last part of a run was to be evaluated; of older logs, whether one had at least begun with it."""
    told = [event["evaluate"] for event in scan(folder, ("run_start",)) if "evaluate" in event]
    return (
        bool(told[-1])
        if told
        else any(event.get("label") == "before" for event in scan(folder, ("evaluation_start",)))
    )
