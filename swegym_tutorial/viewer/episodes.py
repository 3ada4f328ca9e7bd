"""The recorded attempts of a run, live or finished: their names, and how each ended.

Reads names of folders and the log, never an attempt, so that a hundred thousand of them are listed in seconds.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..events import EventReader, RunFolder
from ..summary import ADD_NOTHING, job_order

_FOLDER = re.compile(r"g(\d+)-a(\d+)")
TRAINING = "run-"  # a phase of the training begins so
NEAR = 3  # names that are proposed for one that there is not


class Place(NamedTuple):
    """Which attempt: run-17/train-job0/g000003-a2."""

    phase: str  # run-<when it began>, or evaluation-<label>
    job: str
    folder: str

    @property
    def training(self) -> bool:
        return _kind(self.phase) == TRAINING

    @property
    def words(self) -> str:
        """Say it for people."""
        doing = "training" if self.training else self.phase.replace("-", " ", 1)
        return f"{doing}, {self.job}"


class Ended(NamedTuple):
    """How an attempt ended, as the log tells it."""

    outcome: str
    reward: float | None  # None: an infrastructure fault took it
    instance_id: str
    policy_version: int | None
    reason: str  # of an infrastructure fault

    @property
    def kind(self) -> str:
        """resolved, not resolved, or lost."""
        if self.reward is None:
            return "lost"
        return "resolved" if self.outcome == "resolved" else "not resolved"


class EpisodeList:
    """The attempts of one run, as they were at the last `refresh`. Not thread-safe.

    A name is as short as it can be: g000003-a2 in the training of a single client, train-job1/g000003-a2 of several,
    evaluation-before/g000003-a2 of an evaluation. So a name may be another's after a refresh: keep the place.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Raises FileNotFoundError where there is no such folder."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(
                f"there is no run folder {self.folder}: name one that holds an events.jsonl"
            )
        self._reader = EventReader(
            RunFolder(self.folder).events, skip=(*ADD_NOTHING, "group", "attempt_fault")
        )
        self._ended: dict[Place, Ended] = {}
        self._places: dict[str, Place] = {}  # name -> place, of all that are known
        self._names: dict[Place, str] = {}  # the same, turned around
        self.names: tuple[str, ...] = ()  # those that can be looked at, in order
        self.refresh()

    def refresh(self) -> None:
        """Take in what has come or gone since."""
        for event in self._reader.stream():
            if event.get("event") == "episode":
                try:
                    place, ended = _ended(event)
                except (KeyError, TypeError, ValueError, OverflowError):
                    continue  # a foreign line must not hide the others
                self._ended[place] = ended
        there = set(_recorded(self.folder / "episodes"))
        lost = {place for place, ended in self._ended.items() if ended.reward is None}
        self._places = _named(there | self._ended.keys())
        self._names = {place: name for name, place in self._places.items()}
        self.names = tuple(name for name, place in self._places.items() if place in there or place in lost)

    def find(self, name: str) -> str:
        """Return the name in `names` that is meant, or that of an attempt whose recording was deleted.

        name: one of `names`, or with more or less of phase/job/ before it: of several with that name the training's
        comes first, of its newest part. Raises LookupError that names near ones.
        """
        if name in self._places:
            return name
        *given, folder = name.strip("/").split("/")
        found = [
            known
            for known, place in self._places.items()
            if place.folder == folder and set(given) <= {place.phase, place.job}
        ]
        if found:
            return min(found, key=lambda known: (not self._places[known].training, known.count("/")))
        raise LookupError(self._unknown(name, folder))

    def _unknown(self, name: str, folder: str) -> str:
        if not self.folder.is_dir():
            return f"there is no episode {name}: there is no run folder {self.folder} any more"
        if not self._places:
            return f"{self.folder} has no episode {name}: none has been recorded yet"
        group = folder.partition("-")[0]
        near = [known for known, place in self._places.items() if place.folder.startswith(f"{group}-")]
        near = near or list(self.names or self._places)[:2000]
        near = difflib.get_close_matches(name, near, n=NEAR, cutoff=0) or near[:NEAR]
        many = (
            f"there are {len(self.names):,}, from {self.names[0]} to {self.names[-1]}"
            if self.names
            else "the recordings of all are gone"
        )
        return f"{self.folder} has no episode {name}; near it: {', '.join(near)}; {many}"

    def place(self, name: str) -> Place:
        return self._places[name]

    def name_of(self, place: Place) -> str | None:
        """Return an attempt's name, which may change at a refresh; None where nothing tells of it any more."""
        return self._names.get(place)

    def path(self, name: str) -> Path:
        """Return the attempt's folder; there need not be one."""
        return self.folder / "episodes" / Path(*self._places[name])

    def ended(self, name: str) -> Ended | None:
        """Return how an attempt ended; None where the log doesn't say, as while it is being graded."""
        return self._ended.get(self._places[name])


def _ended(event: dict[str, Any]) -> tuple[Place, Ended]:
    folder = f"g{int(event['group']):06d}-a{int(event['attempt'])}"
    place = Place(str(event["phase"]), str(event["job"]), folder)
    reward = event["reward"]
    return place, Ended(
        outcome=str(event["outcome"]),
        reward=None if reward is None else float(reward),
        instance_id=str(event.get("instance_id", "")),
        policy_version=event.get("policy_version"),
        reason=str(event.get("reason", "")),
    )


def _recorded(root: Path) -> Iterator[Place]:
    for phase in _folders(root):
        for job in _folders(root / phase):
            for folder in _folders(root / phase / job):
                if _FOLDER.fullmatch(folder):
                    yield Place(phase, job, folder)


def _folders(path: Path) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [e.name for e in entries if not e.name.startswith(".") and e.is_dir(follow_symlinks=False)]
    except OSError:  # not there, or deleted meanwhile
        return []


def _named(places: Iterable[Place]) -> dict[str, Place]:
    """Return each place under its name, in order."""
    homes: dict[tuple[str, str], list[Place]] = {}  # (phase, job) -> its attempts
    for place in places:
        homes.setdefault((place.phase, place.job), []).append(place)
    named: dict[str, Place] = {}
    for phase, job in sorted(homes, key=_order):
        mine = homes[phase, job]
        alike = [home for home in homes if _kind(home[0]) == _kind(phase)]
        several = [job] if len({other for _, other in alike}) > 1 else []
        # Of what several parts of a run have made, the last has the short name.
        newer = {p.folder for home in alike if home[1] == job and home[0] > phase for p in homes[home]}
        short = "/".join([*([phase] if _kind(phase) != TRAINING else []), *several, ""])
        long = "/".join([phase, *several, ""])
        for place in sorted(mine, key=_numbers):
            named[(long if place.folder in newer else short) + place.folder] = place
    return named


def _kind(phase: str) -> str:
    """Return the same for all parts of the training."""
    return TRAINING if phase.startswith(TRAINING) else phase


def _order(home: tuple[str, str]) -> tuple[Any, ...]:
    """Return a key: the evaluation before training, the training by its parts, the other evaluations."""
    phase, job = home
    time = 0 if phase == "evaluation-before" else 1 if _kind(phase) == TRAINING else 2
    return (time, phase, job_order(job))


def _numbers(place: Place) -> tuple[int, str, int, str]:
    """Return a key by which g000000-a10 comes after g000000-a9."""
    group, _, attempt = place.folder.partition("-")
    return (len(group), group, len(attempt), attempt)
