"""Run folders without a run: a seeded writer of plausible events in the log's exact format.

What people look at (figures, dashboard) reads a run's folder and nothing else, so that it can be tested on a
folder written in a moment. `Replay` writes one while somebody watches, and is paused and stopped like a run.
"""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swegym_tutorial.events import RunFolder, dumps
from swegym_tutorial.habits import rates
from swegym_tutorial.summary import FATES

BEGAN = 1_790_000_000.0  # seconds since 1970
GROUPS, ATTEMPTS = 8, 8  # groups a batch, attempts a group
HELD_OUT = 32  # tasks


class Events:
    """Yields a run's events in order, with a clock of its own."""

    def __init__(
        self,
        seed: int = 0,
        *,
        steps: int = 30,
        clients: int = 1,
        planned: int | None = None,
        evaluations: tuple[str, ...] = ("before", "after"),
        first: float = 0.25,
        last: float = 0.93,
        slowness: float = 1.0,
        end: str = "run_done",
        splits: tuple[str, ...] = ("held-out",),
        habits: bool = False,
    ) -> None:
        """splits: that are evaluated, each of 32 tasks. habits: whether attempts and steps tell of them, and have them more and more."""
        self.random = random.Random(seed)
        self.splits, self.habits, self._habit_draws = splits, habits, random.Random(seed + 1)
        self.now, self.slowness = BEGAN, slowness
        self.steps, self.clients, self.planned = steps, clients, planned or steps
        self.evaluations, self.first, self.last, self.end = evaluations, first, last, end

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield self.event("run_start", preset="laptop", steps=self.planned, clients=self.clients)
        yield self.event("phase", name="starting the training server and the sandboxes")
        if "before" in self.evaluations:
            for split in self.splits:
                yield from self.evaluation("before", "base", self.first, split)
        yield self.event("phase", name="training")
        for step in range(self.steps):
            for job in range(self.clients):
                yield from self.batch(f"train-job{job}", step)
        if "after" in self.evaluations:
            for job in range(self.clients):
                for split in self.splits:
                    yield from self.evaluation("after", f"train-job{job}", self.last - 0.04, split)
        if self.end:
            yield self.event("phase", name="drawing the figure")
            reason = {"reason": "PolicyError: the server did not answer"} if self.end == "run_failed" else {}
            yield self.event(self.end, **reason)

    def event(self, event: str, seconds: float = 0.02, /, **fields: Any) -> dict[str, Any]:
        self.now += seconds
        return {"time": round(self.now, 3), "event": event, **fields}

    def rate(self, step: int) -> float:
        """The chance of an attempt in a step: an S-shaped way from the first to the last."""
        x = step / max(1, self.planned - 1)
        return self.first + (self.last - self.first) * x * x * (3 - 2 * x)

    def attempt(self, rate: float, **key: Any) -> Iterator[dict[str, Any]]:
        yield self.event("rollout_start", **key)
        tokens = self.random.randint(20, 60)
        yield self.event("sample", **key, tokens=tokens, seconds=0.01)
        yield self.event("tool", **key, exit_code=0, seconds=0.005)
        yield self.event("rollout_ready", 0.001, **key, ending="final", turns=2, sampled_tokens=tokens)
        yield self.event("grading_start", 0.001, **key)
        reward = float(self.random.random() < rate)
        outcome = "resolved" if reward else "unresolved"
        habits = {"habits": self.habits_at(rate)} if self.habits else {}
        yield self.event(
            "episode",
            0.018,
            **key,
            reward=reward,
            outcome=outcome,
            ending="final",
            sampled_tokens=tokens,
            **habits,
        )

    def habits_at(self, rate: float) -> dict[str, bool]:
        """Draw the habits of an attempt in which they have come up, the last one in one of four."""
        names = ("look", "act", "line", "check", "repair")[: 5 if self._habit_draws.random() < 0.25 else 4]
        return {name: name == "act" or self._habit_draws.random() < rate for name in names}

    def evaluation(
        self, label: str, job: str, rate: float, split: str = "held-out"
    ) -> Iterator[dict[str, Any]]:
        planned = HELD_OUT * ATTEMPTS
        yield self.event("phase", name=f"evaluating the {split} split {label} training")
        yield self.event("evaluation_start", label=label, job=job, split=split, attempts=planned)
        resolved = 0
        for number in range(planned):
            for event in self.attempt(
                rate,
                phase=f"evaluation-{label}",
                job=job,
                group=number % HELD_OUT,
                policy_version=0,
                attempt=number // HELD_OUT,
            ):
                resolved += int(event.get("reward") or 0)
                yield event
        counts = {"attempts": planned, "resolved": resolved, "lost": 0}
        yield self.event("evaluation", label=label, job=job, split=split, policy_version=0, **counts)

    def batch(self, job: str, step: int) -> Iterator[dict[str, Any]]:
        rewards: list[float] = []
        habits: list[dict[str, bool]] = []
        fates = dict.fromkeys(FATES, 0)
        for number in range(GROUPS):
            key = {"phase": "run-1", "job": job, "group": step * GROUPS + number, "policy_version": step}
            rate = min(1.0, max(0.0, self.random.gauss(self.rate(step), 0.12)))
            mine: list[float] = []
            for attempt in range(ATTEMPTS):
                for event in self.attempt(rate, **key, attempt=attempt):
                    mine += [event["reward"]] if "reward" in event else []
                    habits += [event["habits"]] if "habits" in event else []
                    yield event
            fate = "uniform" if len(set(mine)) == 1 and number else "kept"
            fates[fate] += 1
            rewards += mine
            yield self.event(
                "group", job=job, group=key["group"], instance_id="bundled__cart-route-01", policy_version=step,
                fate=fate, rewards=mine, lost=0,
            )  # fmt: skip
        fill, train, publish = (
            self.slowness * self.random.uniform(*bounds) for bounds in ((3.5, 5.5), (1.2, 1.6), (0.15, 0.25))
        )
        yield self.event(
            "step_done",
            fill + train + publish,
            job=job,
            step=step,
            policy_version=step + 1,
            reward_mean=sum(rewards) / len(rewards),
            reward_mean_kept=0.5,
            checkpoint=f"tinker://run/weights/{job}-step{step:05d}",
            attempts=len(rewards),
            lost=0,
            **({"habits": rates(habits)} if self.habits else {}),
            groups=fates,
            batch_seconds=round(fill + train + publish, 3),
            fill_seconds=round(fill, 3),
            train_seconds=round(train, 3),
            publish_seconds=round(publish, 3),
            work_seconds={
                kind: round(self.random.uniform(0.9, 1.1) * share, 3)
                for kind, share in (("sampling", 30.0), ("tools", 9.0), ("grading", 14.0))
            },
            minibatches=2,
            metrics={},
        )


def write_run(folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write a whole run's log; the options are those of Events."""
    folder.mkdir(parents=True)
    lines = [dumps(event) + "\n" for event in Events(seed, **options)]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


class Replay:
    """Writes a run's log step by step from a thread, and is started, paused and stopped like a TrainingRun."""

    def __init__(self, output: Path | str, pause_after: int | None = None, **options: Any) -> None:
        """pause_after: wait for `go_on` once so many steps are done, so that a test decides what comes when."""
        self.folder = RunFolder(output)
        self.go_on = threading.Event()
        self._pause_after = pause_after
        self._events = Events(**options)
        self._stop = threading.Event()
        self._unpaused = threading.Event()
        self._unpaused.set()
        self._done = threading.Event()

    def start(self) -> Replay:
        self.folder.open()
        threading.Thread(target=self._main, daemon=True).start()
        return self

    def pause(self) -> None:
        self._unpaused.clear()
        self.folder.log("paused")

    def resume(self) -> None:
        self._unpaused.set()
        self.folder.log("unpaused")

    def stop(self) -> None:
        self._stop.set()

    def join(self, timeout: float | None = None) -> bool:
        return self._done.wait(timeout)

    def wait(self) -> None:
        self._done.wait()

    @property
    def running(self) -> bool:
        return not self._done.is_set()

    def _main(self) -> None:
        for event in self._events:
            while not self._unpaused.wait(0.02) and not self._stop.is_set():
                pass
            if self._stop.is_set():
                event = {"event": "run_stopped"}
            fields = {key: value for key, value in event.items() if key not in ("time", "event")}
            self.folder.log(event["event"], **fields)
            if event["event"] == "run_stopped":
                break
            if event["event"] == "step_done" and event["step"] + 1 == self._pause_after:
                while not self.go_on.wait(0.02) and not self._stop.is_set():
                    pass
        self.folder.close()
        self._done.set()


def write_concurrent_run(
    folder: Path,
    seed: int = 0,
    *,
    jobs: int = 1,
    steps: int = 3,
    workers: int = 16,
    graders: int = 2,
    groups: int = 8,
    attempt: float = 10.0,
    grading: float = 1.0,
    training: float = 8.0,
    began: float = BEGAN,
    end: str = "run_done",
) -> Path:
    """Write a run whose attempts go on side by side: workers and graders of each job, and one trainer for all.

    attempt, grading: mean seconds. training: seconds a batch. A batch takes the next `groups` groups that are not
    uniform; attempts sample from the newest policy at their start. The log is appended to where there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"train-job{n}" for n in range(jobs)]
    lines: list[Line] = [(began, {"event": "run_start", "preset": "laptop", "steps": steps, "clients": jobs})]
    free = began  # until when the trainer is busy
    clients = [
        _Client(
            name, random.Random(f"{seed} {name}"), [began + 1] * workers, [began + 1] * graders, began + 1
        )
        for name in names
    ]
    for step in range(steps):
        filled = {client.job: client.fill(lines, groups, attempt, grading) for client in clients}
        for client in sorted(clients, key=lambda client: filled[client.job]):
            free = client.train(lines, step, filled[client.job], free, training)
    lines += [(max(time for time, _ in lines) + 1, {"event": end})] if end else []
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for time, event in sorted(lines, key=lambda line: line[0]):
            file.write(dumps({"time": round(time, 3), **event}) + "\n")
    return folder


Line = tuple[float, dict[str, Any]]


class _Client:
    """One job of a concurrent run, with a clock for each of its workers."""

    def __init__(
        self, job: str, draw: random.Random, rollouts: list[float], gradings: list[float], now: float
    ) -> None:
        self.job, self.draw, self.rollouts, self.gradings = job, draw, rollouts, gradings
        self.published, self.groups, self.began = [(now, 0)], 0, now
        self.fates: dict[str, int] = {}
        self.rewards: list[float] = []

    def fill(self, lines: list[Line], groups: int, attempt: float, grading: float) -> float:
        """Add the lines of groups until so many are kept; returns when the last one is complete."""
        self.fates, self.rewards = dict.fromkeys(FATES, 0), []
        filled = 0.0
        while self.fates["kept"] < groups:
            fate, done = self._group(lines, attempt, grading)
            self.fates[fate] += 1
            filled = max(filled, done)
        return filled

    def train(self, lines: list[Line], step: int, filled: float, free: float, seconds: float) -> float:
        """Add the lines of one update on a trainer that is busy until `free`; returns when it is free again."""
        key = {"job": self.job, "step": step}
        start = max(filled, free)
        trained, publish = start + seconds, 0.1 * seconds
        done = trained + publish
        lines.append((filled, {"event": "training_start", **key, "groups": []}))
        for at in (start + 0.5 * seconds, trained):
            lines.append((at, {"event": "minibatch", **key, "seconds": 0.5 * seconds}))
        lines.append((done, {
            "event": "step_done", **key, "policy_version": step + 1, "reward_mean": statistics.fmean(self.rewards),
            "reward_mean_kept": 0.5, "checkpoint": "tinker://x", "attempts": len(self.rewards), "lost": 0,
            "groups": self.fates, "batch_seconds": done - self.began, "fill_seconds": filled - self.began,
            "train_seconds": trained - filled, "publish_seconds": publish, "trainer_seconds": seconds,
            "work_seconds": {"sampling": 3.0, "tools": 1.0, "grading": 1.0}, "minibatches": 2, "metrics": {},
        }))  # fmt: skip
        self.began = done
        self.published.append((done, step + 1))
        return done

    def _group(self, lines: list[Line], attempt: float, grading: float) -> tuple[str, float]:
        """Add one group's lines; returns its fate, and when it is complete."""
        rate, rewards, ends = self.draw.choice((0.0, 0.4, 0.7)), [], []
        starts = max(min(self.rollouts), self.published[0][0])
        version = max(number for time, number in self.published if time <= starts)
        key = {"phase": "run-1", "job": self.job, "group": self.groups, "policy_version": version}
        for each in range(ATTEMPTS):
            rewards.append(float(self.draw.random() < rate))
            ends.append(self._attempt(lines, {**key, "attempt": each}, attempt, grading, rewards[-1]))
        fate, done = "uniform" if len(set(rewards)) == 1 else "kept", max(ends)
        lines.append((done, {"event": "group", **key, "fate": fate, "rewards": rewards, "lost": 0}))
        if fate == "kept":
            asked = {"job": self.job, "group": self.groups, "policy_version": version}
            lines.append((done + 0.2 * attempt, {"event": "reference", **asked, "seconds": 0.2 * attempt}))
        self.rewards += rewards
        self.groups += 1
        return fate, done

    def _attempt(
        self, lines: list[Line], key: dict[str, Any], attempt: float, grading: float, reward: float
    ) -> float:
        """Add one attempt's lines, with two turns; returns when it is graded."""
        worker = self.rollouts.index(min(self.rollouts))
        start = self.rollouts[worker]
        self.rollouts[worker] = ready = start + attempt * self.draw.uniform(0.5, 1.5)
        half = (start + ready) / 2
        tool = 0.2 * (half - start)
        for at in (half, ready):
            lines.append((at, {"event": "sample", **key, "tokens": 40, "seconds": half - start - tool}))
            lines.append((at, {"event": "tool", **key, "exit_code": 0, "seconds": tool}))
        grader = self.gradings.index(min(self.gradings))
        began = max(ready, self.gradings[grader])
        self.gradings[grader] = graded = began + grading * self.draw.uniform(0.5, 1.5)
        verdict = {"reward": reward, "outcome": "resolved", "ending": "final", "sampled_tokens": 80}
        lines += [
            (start, {"event": "rollout_start", **key}),
            (ready, {"event": "rollout_ready", **key}),
            (began, {"event": "grading_start", **key}),
            (graded, {"event": "episode", **key, **verdict}),
        ]
        return graded
