"""Who is served when: order within a client, turns between clients, sampling beside training."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from swegym_tutorial.server import decoding
from swegym_tutorial.server.decoding import Decoder
from swegym_tutorial.server.engine import Engine, Outcome
from swegym_tutorial.server.models import Models, Version
from swegym_tutorial.server.records import SampleJob, Samples, UserError
from swegym_tutorial.server.store import Address, Store

WITHIN = 60  # seconds


@pytest.fixture
def models(folders: dict[str, Path], tmp_path: Path) -> Models:
    return Models({"tiny": folders["qwen3"], "alias": folders["qwen3"]}, Store(tmp_path), threads=1)


def job_of(tokens: int) -> SampleJob:
    return SampleJob(np.array([3, 4, 5]), tokens, stop_tokens=frozenset())


def test_clients_take_turns_and_keep_their_order(models: Models) -> None:
    engine, done = Engine(models), threading.Event()
    served: list[str] = []
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        engine.submit(name[0], lambda name=name: served.append(name) or {}, lambda outcome: None)
    engine.submit("a", dict, lambda outcome: done.set())
    engine.start()
    assert done.wait(WITHIN)
    assert served == ["a1", "b1", "c1", "a2", "b2", "a3"]
    engine.stop()


def test_training_and_sampling_alternate(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swegym_tutorial.server.engine.SHORTEST_SLICE", 0.0)  # a step a slice
    monkeypatch.setattr("swegym_tutorial.server.engine.LONGEST_SLICE", 0.0)
    clock, step = [0.0], Decoder._step

    def timed(decoder: Decoder) -> None:
        step(decoder)
        clock[0] += 1.0

    monkeypatch.setattr(
        decoding, "time", SimpleNamespace(monotonic=lambda: clock[0])
    )  # nothing else takes time
    monkeypatch.setattr(Decoder, "_step", timed)
    engine = Engine(models)
    served: queue.Queue[str] = queue.Queue()
    version = Version(models.base("tiny"), None)
    for n in range(1, 4):
        engine.sample(version, job_of(n), lambda outcome, n=n: served.put(f"sample {n}"))
    for n in range(1, 4):
        engine.submit("a", dict, lambda outcome, n=n: served.put(f"work {n}"))
    engine._slice = 0.0
    engine.start()
    order = [served.get(timeout=WITHIN) for _ in range(6)]
    assert order == ["sample 1", "work 1", "sample 2", "work 2", "sample 3", "work 3"]
    engine.stop()


def test_a_fault_is_told_to_those_it_meets_and_to_nobody_else(
    models: Models, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(models)
    told: queue.Queue[Outcome] = queue.Queue()

    def fault() -> Outcome:
        raise ZeroDivisionError("a fault of the server's own")

    engine.start()
    engine.submit("a", fault, told.put)
    assert isinstance(told.get(timeout=WITHIN), ZeroDivisionError)
    assert "a fault of the server's own" in capfd.readouterr().err
    engine.sample(Version(models.base("tiny"), Address("gone", "weights", "x")), job_of(2), told.put)
    missing = told.get(timeout=WITHIN)
    assert isinstance(missing, UserError) and "does not exist" in str(missing)
    assert "does not exist" not in capfd.readouterr().err  # the user's own, who has been told
    engine.sample(Version(models.base("alias"), None), job_of(2), told.put)
    assert isinstance(told.get(timeout=WITHIN), Samples)
    engine.submit("a", dict, told.put)
    assert told.get(timeout=WITHIN) == {}
    engine.stop()


def test_a_prompt_that_cannot_be_read_is_answered_with_the_fault(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = models.base("tiny").sampling
    forward, faults = sampling.forward, [MemoryError("no room for the prompt")]

    def forward_or_fault(*given: Any) -> torch.Tensor:
        if faults:
            raise faults.pop()
        return forward(*given)

    monkeypatch.setattr(sampling, "forward", forward_or_fault)
    engine, version = Engine(models), Version(models.base("tiny"), None)
    told: queue.Queue[Outcome] = queue.Queue()
    engine.start()
    engine.sample(version, job_of(5), told.put)
    assert isinstance(told.get(timeout=WITHIN), MemoryError)
    engine.sample(version, job_of(5), told.put)
    assert isinstance(told.get(timeout=WITHIN), Samples)
    engine.stop()


def test_names_may_share_a_model(models: Models) -> None:
    assert models.base("tiny") is models.base("alias")
    with pytest.raises(UserError, match="unknown model 'x': this server has tiny, alias"):
        models.base("x")
