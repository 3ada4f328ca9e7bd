"""All that a page on one attempt tells: the attempt and its verdict as recorded, its task, what is missing and why.

Asks no network: a tokenizer or a task that is not on this machine is done without. Knows nothing of how a page looks.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..attempt_json import rollout_from_json, verdict_from_json
from ..bundled import POLICY
from ..config import TrainingConfig
from ..connect import RunError, saved_config
from ..events import read_episode
from ..rollout import Rollout
from ..swegym_tasks import cached_path
from ..tasks import Task, TaskError, load_tasks
from ..verdicts import Verdict
from .episodes import EpisodeList, Place

LONGEST_LOG = 2**20  # bytes of what the tests printed that are read
Decode = Callable[[Sequence[int]], str]
DAMAGE = (
    OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, OverflowError,
    RecursionError,  # JSON of 200,000 lists in each other
)  # fmt: skip


@dataclass(frozen=True)
class EpisodePage:
    """One attempt, as far as it is known."""

    name: str
    instance_id: str
    where: str = ""  # in words: training, train-job0
    training: bool = False  # whether it is of the training, and not of an evaluation
    outcome: str = ""  # where there is no verdict: what the log says
    policy_version: int | None = None
    rollout: Rollout | None = None  # None: nothing was recorded, or it is gone
    verdict: Verdict | None = None  # None: not graded
    task: Task | None = None  # None: it is not on this machine
    notes: tuple[str, ...] = ()  # what is missing, and why


def load_page(episodes: EpisodeList, name: str, config: TrainingConfig | None) -> EpisodePage:
    """Read an attempt. name: one that `episodes.find` gave. What cannot be read is told in the notes."""
    ended = episodes.ended(name)
    path, place = episodes.path(name), episodes.place(name)
    rollout, verdict, notes = _recorded(path)
    instance_id = rollout.task_id if rollout else ended.instance_id if ended else ""
    if verdict is None and ended is not None and ended.reward is None:
        notes.insert(0, f"lost to an infrastructure fault, which is no reward: {ended.reason}")
    elif rollout is not None and verdict is None:
        notes.insert(0, "not graded: the grading had not ended when this was read, or its process is gone")
    elif rollout is None and not notes:
        notes.append(f"its recording is gone: {_why_gone(episodes.folder)}")
    return EpisodePage(
        name=name,
        instance_id=instance_id,
        where=place.words,
        training=place.training,
        outcome=ended.outcome if ended else "",
        policy_version=ended.policy_version if ended else None,
        rollout=rollout,
        verdict=verdict,
        task=_task(config.tasks, instance_id) if config and instance_id else None,
        notes=tuple(notes),
    )


def _why_gone(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no run folder {folder} any more"
    return "it was deleted, by hand or by the run, which deletes its oldest beyond its setting episodes_gb"


def gone_page(page: EpisodePage, place: Place, folder: Path) -> EpisodePage:
    """Return a page on an attempt that neither the log nor a recording tells of any more, as it was read last.

    Its name says all of its place, as what it had may be the name of another now.
    """
    note = "this is what was read before it was gone"
    notes = [each for each in page.notes if not each.startswith(note)]
    return replace(page, name="/".join(place), notes=(*notes, f"{note}: {_why_gone(folder)}"))


def _recorded(path: Path) -> tuple[Rollout | None, Verdict | None, list[str]]:
    try:
        saved = read_episode(path)
    except FileNotFoundError:
        return None, None, []
    except DAMAGE as error:
        return None, None, [_damaged(path, error)]
    notes = []
    try:
        patch = (path / "prediction.patch").read_bytes()
    except OSError as error:
        patch = b""
        notes.append(f"the patch cannot be read: {error.strerror}")
    try:
        rollout = rollout_from_json(saved, patch)
        verdict = verdict_from_json(saved["verdict"], _log(path, rollout)) if "verdict" in saved else None
    except DAMAGE as error:
        return None, None, [_damaged(path, error)]
    return rollout, verdict, notes


def _damaged(path: Path, error: BaseException) -> str:
    return f"its recording in {path.name} is damaged: {type(error).__name__}: {error}"


def _log(path: Path, rollout: Rollout) -> str:
    """Return the end of what the tests printed."""
    try:
        with (path / rollout.task_id.lower() / "test_output.txt").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LOG))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _task(source: str, instance_id: str) -> Task | None:
    """Return a task where its source is on this machine."""
    try:
        if source.partition(":")[0] == "swegym" and not cached_path().is_file():
            return None
        return _tasks(source).get(instance_id)
    except (TaskError, *DAMAGE):  # settings may be foreign, too
        return None


@lru_cache(maxsize=4)
def _tasks(source: str) -> dict[str, Task]:
    head, colon, _ = source.partition(":")
    everything = f"{head}:all" if colon and head in ("bundled", "swegym") else source
    return {task.instance_id: task for task in load_tasks(everything, split=None)}


def read_config(folder: Path) -> TrainingConfig | None:
    """Return a run's settings; None where there are none that can be read, as of a foreign folder."""
    try:
        return saved_config(folder)
    except RunError:
        return None


def find_decoder(config: TrainingConfig | None, tokenizer: Any = None) -> tuple[Decode | None, str]:
    """Return what turns token ids into text, or None and why there is nothing.

    tokenizer: what serves; by default the run's own, where it is on this machine.
    """
    if tokenizer is not None:
        return decoder(tokenizer), ""
    if config is None:
        return None, "the run's settings cannot be read, which name its tokenizer"
    name = config.tokenizer or config.base_model
    try:
        path = _tokenizer_file(name, config)
        if path is None:
            return None, f"the tokenizer {name} is not on this machine"
        from tokenizers import Tokenizer

        return decoder(Tokenizer.from_file(str(path))), ""
    except Exception as error:  # tokenizers raises Exception itself
        return None, f"the tokenizer {name} cannot be loaded: {error}"


def _tokenizer_file(name: str, config: TrainingConfig) -> Path | None:
    """Return the path of a tokenizer.json: the bundled policy's, that of a folder, or one in Hugging Face's cache."""
    if name == TrainingConfig.base_model:
        return POLICY / "tokenizer.json"
    if (path := Path(name) / "tokenizer.json").is_file():
        return path
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "tokenizer.json", revision=config.tokenizer_revision)
    except ValueError:  # no name that the hub could know
        return None
    return Path(found) if isinstance(found, str) else None


def decoder(tokenizer: Any) -> Decode:
    """Return what a tokenizer makes of ids, special tokens included."""

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)

    return decode
