"""The files of one attempt: how they are written, and read back.

An attempt is one .npz file, which `numpy.load(path)` opens: `tokens` (int32), `mask` (bool) and `logprobs` (float32,
exact), all of shape (tokens,); `attempt` and, where it is graded, `verdict` are JSON text in UTF-8, as uint8:
`json.loads(bytes(file["attempt"]))`. Earlier versions wrote gzipped JSON, which is read as well.
Knows nothing of runs and their logs.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import secrets
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .attempt_json import dumps, rollout_from_json, turns_to_json, verdict_to_json
from .rollout import RecordingLost, Rollout
from .verdicts import Verdict

UNGRADED, GRADED = "ungraded.npz", "trajectory.npz"
# The graded one again, as it takes the other's place: whoever comes between the two finds it then.
NAMES = (GRADED, UNGRADED, GRADED, "trajectory.json.gz", "ungraded.json.gz")
ARRAYS = {"tokens": np.int32, "mask": np.bool_, "logprobs": np.float32}
PARTS = (".trajectory.", ".ungraded.")  # how files are named until they are whole
OURS = secrets.token_hex(4)  # ends those of this process
LEVEL = 4  # of compression: tests/benchmarks/trajectories.py tells what others would take


def write_ungraded(folder: Path, rollout: Rollout) -> int:
    """Write an attempt as it stands before grading, in the place of an earlier one; returns the file's bytes.

    It is not compressed, as it is read soon and stays for as long as the grading takes.
    """
    size = _write(folder / UNGRADED, _members(rollout), zipfile.ZIP_STORED)
    for name in NAMES[2:]:
        (folder / name).unlink(missing_ok=True)
    return size


def write_graded(folder: Path, rollout: Rollout, verdict: Verdict) -> tuple[int, int]:
    """Put the attempt with its verdict in the place of the ungraded one; returns its bytes, and those it freed.

    It is written from memory, whatever became of the file. Raises RecordingLost where it is not there, nor readable.
    """
    told = {"verdict": _text(verdict_to_json(verdict))}
    size = _write(folder / GRADED, _members(rollout.whole()) | told, zipfile.ZIP_DEFLATED)
    ungraded = folder / UNGRADED
    try:
        freed = ungraded.stat().st_size
        ungraded.unlink()
    except FileNotFoundError:
        freed = 0
    return size, freed


def is_left_over(name: str) -> bool:
    """Whether a file of this name in an attempt's folder is what a process was writing when it was killed."""
    return name.startswith(PARTS) and not name.endswith(f".{OURS}")


def _members(rollout: Rollout) -> dict[str, np.ndarray]:
    arrays = {name: getattr(rollout, name).astype(kind, copy=False) for name, kind in ARRAYS.items()}
    return arrays | {"attempt": _text(turns_to_json(rollout))}


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(dumps(value).encode("utf-8", "backslashreplace"), np.uint8)


def _write(path: Path, members: Mapping[str, np.ndarray], compression: int) -> int:
    """Write a file so that a reader of a live run never sees half of it; returns its bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, array in members.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=False)
            # A ZipInfo has no time of its own: the same attempt gives the same bytes.
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), data.getbuffer(), compression, LEVEL)
    part = path.with_name(f".{path.name}.{OURS}")
    try:
        size = part.write_bytes(packed.getbuffer())
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return size


def read_episode(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return an attempt as it was saved: its trajectory with the verdict, or without one where it was not graded.

    `tokens`, `mask` and `logprobs` are plain lists. Raises FileNotFoundError where the folder holds neither, OSError,
    and ValueError or EOFError where a file is damaged.
    """
    saved = _read(Path(folder))
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in saved.items()}


def read_rollout(folder: Path) -> Rollout:
    """Return an attempt as it was.

    Raises as read_episode, and TypeError and the like where it is not what is written there.
    """
    return rollout_from_json(_read(folder), (folder / "prediction.patch").read_bytes())


def _read(folder: Path) -> dict[str, Any]:
    for name in NAMES:
        try:
            data = (folder / name).read_bytes()
        except FileNotFoundError:
            continue
        return _unpacked(data) if name.endswith(".npz") else json.loads(gzip.decompress(data))
    raise FileNotFoundError(f"no attempt is recorded in {folder}: it has neither {GRADED} nor {UNGRADED}")


def _unpacked(data: bytes) -> dict[str, Any]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            saved = {**json.loads(bytes(file["attempt"])), **{name: file[name] for name in ARRAYS}}
            if "verdict" in file:
                saved["verdict"] = json.loads(bytes(file["verdict"]))
            if wrong := [name for name, kind in ARRAYS.items() if saved[name].dtype != kind]:
                raise ValueError(f"{wrong[0]} is of type {saved[wrong[0]].dtype}")
            return saved
    except (
        Exception
    ) as error:  # numpy, zipfile, zlib, struct, json: what they raise of damage is told nowhere
        raise ValueError(f"{type(error).__name__}: {error}") from error


class Recording:
    """Reads an attempt back from its folder. While one is held, the attempt is needed, and not deleted for space."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """key: the fields of the attempt's events."""
        self._folder, self._key = folder, key

    def __call__(self) -> Rollout:
        """Raises RecordingLost where it cannot be read: deleted by hand, damaged, or on a disk that fails."""
        try:
            return read_rollout(self._folder)
        except Exception as error:  # whatever is written there
            why = f"{type(error).__name__}: {error}"
            raise RecordingLost(
                f"the recording in {self._folder} cannot be read back: {why}", self._key
            ) from error
