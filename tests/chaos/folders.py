"""A small run folder written by hand: two steps, a kill after each, and a resume that goes on to its end.

What each check is shown to find is found in a copy of it that was doctored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swegym_tutorial import TrainingConfig
from swegym_tutorial.episode_files import write_graded
from swegym_tutorial.rollout import Ending, Rollout, Turn
from swegym_tutorial.verdicts import Outcome, Verdict

JOB = "train-job0"
MODEL = "session:train:{part}"


@dataclass
class Told:
    """What is written: the lines of the log, the checkpoint's file, and how many clients the settings name."""

    events: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    clients: int = 1

    def find(self, name: str, **fields: Any) -> dict[str, Any]:
        """Return the first event of a name with these fields."""
        return next(
            e for e in self.events if e["event"] == name and all(e.get(k) == v for k, v in fields.items())
        )

    def log(self, event: str, **fields: Any) -> None:
        self.events.append({"time": float(len(self.events)), "event": event, **fields})

    def group(self, part: int, number: int, rewards: list[float], version: int) -> None:
        for attempt, reward in enumerate(rewards):
            self.begin(part, number, attempt, version)
            key = self._key(part, number, attempt, version)
            self.log("rollout_ready", **key)
            self.log("episode", **key, reward=reward, outcome="resolved" if reward else "unresolved")
        fate = "kept" if len(set(rewards)) > 1 else "uniform"
        self.log(
            "group",
            job=JOB,
            group=number,
            instance_id=f"task-{number}",
            policy_version=version,
            fate=fate,
            rewards=rewards,
            lost=0,
        )

    def begin(self, part: int, number: int, attempt: int, version: int) -> None:
        self.log("rollout_start", **self._key(part, number, attempt, version))

    def unfinished(self, part: int, number: int, attempt: int, version: int) -> None:
        self.log("attempt_unfinished", **self._key(part, number, attempt, version))

    def step(self, part: int, step: int, groups: dict[int, list[float]]) -> dict[str, Any]:
        """Log the training's begin and return the fields of the step's line. groups: number -> rewards."""
        trained = [number for number, rewards in groups.items() if len(set(rewards)) > 1]
        self.log("training_start", job=JOB, step=step, groups=trained)
        kept = [groups[number] for number in trained]
        rewards = [r for group in groups.values() for r in group]
        return {
            "job": JOB,
            "step": step,
            "policy_version": step + 1,
            "checkpoint": f"tinker://{MODEL.format(part=part)}/weights/step{step}",
            "reward_mean": sum(rewards) / len(rewards),
            "reward_mean_kept": sum(map(sum, kept)) / sum(map(len, kept)),
            "attempts": len(rewards),
            "trained_groups": trained,
            "groups": {"kept": len(kept), "uniform": len(groups) - len(kept), "stale": 0, "failed": 0},
            "minibatches": len(kept),
            "metrics": {"loss:sum": 0.5 + step, "grad_norm": 0.1},
        }

    def _key(self, part: int, number: int, attempt: int, version: int) -> dict[str, Any]:
        return {
            "phase": f"run-{part}",
            "job": JOB,
            "group": number,
            "attempt": attempt,
            "instance_id": f"task-{number}",
            "policy_version": version,
        }


MIXED, SAME = [1.0, 0.0], [0.0, 0.0]


def story() -> Told:
    """Two groups a batch, and one begun early.

    Killed between the checkpoint's file and the line of step 0, and in the filling of step 1.
    """
    told = Told()
    told.log("run_start", run="a", resumed=False)
    told.group(0, 0, MIXED, 0)
    told.group(0, 1, SAME, 0)
    told.begin(0, 2, 0, 0)
    first = told.step(0, 0, {0: MIXED, 1: SAME})
    told.unfinished(0, 2, 0, 0)
    told.log("run_start", run="b", resumed=True)
    told.log("step_done", **first)
    told.log("resumed", job=JOB, step=0, checkpoint=first["checkpoint"], restarted=[2])
    told.group(1, 2, MIXED, 1)
    told.begin(1, 3, 0, 1)
    told.unfinished(1, 3, 0, 1)
    told.log("run_start", run="c", resumed=True)
    told.log("resumed", job=JOB, step=0, checkpoint=first["checkpoint"], restarted=[2])
    told.group(2, 2, MIXED, 1)
    told.group(2, 3, MIXED, 1)
    told.begin(2, 4, 0, 1)
    second = told.step(2, 1, {2: MIXED, 3: MIXED})
    told.log("step_done", **second)
    told.log("run_done")
    told.checkpoint = _entry(second, 5, [4]) | {"result": second, "earlier": [_entry(first, 3, [2])]}
    return told


def _entry(step: dict[str, Any], next_group: int, unfinished: list[int]) -> dict[str, Any]:
    told = {name: step[name] for name in ("step", "policy_version", "checkpoint")}
    return told | {"next_group": next_group, "unfinished_groups": unfinished}


def _attempt(task_id: str) -> Rollout:
    arrays = np.arange(3, dtype=np.int32), np.array([False, True, True]), np.zeros(3, np.float32)
    turn = Turn("Done.", 2, (), (), (), 0.1, 0.0)
    return Rollout(task_id, *arrays, (turn,), Ending.FINAL, b"", 0.2)


def write(told: Told, folder: Path) -> Path:
    """Write it as a run does, attempts' folders and the local server's checkpoint included."""
    from safetensors.numpy import save_file

    config = TrainingConfig.laptop(
        clients=told.clients,
        groups_per_batch=2,
        max_groups_per_batch=2,
        group_size=2,
        minibatch_groups=1,
    )
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told.events))
    (folder / f"{JOB}-checkpoint.json").write_text(json.dumps(told.checkpoint))
    for event in told.events:
        if event["event"] == "episode":
            place = folder / "episodes" / event["phase"] / JOB / f"g{event['group']:06d}-a{event['attempt']}"
            place.mkdir(parents=True, exist_ok=True)
            verdict = Verdict(Outcome(event["outcome"]), own_reward=event["reward"])
            write_graded(place, _attempt(event["instance_id"]), verdict)
    weights = folder / "server" / MODEL.format(part=2).replace(":", "-") / "weights"
    weights.mkdir(parents=True)
    save_file({"lora_a": np.arange(6, dtype=np.float32)}, weights / "step1.safetensors")
    return folder
