"""Clients side by side: whose failure is whose."""

from __future__ import annotations

import threading
import time

import pytest

from swegym_tutorial.batches import NoLearningSignal
from swegym_tutorial.calls import PolicyError
from swegym_tutorial.clients import Clients, ClientsFailed
from swegym_tutorial.events import EventReader, RunFolder
from swegym_tutorial.halt import Halt, Stopped


class Job:
    """Takes some time, and ends as it is told."""

    def __init__(
        self, index: int, halt: Halt, seconds: float = 0.0, error: BaseException | None = None
    ) -> None:
        self.index, self.name = index, f"train-job{index}"
        self.halt, self.seconds, self.error = halt.child(), seconds, error
        self.ended_for_time = False

    def run(self, phase: str, deadline: float) -> str:
        if self.halt.wait(self.seconds) and not self.ended_for_time:
            raise Stopped
        if self.error is not None:
            raise self.error
        return f"policy {self.index}"

    def end_of_time(self) -> None:
        self.ended_for_time = True
        self.halt.set()

    def join(self, timeout: float) -> bool:
        return True


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open()
    yield folder
    folder.close()


def clients(folder: RunFolder, halt: Halt, *jobs: Job) -> Clients:
    return Clients(jobs, folder, halt)  # type: ignore[arg-type]


def test_one_that_fails_leaves_the_others_alone_and_is_told_of_at_the_end(folder):
    halt = Halt()
    jobs = [Job(0, halt, 0.5), Job(1, halt, 0.0, PolicyError("no adapter left")), Job(2, halt, 0.5)]
    side_by_side = clients(folder, halt, *jobs)
    side_by_side.run("run-1", time.time() + 60)
    assert side_by_side.policies == {0: "policy 0", 2: "policy 2"}
    with pytest.raises(ClientsFailed, match=r"1 of 3 clients failed.*train-job1: no adapter left.*--resume"):
        side_by_side.check()
    events = [(e["event"], e["job"]) for e in EventReader(folder.path).read()]
    assert sorted(events) == [
        ("job_done", "train-job0"),
        ("job_done", "train-job2"),
        ("job_failed", "train-job1"),
    ]


def test_where_all_fail_the_first_error_is_raised_as_it_is(folder):
    class Second(Job):
        """Fails when another one has failed."""

        def run(self, phase: str, deadline: float) -> str:
            while not side_by_side.errors and time.time() < deadline:
                time.sleep(0.01)
            return super().run(phase, deadline)

    halt = Halt()
    jobs = [Job(0, halt, 0.0, NoLearningSignal("nothing mixed")), Second(1, halt, 0.0, PolicyError("gone"))]
    side_by_side = clients(folder, halt, *jobs)
    with pytest.raises(NoLearningSignal, match="nothing mixed"):
        side_by_side.run("run-1", time.time() + 60)
    assert set(side_by_side.errors) == {"train-job0", "train-job1"}


def test_an_error_that_is_no_clients_own_ends_all(folder):
    halt = Halt()
    jobs = [Job(0, halt, 60.0), Job(1, halt, 0.1, OSError("no space left"))]
    began = time.monotonic()
    with pytest.raises(OSError, match="no space left"):
        clients(folder, halt, *jobs).run("run-1", time.time() + 60)
    assert time.monotonic() - began < 30


def test_a_stop_ends_all_and_is_no_failure(folder):
    halt = Halt()
    side_by_side = clients(folder, halt, Job(0, halt, 60.0), Job(1, halt, 60.0))
    threading.Timer(0.2, halt.set).start()
    with pytest.raises(Stopped):
        side_by_side.run("run-1", time.time() + 60)
    assert "job_failed" not in [e["event"] for e in EventReader(folder.path).read()]


def test_a_batch_in_training_gets_a_moment_after_the_hours_are_over(folder, monkeypatch):
    monkeypatch.setattr("swegym_tutorial.clients.GRACE", 0.6)
    halt = Halt()
    soon, late = Job(0, halt, 0.5), Job(1, halt, 60.0)
    side_by_side = clients(folder, halt, soon, late)
    side_by_side.run("run-1", time.time() + 0.2)
    assert late.ended_for_time and set(side_by_side.policies) == {0, 1}
