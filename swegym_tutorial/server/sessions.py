"""Who is connected, and what belongs to whom: sessions, their models and their samplers.

A session that hasn't been heard of for `patience` seconds ends; what it holds in memory is released then, its
checkpoints stay. Used by the event loop's thread alone.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from .models import Version
from .records import LoraSpec, UserError

PATIENCE = 15 * 60.0  # seconds; the SDK sends a heartbeat every ten


@dataclass(frozen=True)
class Model:
    """A LoRA client as HTTP knows it."""

    id: str
    session: str
    base: str  # the name that the user knows it by
    spec: LoraSpec


@dataclass(frozen=True)
class SamplerEntry:
    """A sampling session: an immutable version to sample from."""

    id: str
    session: str
    base: str
    version: Version


@dataclass
class Session:
    id: str
    heard: float = field(default_factory=time.monotonic)


class Sessions:
    """Look-ups raise UserError (404) for what isn't there, and say why that may be."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self.patience = patience
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, SamplerEntry] = {}

    def open(self) -> Session:
        session = Session(uuid.uuid4().hex)
        self._sessions[session.id] = session
        return session

    def hear(self, id: str) -> Session:
        if id not in self._sessions:
            raise UserError(f"unknown session {id}: {self._why()}", 404)
        session = self._sessions[id]
        session.heard = time.monotonic()
        return session

    def add_model(self, model: Model) -> None:
        self._models[model.id] = model

    def model(self, id: str) -> Model:
        if id not in self._models:
            raise UserError(f"unknown model {id}: {self._why()}", 404)
        self.hear(self._models[id].session)
        return self._models[id]

    def add_sampler(self, sampler: SamplerEntry) -> None:
        self._samplers[sampler.id] = sampler

    def sampler(self, id: str) -> SamplerEntry:
        if id not in self._samplers:
            raise UserError(f"unknown sampling session {id}: {self._why()}", 404)
        self.hear(self._samplers[id].session)
        return self._samplers[id]

    def drop_model(self, id: str) -> None:
        self._models.pop(id, None)

    def end_silent(self) -> list[tuple[Session, list[Model]]]:
        """End the sessions that haven't been heard of, and return them with the models to release."""
        now = time.monotonic()
        ended = []
        for session in [s for s in self._sessions.values() if now - s.heard > self.patience]:
            del self._sessions[session.id]
            models = [model for model in self._models.values() if model.session == session.id]
            self._models = {id: m for id, m in self._models.items() if m.session != session.id}
            self._samplers = {id: s for id, s in self._samplers.items() if s.session != session.id}
            ended.append((session, models))
        return ended

    def _why(self) -> str:
        return (
            "the server was started again since, or the session ended after "
            f"{self.patience:.0f} s without a heartbeat"
        )
