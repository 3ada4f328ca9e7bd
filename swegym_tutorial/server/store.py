"""Checkpoints on disk: one safetensors file each, written at once or not at all, and found again after a restart.

`tinker://<model>/weights/<name>` is a training state with its optimizer's, `tinker://<model>/sampler_weights/<name>`
a version to sample from. Neither changes once it is there, unless overwriting is asked for. Knows nothing of how
the tensors are used.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .records import LoraSpec, UserError

WEIGHTS = "weights"
SAMPLER_WEIGHTS = "sampler_weights"
EPHEMERAL = "ephemeral"  # sampler weights without a name, which end with their session and the server
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ADDRESS = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")


@dataclass(frozen=True)
class Address:
    """Where a checkpoint is. Raises UserError for a name that could be no file's."""

    model: str
    kind: str
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(
                f"{self.name!r} can't be a checkpoint's name: letters, digits, '.', '_' and '-' (at most 128, "
                "beginning with a letter or digit)"
            )
        if not _NAME.fullmatch(self.folder):
            raise UserError(f"{self.model!r} is no model's id", 404)

    @classmethod
    def parse(cls, path: str) -> Address:
        match = _ADDRESS.fullmatch(path)
        if match is None:
            raise UserError(
                f"{path!r} is no path of a checkpoint: tinker://<model>/weights/<name> is one", 404
            )
        return cls(*match.groups())

    @property
    def folder(self) -> str:
        return self.model.replace(":", "-")

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint without reading its tensors."""

    base_model: str
    spec: LoraSpec
    optimizer: bool  # whether it holds the optimizer's state
    expires: float | None = None  # seconds since the epoch


class Store:
    """The checkpoints under one folder, which belongs to one running server."""

    def __init__(self, folder: Path) -> None:
        """Raises RuntimeError where another server uses the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  (held while the server lives)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError(
                f"another server uses {folder}: stop it, or choose another state folder"
            ) from error
        for left in [*self.folder.glob(f"*/{EPHEMERAL}"), *self.folder.glob("*/*/*.part")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()

    def save(
        self,
        address: Address,
        checkpoint: Checkpoint,
        tensors: Mapping[str, torch.Tensor],
        *,
        overwrite: bool = False,
    ) -> None:
        """Write a checkpoint. Raises UserError where there is one already and overwrite is False."""
        path = self._path(address)
        if not overwrite and self._is_there(address):
            raise UserError(f"{address} is there already, and checkpoints don't change: choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        save_file(dict(tensors), part, metadata={"checkpoint": json.dumps(asdict(checkpoint))})
        with open(part, "rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)

    def describe(self, address: Address) -> Checkpoint:
        """Raises UserError (404) where there is no such checkpoint."""
        with self._open(address) as file:
            return _checkpoint(file)

    def read(self, address: Address) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
        """Raises UserError (404) where there is no such checkpoint."""
        with self._open(address) as file:
            return _checkpoint(file), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def forget_ephemeral(self, model: str) -> None:
        shutil.rmtree(self.folder / model.replace(":", "-") / EPHEMERAL, ignore_errors=True)

    def _path(self, address: Address) -> Path:
        return self.folder / address.folder / address.kind / f"{address.name}.safetensors"

    def _is_there(self, address: Address) -> bool:
        with contextlib.suppress(UserError):
            self.describe(address)
            return True
        return False

    def _open(self, address: Address) -> Any:
        path = self._path(address)
        if not path.is_file():
            raise UserError(f"{address} does not exist: it was never saved here, or has expired", 404)
        with safe_open(path, "pt") as file:
            expires = _checkpoint(file).expires
        if expires is not None and expires < time.time():
            path.unlink()
            raise UserError(f"{address} has expired", 404)
        return safe_open(path, "pt")


def _checkpoint(file: Any) -> Checkpoint:
    values = json.loads(file.metadata()["checkpoint"])
    return Checkpoint(**{**values, "spec": LoraSpec(**values["spec"])})
