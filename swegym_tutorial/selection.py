"""Which tasks a run trains on and is measured on, and which it goes without.

Tasks that are known to be broken or flaky are left out, and those whose image cannot be had, or whose files are not
base_commit's: visibly, with the reason. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import shlex
from collections.abc import Container, Mapping, Sequence

from .calls import PolicyError, in_thread
from .config import TrainingConfig
from .connect import RunError
from .events import RunFolder, scan
from .halt import Halt, Stopped
from .sandbox import SandboxBackend, SandboxError
from .tasks import Task, load_tasks, wrong_files
from .trust import Trust, key_of

IMAGES_TIMEOUT = 7200.0  # seconds in which a service must have found or built the images of all tasks
HELD_OUT = "held-out"  # a split that is measured, and how the names of the others begin


def all_held_out(config: TrainingConfig) -> list[Task]:
    """Return the tasks that `--evaluate` measures, split by split: held-out, and each that is named held-out-*.

    A split of another name (held-out2, test) is not among them. Raises TaskError where the source has no task of
    held-out.
    """
    tasks = held_out_tasks(config)
    further = [split for split in _splits(config) if is_held_out(split) and split != HELD_OUT]
    return [*tasks, *(task for split in further for task in held_out_tasks(config, split))]


def _splits(config: TrainingConfig) -> list[str]:
    """Return the splits of a run's source that its rows name, in their order; SWE-Gym's file names none."""
    if config.tasks.partition(":")[0] == "swegym":
        return []
    return list(dict.fromkeys(task.split for task in load_tasks(config.tasks, split=None)))


def is_held_out(split: str) -> bool:
    """Whether a split is one of those that `--evaluate` measures: held-out and held-out-new are, held-out2 is not."""
    return split == HELD_OUT or split.startswith(f"{HELD_OUT}-")


def held_out_tasks(config: TrainingConfig, split: str = HELD_OUT) -> list[Task]:
    """Return the tasks of a split that are evaluated, in their order. Raises TaskError where there are none."""
    tasks = load_tasks(config.tasks, split=split)
    if config.evaluation_tasks is None or config.evaluation_tasks >= len(tasks):
        return tasks
    chosen = sorted(random.Random(config.seed).sample(range(len(tasks)), config.evaluation_tasks))
    return [tasks[n] for n in chosen]


def _mark(task: Task) -> str:
    """Return what changes with what the agent is told, or with how it is graded."""
    return hashlib.sha256(f"{key_of(task)} {task.problem_statement}".encode()).hexdigest()[:12]


def _missing(sandboxes: SandboxBackend, tasks: Sequence[Task], halt: Halt) -> Mapping[str, str]:
    """Ask a backend, which may be anybody's, for the tasks that it cannot open: instance_id -> why.

    Raises SandboxError as it does, and RunError where its method is wrong; Stopped.
    """
    whose = f"{type(sandboxes).__name__}.missing(tasks)"

    def ask() -> object:
        try:
            return sandboxes.missing(tasks)
        except Exception as error:  # raised again below: in_thread would take it for the training server's
            return error

    try:
        found = in_thread(ask, halt, whose, IMAGES_TIMEOUT)
    except PolicyError as error:
        raise SandboxError(f"{whose} did not return within {IMAGES_TIMEOUT:.0f} s") from error
    if isinstance(found, SandboxError):
        raise found
    if isinstance(found, Exception):
        raise RunError(f"{whose} failed with {type(found).__name__}: {found}") from found
    if not isinstance(found, Mapping) or not all(
        isinstance(each, str) for pair in found.items() for each in pair
    ):
        raise RunError(
            f"{whose} gave {found!r:.100}: it returns a dict, instance_id -> why, {{}} where none is missing"
        )
    return found


class Selection:
    """The tasks of a run.

    Each way to leave some out raises RunError where none is left to train on, or none to measure. Where a single
    held-out split loses its last task, the run goes on with the others, and tells it at once in a note.
    """

    def __init__(
        self, config: TrainingConfig, folder: RunFolder, train: list[Task], held_out: list[Task]
    ) -> None:
        """held_out: those of a split side by side; none where nothing is measured."""
        self.train, self.held_out = train, held_out
        used = {"train", *(task.split for task in train)}
        splits = _splits(config) if held_out else []
        self._unused = [split for split in splits if split not in used and not is_held_out(split)]
        self._unknown: Container[str] = ()  # the ids of tasks that are not known to be valid
        self.missing: frozenset[str] = frozenset()  # of `train`, those that cannot be opened now
        self._config, self._folder = config, folder
        self._begun = next(scan(folder.events, ("tasks_chosen",)), None)
        if self._begun is not None:
            self.train = self._as_begun(self._begun["tasks"])

    def tell_unused(self) -> None:
        """Tell, where anything is measured, which splits of the source are not, and not trained on: held-out2, say."""
        if self._unused:
            whose = " and ".join(f"of the split {split}" for split in self._unused)
            text = (
                f"the tasks {whose} are neither trained on nor measured: --evaluate measures {HELD_OUT} and each split "
                f"whose name begins with {HELD_OUT}-"
            )
            self._folder.log("note", text=text)

    def leave_out_invalid(self, trust: Trust) -> None:
        """Leave out the tasks that are known to be broken or flaky, and tell how many nobody has validated.

        A run that goes on leaves out what it began without: the order of its tasks hangs on their number.
        """
        self._unknown = {*trust.never_validated, *trust.not_valid}
        begun = next(scan(self._folder.events, ("tasks_trusted",)), None)
        not_valid = trust.not_valid if self._config.only_valid else {}
        if begun is not None:
            not_valid = begun["not_valid"]
        else:
            self._tell_unknown(len(trust.never_validated))
            self._folder.log(
                "tasks_trusted",
                not_valid=not_valid,
                never_validated=trust.never_validated,
                validate=self._validate,
            )
        self._leave_out(not_valid, "used")

    def leave_out_missing(self, sandboxes: SandboxBackend, halt: Halt) -> None:
        """Leave out the tasks that cannot be opened. Raises SandboxError, RunError, Stopped."""
        tasks = [*self.train, *self.held_out]
        missing = {**_missing(sandboxes, tasks, halt), **self._wrong(tasks, halt)}
        if self._begun is None:
            self._leave_out(missing, "opened")
            self._folder.log("tasks_chosen", tasks={task.instance_id: _mark(task) for task in self.train})
            return
        # The order of the tasks hangs on their number: one that is missing now keeps its place in it.
        self.missing = frozenset(task.instance_id for task in self.train if task.instance_id in missing)
        train = self.train
        self._leave_out(missing, "opened")
        self.train = train

    def _wrong(self, tasks: Sequence[Task], halt: Halt) -> dict[str, str]:
        """Find the tasks whose files give another commit, of those that are not known to be valid. Raises Stopped."""
        wrong = {}
        for task in tasks:
            if halt.is_set():
                raise Stopped
            if task.instance_id in self._unknown and (why := wrong_files(task)):
                wrong[task.instance_id] = why
        return wrong

    def _as_begun(self, marks: Mapping[str, str]) -> list[Task]:
        """Return the tasks that the run began with, in their order. Raises RunError where one is gone or another."""
        here = {task.instance_id: task for task in self.train}
        for name, mark in marks.items():
            why = "is not among them now" if name not in here else "has changed since"
            if name not in here or _mark(here[name]) != mark:
                raise RunError(f"a run can only be resumed with the tasks that it began with: {name} {why}")
        return [here[name] for name in marks]

    @property
    def _validate(self) -> str:
        """The command that validates them."""
        source, kind = shlex.quote(self._config.tasks), self._config.sandbox
        return f"swegym-tutorial tasks validate --tasks {source} --sandbox {kind}"

    def _tell_unknown(self, count: int) -> None:
        if count:
            total = len(self.train) + len(self.held_out)
            text = (
                f"{count} of the {total} tasks were never validated, and are used all the same: `{self._validate}` "
                "finds those that are broken or flaky, and the next run leaves them out"
            )
            self._folder.log("note", text=text)

    def _leave_out(self, reasons: Mapping[str, str], verb: str) -> None:
        here = {task.instance_id for task in (*self.train, *self.held_out)}
        reasons = {name: why for name, why in reasons.items() if name in here}
        if not reasons:
            return
        gone = self._gone(reasons)
        self._folder.log("tasks_left_out", tasks=reasons, splits=list(gone))
        for kind, tasks in (("", self.train), ("held-out ", self.held_out)):
            if tasks and all(task.instance_id in reasons for task in tasks):
                why = reasons[tasks[0].instance_id]
                raise RunError(f"none of the {len(tasks)} {kind}tasks can be {verb}: {why}")
        for split, why in gone.items():
            text = f"the split {split} is not measured, the others are: no task of it can be {verb}: {why}"
            self._folder.log("note", text=text)
        self.train = [task for task in self.train if task.instance_id not in reasons]
        self.held_out = [task for task in self.held_out if task.instance_id not in reasons]

    def _gone(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return the held-out splits that lose their last task: split -> the first one's reason."""
        gone = {}
        for split, group in itertools.groupby(self.held_out, key=lambda task: task.split):
            why = [reasons.get(task.instance_id) for task in group]
            if None not in why:
                gone[split] = str(why[0])
        return gone
