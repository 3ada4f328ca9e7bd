"""The clients of a run, side by side: one that fails leaves the others alone, and is told of at the end.

What a client's own work can bring on (its server, its sandboxes, its rewards) ends that client; an error that should
not be (a fault in this package, a full disk) ends them all. Knows nothing of what a client does.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence

from .batches import NoLearningSignal
from .calls import PolicyError
from .checkpoints import CheckpointError
from .connect import RunError
from .events import RunFolder
from .faults import TooManyFaults
from .halt import Halt, HoursOver, Stopped
from .job import TrainingJob
from .sampler import PolicySampler
from .sandbox import SandboxError

GRACE = 20.0  # seconds after the deadline in which a batch that is being trained on may come to its end
OWN = (PolicyError, NoLearningSignal, TooManyFaults, CheckpointError, SandboxError, HoursOver)


class ClientsFailed(RunError):
    """Some clients failed while others went on to their end."""


class Clients:
    """The jobs of a run and what became of them."""

    def __init__(self, jobs: Sequence[TrainingJob], folder: RunFolder, halt: Halt) -> None:
        self.jobs = list(jobs)
        self.policies: dict[int, PolicySampler] = {}
        self.errors: dict[str, BaseException] = {}  # of each job that failed
        self._folder, self._halt = folder, halt

    def run(self, phase: str, deadline: float) -> None:
        """Run all until each has ended. Raises Stopped, and an error that is no client's own.

        deadline: time.time() at which training ends. Where every client failed, the first one's error is raised.
        """
        threads = [
            threading.Thread(target=self._one, args=(job, phase, deadline), name=job.name, daemon=True)
            for job in self.jobs
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if time.time() > deadline + GRACE:
                for job in self.jobs:
                    job.end_of_time()
            for thread in threads:
                thread.join(0.05)
        unexpected = [e for e in self.errors.values() if not isinstance(e, (*OWN, Stopped))]
        if unexpected:
            raise unexpected[0]
        if self._halt.is_set():
            raise Stopped
        if self.errors and not self.policies:
            raise next(iter(self.errors.values()))

    def check(self) -> None:
        """Raise ClientsFailed where some have failed."""
        if self.errors:
            told = "; ".join(f"{name}: {error}" for name, error in sorted(self.errors.items()))
            raise ClientsFailed(
                f"{len(self.errors)} of {len(self.jobs)} clients failed, and the others went on to their end: {told}. "
                "Mend the cause; `train --resume` then goes on with those that failed"
            )

    def join(self, timeout: float) -> bool:
        """Wait for the threads of all jobs; returns whether all have ended."""
        deadline = time.monotonic() + timeout
        return all(job.join(deadline - time.monotonic()) for job in self.jobs)

    def _one(self, job: TrainingJob, phase: str, deadline: float) -> None:
        try:
            self.policies[job.index] = job.run(phase, deadline)
        except BaseException as error:
            self.errors[job.name] = error
            if not isinstance(error, (*OWN, Stopped)):
                self._halt.set()
            if not isinstance(error, Stopped):
                self._log("job_failed", job=job.name, reason=f"{type(error).__name__}: {error}")
        else:
            self._log("job_done", job=job.name)

    def _log(self, event: str, **fields: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is what the job has failed of, perhaps
            self._folder.log(event, **fields)
