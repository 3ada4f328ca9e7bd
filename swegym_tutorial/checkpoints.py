"""The checkpoint files of a run: what a resumed job goes on from, and the older ones that it can go back to.

    train-job<n>-checkpoint.json    the last checkpoint, what its step came to, and in `earlier` those before it

A checkpoint says which step was done last (-1: none), the paths under which the server keeps the training state and
the published weights, and where the job stood in its groups. Knows nothing of how a job works.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .events import RunFolder, dumps, scan, write_atomically

FIELDS = (
    "step",
    "policy_version",
    "checkpoint",
    "sampler",
    "next_group",
    "unfinished_groups",
    "seed",
    "phase",
)


class CheckpointError(RuntimeError):
    """A checkpoint's file cannot be read, or lacks what is asked for; the text names it."""


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return what `write_checkpoint` wrote after the last step. Raises CheckpointError."""
    needed = set(FIELDS) - {"phase"}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        missing = needed - saved.keys()
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from error
    if missing:
        raise CheckpointError(f"the checkpoint {path} lacks {', '.join(sorted(missing))}")
    return saved


def all_checkpoints(saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the checkpoints of a file, the newest first."""
    return [_bare(saved), *map(_bare, saved.get("earlier", []))]


def write_checkpoint(
    path: Path, checkpoint: Mapping[str, Any], result: Mapping[str, Any] | None, keep: int
) -> None:
    """Make this the last checkpoint, and keep so many in all. result: what the step came to, as it is logged."""
    earlier = all_checkpoints(read_checkpoint(path)) if path.exists() else []
    earlier = [each for each in earlier if each["step"] < checkpoint["step"]][: keep - 1]
    write_atomically(path, dumps({**_bare(checkpoint), "result": result, "earlier": earlier}) + "\n")


def checkpoint_of(path: Path, step: int) -> dict[str, Any]:
    """Return the checkpoint after a step. Raises CheckpointError where it is not kept."""
    found = all_checkpoints(read_checkpoint(path))
    chosen = next((each for each in found if each["step"] == step), None)
    if chosen is None:
        raise CheckpointError(f"{path} has no checkpoint of step {step + 1}; {told_steps(found)}")
    return chosen


def go_back(path: Path, step: int) -> dict[str, Any]:
    """Make the checkpoint of an earlier step the last one, and return it. Raises CheckpointError."""
    chosen = checkpoint_of(path, step)
    earlier = [each for each in all_checkpoints(read_checkpoint(path)) if each["step"] < step]
    write_atomically(path, dumps({**chosen, "result": None, "earlier": earlier}) + "\n")
    return chosen


def log_last_step(folder: RunFolder, job: str, saved: Mapping[str, Any]) -> None:
    """Log the step that a job's checkpoint tells of, where its process was killed before it could."""
    logged = -1
    for event in scan(folder.events, ("step_done", "rolled_back")):
        if event.get("job") == job:
            logged = event["step"]
    if saved.get("result") and logged < saved["step"]:
        folder.log("step_done", job=job, **saved["result"])


def gone(path: Path, job: str, lost: str, why: Exception) -> CheckpointError:
    """Say that the server has lost the checkpoint with a path, and which others can be gone back to."""
    found = all_checkpoints(read_checkpoint(path))
    others = [each for each in found if each["checkpoint"] != lost]
    step = next((f", step {each['step'] + 1}" for each in found if each["checkpoint"] == lost), "")
    offer = (
        f"{told_steps(others)} too: go on from one with --resume --from-step N" if others else "none is left"
    )
    return CheckpointError(f"{job}{step}: {why}. Of its checkpoints {offer}")


def told_steps(checkpoints: list[dict[str, Any]]) -> str:
    """Say which steps can be gone back to, counted from 1; 0 is the start."""
    return "it has those of steps " + ", ".join(str(each["step"] + 1) for each in checkpoints)


def _bare(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return {name: checkpoint[name] for name in FIELDS if name in checkpoint}
