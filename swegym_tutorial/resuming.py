"""What a run finds that goes on in a used folder: the log and the sandboxes of its earlier parts.

Knows nothing of servers and of training.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from .checkpoints import CheckpointError, all_checkpoints, read_checkpoint, told_steps
from .config import TrainingConfig
from .connect import RunError, anywhere, changed_settings, check_same, saved_config
from .events import RunFolder, mark_unfinished, scan
from .sandbox.leftovers import reap_runs


def begin_log(
    folder: RunFolder, config: TrainingConfig, *, run: str, reward: str | None, resumed: bool
) -> None:
    """Log the start of a run, and before it which attempts an earlier part began and did not end.

    run: the id of this part. reward: the name of the run's own reward.
    """
    for attempt in mark_unfinished(folder.events) if resumed else []:
        folder.log("attempt_unfinished", **attempt)
    names = ("preset", "steps", "clients", "groups_per_batch")
    settings = {name: getattr(config, name) for name in names}
    folder.log("run_start", run=run, **settings, reward=reward, resumed=resumed)


def measured_before(folder: RunFolder) -> set[str]:
    """Return the splits on which an earlier part has measured the base policy."""
    done = scan(folder.events, ("evaluation",))
    return {str(event.get("split")) for event in done if event.get("label") == "before"}


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
    """Whether a run was to be evaluated: it had at least begun with it, and a resumed one goes on so."""
    return any(event.get("label") == "before" for event in scan(folder, ("evaluation_start",)))
