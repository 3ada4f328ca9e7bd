"""An attempt's files: exact, readable by numpy alone, and read back where they are all that is left of it."""

from __future__ import annotations

import gc
import gzip
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from chaos import checks
from recorded import rollout_to_json

from swegym_tutorial import episode_files, events
from swegym_tutorial.attempt_json import dumps, verdict_to_json
from swegym_tutorial.attempts import AttemptRunner, Identity
from swegym_tutorial.batches import Batch, References
from swegym_tutorial.config import TrainingConfig
from swegym_tutorial.episode_files import read_rollout, write_graded, write_ungraded
from swegym_tutorial.events import EventReader, RunFolder, read_episode
from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.halt import Halt
from swegym_tutorial.minibatch import Fate, Group, prepare_minibatch
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout, Turn
from swegym_tutorial.sampler import Reference
from swegym_tutorial.sandbox import CommandResult
from swegym_tutorial.token_ids import model_input, shared

KEY = {
    "phase": "run-1", "job": "train-job0", "group": 3, "attempt": 0, "instance_id": "A__a-1", "policy_version": 0,
}  # fmt: skip
FIXED = Verdict(Outcome.RESOLVED, {"test_a": "PASSED"}, log="1 passed\n" * 100, seconds=2.5)


def rollout(tokens: int = 1000, seed: int = 0) -> Rollout:
    draw = np.random.default_rng(seed)
    mask = draw.random(tokens) < 0.3
    logprobs = np.where(mask, -draw.exponential(size=tokens), 0).astype(np.float32)
    result = CommandResult(1, "é \udcff \U0001f600\n" * 50, True, 12, 0.5)
    turn = Turn("<think>\x1b", int(mask.sum()), ("ls",), (result,), ("broken",), 1.25, 0.5)
    ids = draw.integers(0, 248_000, tokens, dtype=np.int32)
    return Rollout("A__a-1", ids, mask, logprobs, (turn,), Ending.FINAL, b"patch", 2.0)


def same(one: Rollout, two: Rollout) -> None:
    for name in ("tokens", "mask", "logprobs"):
        assert getattr(one, name).dtype == getattr(two, name).dtype
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    for name in ("task_id", "turns", "ending", "patch", "seconds"):
        assert getattr(one, name) == getattr(two, name)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.open()
    return made


def place(folder: RunFolder, group: int = 3, attempt: int = 0) -> Path:
    return folder.episode("run-1", "train-job0", group, attempt)


def recorded(folder: RunFolder, made: Rollout, **key: int) -> Rollout:
    """Save an attempt and return what a run keeps of it."""
    path = place(folder, **key)
    folder.save_rollout(path, made)
    return folder.shelve(path, made, KEY | key)


def taken(folder: Path) -> int:
    """Return what the attempts take, counted by itself: each its two folders, and whole blocks of its files."""
    files = [path for path in (folder / "episodes").rglob("*") if path.is_file()]
    attempts = len(list((folder / "episodes").glob("*/*/*")))
    return 8192 * attempts + sum(-(-path.stat().st_size // 4096) * 4096 for path in files)


# -- Files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 1000])
def test_an_attempt_is_read_as_it_was_to_the_last_bit(folder: RunFolder, tokens: int) -> None:
    made, path = rollout(tokens), place(folder)
    folder.save_rollout(path, made)
    same(read_rollout(path), made)
    assert "verdict" not in read_episode(path)
    folder.save_episode(path, made, FIXED)
    same(read_rollout(path), made)
    saved = read_episode(path)
    assert saved["tokens"] == made.tokens.tolist() and saved["logprobs"] == made.logprobs.tolist()
    assert saved["verdict"]["outcome"] == "resolved" and saved["instance_id"] == "A__a-1"
    assert sorted(p.name for p in path.iterdir()) == ["a__a-1", "prediction.patch", "trajectory.npz"]


def test_numpy_and_json_read_all_of_it(folder: RunFolder) -> None:
    made, path = rollout(), place(folder)
    folder.save_rollout(path, made)
    folder.save_episode(path, made, FIXED)
    code = """if True:
        import json, sys, numpy
        file = numpy.load(sys.argv[1])
        told = json.loads(bytes(file["attempt"])), json.loads(bytes(file["verdict"]))
        kinds = {name: str(file[name].dtype) for name in ("tokens", "mask", "logprobs")}
        assert not any(name.startswith("swegym") for name in sys.modules)
        print(json.dumps([*told, kinds, file["tokens"].tolist(), float(file["logprobs"].sum())]))
    """
    command = [sys.executable, "-c", code, str(path / "trajectory.npz")]
    attempt, verdict, kinds, tokens, total = json.loads(subprocess.check_output(command, timeout=60))
    assert kinds == {"tokens": "int32", "mask": "bool", "logprobs": "float32"}
    assert tokens == made.tokens.tolist() and total == float(made.logprobs.sum())
    assert attempt["turns"][0]["calls"][0]["exit_code"] == 1 and verdict["tests"] == {"test_a": "PASSED"}


def test_the_same_attempt_gives_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for n in range(2):
        (tmp_path / str(n)).mkdir()
        write_ungraded(tmp_path / str(n), rollout())
        write_graded(tmp_path / str(n), rollout(), FIXED)
        files.append((tmp_path / str(n) / "trajectory.npz").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize("graded", [False, True])
def test_what_earlier_versions_wrote_is_read(tmp_path: Path, graded: bool) -> None:
    made = rollout()
    told = {"verdict": verdict_to_json(FIXED)} if graded else {}
    name = "trajectory.json.gz" if graded else "ungraded.json.gz"
    text = dumps(rollout_to_json(made) | told).encode("utf-8", "backslashreplace")
    (tmp_path / name).write_bytes(gzip.compress(text))
    (tmp_path / "prediction.patch").write_bytes(made.patch)
    saved, read = read_episode(tmp_path), read_rollout(tmp_path)
    assert saved["tokens"] == made.tokens.tolist() and ("verdict" in saved) == graded
    np.testing.assert_allclose(read.logprobs, made.logprobs, atol=1e-6)  # six decimals
    same(replace(read, logprobs=made.logprobs), made)


def test_an_attempt_made_anew_takes_the_place_of_the_graded_one(folder: RunFolder) -> None:
    path = place(folder)
    folder.save_rollout(path, rollout())
    folder.save_episode(path, rollout(), FIXED)
    folder.save_rollout(path, rollout(seed=1))
    same(read_rollout(path), rollout(seed=1))
    assert "verdict" not in read_episode(path)


@pytest.mark.parametrize("state", ["copied", "both"])
def test_a_kill_between_the_two_files_loses_nothing(
    folder: RunFolder, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*args: object, **kwargs: object) -> None:
        raise Killed

    path, made = place(folder), rollout()
    folder.save_rollout(path, made)
    with monkeypatch.context() as patched:
        if state == "copied":
            patched.setattr(Path, "replace", killed)
        else:
            patched.setattr(Path, "unlink", killed)
        with pytest.raises(Killed):
            folder.save_episode(path, made, FIXED)
    same(read_rollout(path), made)
    assert ("verdict" in read_episode(path)) == (state == "both")
    folder.save_episode(path, made, FIXED)
    assert read_episode(path)["verdict"]["outcome"] == "resolved"


def flipped(path: Path) -> None:
    """Change a byte in the middle of the tokens' compressed data."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("tokens.npy")
    data[info.header_offset + 100] ^= 0xFF
    path.write_bytes(bytes(data))


def other_version(path: Path) -> None:
    """Have the directory say that a member needs a later kind of zip."""
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\x01\x02") + 6] = 99
    path.write_bytes(bytes(data))


def other_offset(path: Path) -> None:
    """Have the end say that the directory begins elsewhere."""
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x05\x06") + 16] ^= 0x20
    path.write_bytes(bytes(data))


def as_folder(path: Path) -> None:
    path.unlink()
    (path / "deep").mkdir(parents=True)


def folder_deleted(path: Path) -> None:
    shutil.rmtree(path.parent)


def file_for_folder(path: Path) -> None:
    (path.parent / "a__a-1").write_text("")


UNREADABLE = [
    flipped, other_version, other_offset, as_folder, folder_deleted, Path.unlink,
    lambda path: path.write_bytes(path.read_bytes()[:500]),
]  # fmt: skip


@pytest.mark.parametrize("damage", [*UNREADABLE, file_for_folder])
@pytest.mark.parametrize("gb", [None, 1.0])
def test_a_file_that_is_damaged_before_the_grading_is_made_up_for_by_the_attempt_in_memory(
    tmp_path: Path, damage: Callable[[Path], object], gb: float | None
) -> None:
    folder = RunFolder(tmp_path, gb)
    folder.open()
    path, made = place(folder), rollout()
    folder.save_rollout(path, made)
    damage(path / "ungraded.npz")
    folder.save_episode(path, made, FIXED)
    same(read_rollout(path), made)
    assert read_episode(path)["verdict"]["outcome"] == "resolved"
    assert sorted(p.name for p in path.iterdir()) == ["a__a-1", "prediction.patch", "trajectory.npz"]
    assert (path / "a__a-1" / "test_output.txt").read_text() == FIXED.log
    if folder._disk is not None and damage in (as_folder, folder_deleted, file_for_folder):
        assert folder._disk.total == taken(tmp_path)
    folder.close()


@pytest.mark.parametrize("damage", UNREADABLE)
@pytest.mark.parametrize("reward", [None, lambda task, rollout, verdict: 1.0])
def test_a_file_that_is_damaged_before_the_grading_costs_an_attempt_on_disk_alone(
    folder: RunFolder, task, damage, reward
) -> None:  # type: ignore[no-untyped-def]
    runner = AttemptRunner(None, None, Grades(), folder, TrainingConfig.laptop(), reward=reward)  # type: ignore[arg-type]
    kept = recorded(folder, rollout(9000))
    damage(place(folder) / "ungraded.npz")
    assert runner.grade(task, kept, Identity("run-1", "train-job0", 3, 0, "A__a-1", 0), Halt()) is None
    last = EventReader(folder.path).read()[-1]
    assert (last["event"], last["outcome"], last["reward"]) == ("episode", "infrastructure", None)
    assert re.match(r"RecordingLost: the recording in .*g000003-a0 cannot be read back: \w+", last["reason"])


@pytest.mark.parametrize("graded", [False, True])
def test_a_disk_that_is_full_ends_the_run_with_words_and_leaves_no_part(
    folder: RunFolder, graded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        with path.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    path, made = place(folder), rollout()
    if graded:
        folder.save_rollout(path, made)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        OSError, match=r"No space left on device: the attempt in .*g000003-a0 cannot be"
    ) as error:
        if graded:
            folder.save_episode(path, made, FIXED)
        else:
            folder.save_rollout(path, made)
    assert error.value.errno == 28 and "then resume the run" in str(error.value)
    assert sorted(p.name for p in path.iterdir()) == (["prediction.patch", "ungraded.npz"] if graded else [])


# -- What a killed process left --------------------------------------------------------------------


@pytest.mark.parametrize("gb", [None, 1.0])
def test_what_a_killed_process_was_writing_is_removed_when_the_folder_is_opened(
    tmp_path: Path, gb: float | None
) -> None:
    before = RunFolder(tmp_path)
    path = place(before)
    before.save_rollout(path, rollout())
    code = f"""if True:
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_episode_files import FIXED, RunFolder, rollout
        Path.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        RunFolder({str(tmp_path)!r}).save_episode(Path({str(path)!r}), rollout(), FIXED)
    """
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -9
    (left,) = checks.nothing_half_written(tmp_path)
    assert "/.trajectory.npz." in left
    older = (".trajectory.npz", ".ungraded.npz", ".trajectory.json.gz", ".ungraded.json.gz")
    for name in older:  # as earlier versions left them
        (path / name).write_bytes(b"cut")
    ours = path / f".trajectory.npz.{episode_files.OURS}"
    ours.write_bytes(b"being written")
    (path.parents[2] / ".run-0+train-job0+g000000-a0").mkdir()
    folder = RunFolder(tmp_path, gb)
    folder.open()
    deadline = time.monotonic() + 30
    while len(checks.nothing_half_written(tmp_path)) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.close()
    assert ours.read_bytes() == b"being written"
    ours.unlink()
    assert checks.nothing_half_written(tmp_path) == []
    same(read_rollout(path), rollout())
    assert not [thread for thread in threading.enumerate() if thread.name == "episode-disk"]


# -- Files that are damaged afterwards -------------------------------------------------------------


def without_tokens(path: Path) -> None:
    members = {name: value for name, value in np.load(path).items() if name != "tokens"}
    np.savez(path, **members)


def as_wide(path: Path) -> None:
    members = dict(np.load(path))
    np.savez(path, **(members | {"tokens": members["tokens"].astype(np.int64)}))


@pytest.mark.parametrize(
    "damage",
    [
        flipped,
        other_version,
        other_offset,
        without_tokens,
        as_wide,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"PK\x03\x04 cut"),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: np.save(path.open("wb"), np.zeros(3)),
    ],
)
def test_a_damaged_file_is_told_and_never_read_as_something_else(
    folder: RunFolder, damage: Callable[[Path], None]
) -> None:
    path, made = place(folder), rollout()
    folder.save_rollout(path, made)
    folder.save_episode(path, made, FIXED)
    damage(path / "trajectory.npz")
    with pytest.raises((ValueError, EOFError)):
        read_episode(path)
    with pytest.raises(RecordingLost, match=r"the recording in .*g000003-a0 cannot be read back: "):
        episode_files.Recording(path, KEY)()


# -- What is kept in memory ------------------------------------------------------------------------


def test_a_long_attempt_is_kept_on_disk_alone_and_a_short_one_in_memory(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = recorded(folder, rollout(events.IN_MEMORY))
    assert short.read is None and short.whole() is short
    made = rollout(events.IN_MEMORY + 1)
    kept = recorded(folder, made)
    assert len(kept.tokens) == len(kept.mask) == len(kept.logprobs) == 0 and kept.turns[0].results == ()
    assert kept.sampled_tokens == made.sampled_tokens and kept.patch == made.patch
    assert (kept.seconds, kept.sampling_seconds, kept.tool_seconds) == (2.0, 1.25, 0.75)
    same(kept.whole(), made)
    folder.save_episode(place(folder), kept, FIXED)
    same(kept.whole(), made)


def test_minibatches_of_attempts_on_disk_are_those_of_attempts_in_memory(folder: RunFolder) -> None:
    whole, kept = [], []
    for n, outcome in enumerate((Outcome.RESOLVED, Outcome.UNRESOLVED)):
        made = rollout(9000 + n, seed=n)
        whole.append(Episode(made, Verdict(outcome)))
        kept.append(Episode(recorded(folder, made, attempt=n), Verdict(outcome)))
    references = [[each.rollout.logprobs * 0.9 for each in whole]]
    (one, two) = (
        prepare_minibatch([Group(0, "t", 0, tuple(some))], references, 0.1) for some in (whole, kept)
    )
    for a, b in zip(one, two, strict=True):
        assert a.model_input == b.model_input
        for name, tensor in a.loss_fn_inputs.items():
            np.testing.assert_array_equal(tensor.to_numpy(), b.loss_fn_inputs[name].to_numpy())


class Answers:
    """A reference that takes the tokens it is asked about, at once."""

    def __init__(self) -> None:
        self.asked: list[np.ndarray] = []

    def reference(self, tokens, settled):  # type: ignore[no-untyped-def]
        def begin() -> None:
            self.asked.append(tokens.whole().tokens if isinstance(tokens, Rollout) else tokens)
            settled()

        return SimpleNamespace(begin=begin)


def test_references_are_asked_about_the_attempts_on_disk(folder: RunFolder) -> None:
    made = rollout(9000)
    kept = Episode(recorded(folder, made), FIXED)
    short = Episode(rollout(10, seed=1), Verdict(Outcome.UNRESOLVED))
    reference = Answers()
    references = References(reference, TrainingConfig.laptop(), "train-job0", folder.log)  # type: ignore[arg-type]
    references.expect(Group(3, "t", 0, (kept, short)))
    references.ask(3)
    np.testing.assert_array_equal(reference.asked[0], made.tokens)
    np.testing.assert_array_equal(reference.asked[1], short.rollout.tokens)


class Base:
    """A line to a server that says -n / 8 of the n-th token when `said` is called, and forgets when told to."""

    def __init__(self) -> None:
        self.futures: list[Future[list[float | None]]] = []

    def current(self) -> Base:
        return self

    def sampler(self, path: str, halt: Halt) -> Base:
        return self

    def compute_logprobs(self, prompt) -> Future[list[float | None]]:  # type: ignore[no-untyped-def]
        self.asked = prompt.to_ints()
        self.futures.append(Future())
        return self.futures[-1]

    def said(self) -> list[float | None]:
        return [None, *(-n / 8 for n in range(1, len(self.asked)))]

    def ask(self, what, call, halt):  # type: ignore[no-untyped-def]
        future = call(self)
        if not future.done():
            future.set_result(self.said())
        return future.result()


@pytest.mark.parametrize("early", [True, False])
def test_of_an_attempt_the_reference_keeps_the_sampled_tokens_alone(folder: RunFolder, early: bool) -> None:
    made, base = rollout(9001), Base()
    kept = recorded(folder, made)
    of_attempt = Reference(base, "base", kept, Halt())  # type: ignore[arg-type]
    of_attempt.begin()
    assert base.asked == made.tokens.tolist()
    if early:  # before anybody waits for it
        base.futures[0].set_result(base.said())
        assert of_attempt._first is None and of_attempt._values is not None
        assert of_attempt._values.nbytes == 4 * made.sampled_tokens
    of_tokens = Reference(base, "base", made.tokens, Halt())  # type: ignore[arg-type]
    whole = of_tokens.result()
    assert whole.dtype == np.float32 and whole[0] == 0 and whole[8] == -1.0
    for _ in range(2):
        np.testing.assert_array_equal(of_attempt.result(), np.where(made.mask, whole, 0))
    (place(folder) / "ungraded.npz").unlink()
    with pytest.raises(RecordingLost, match="the recording in"):
        Reference(base, "base", kept, Halt()).result()  # type: ignore[arg-type]


def test_an_attempt_that_cannot_be_read_back_is_lost_and_costs_its_group_nothing_else(
    folder: RunFolder,
) -> None:
    outcomes = (Outcome.RESOLVED, Outcome.UNRESOLVED, Outcome.UNRESOLVED)
    episodes = [
        Episode(recorded(folder, rollout(9000, seed=n), attempt=n), Verdict(outcome))
        for n, outcome in enumerate(outcomes)
    ]
    batch = Batch(0.0)
    batch.take(Group(3, "A__a-1", 0, tuple(episodes)), Fate.KEPT)
    batch.references[3] = ["first", "second", "third"]  # type: ignore[list-item]
    (place(folder, attempt=1) / "ungraded.npz").unlink()
    for _ in range(2):  # a training that failed is prepared for again
        group = batch.read_back(0, folder.log)
        assert [len(each.rollout.tokens) for each in group.episodes] == [9000, 9000] and group.lost == 1
        assert list(group.rewards) == [1.0, 0.0] and batch.references[3] == ["first", "third"]
        assert batch.lost == 1 and group.episodes[1].rollout.tokens[0] == rollout(9000, seed=2).tokens[0]
    (fault,) = EventReader(folder.path).read()
    assert fault["event"] == "attempt_fault" and fault["reason"].startswith("RecordingLost: the recording in")
    assert (fault["phase"], fault["job"], fault["group"], fault["attempt"]) == ("run-1", "train-job0", 3, 1)
    for n in (0, 2):
        (place(folder, attempt=n) / "ungraded.npz").write_bytes(b"")
    assert prepare_minibatch([batch.read_back(0, folder.log)]) == [] and batch.lost == 3


class Grades:
    """A grader for which everything is resolved."""

    def grade(self, task, patch):  # type: ignore[no-untyped-def]
        return FIXED


@pytest.mark.parametrize("reward", [None, lambda task, rollout, verdict: len(rollout.tokens) / 10_000])
def test_grading_needs_the_recording_and_keeps_no_more_than_the_verdict(folder: RunFolder, task, reward):  # type: ignore[no-untyped-def]
    runner = AttemptRunner(None, None, Grades(), folder, TrainingConfig.laptop(), reward=reward)  # type: ignore[arg-type]
    identity = Identity("run-1", "train-job0", 3, 0, "A__a-1", 0)
    made, path = rollout(9000), place(folder)
    kept = recorded(folder, made)
    episode = runner.grade(task, kept, identity, Halt())
    assert episode is not None and episode.reward == (0.9 if reward else 1.0)
    assert episode.rollout.patch == b"" and episode.verdict.log == "" and episode.verdict.tests == {}
    same(episode.rollout.whole(), made)
    assert (path / "a__a-1" / "test_output.txt").read_text() == FIXED.log
    kept = recorded(folder, made)
    (path / "ungraded.npz").unlink()
    assert runner.grade(task, kept, identity, Halt()) is None
    last = EventReader(folder.path).read()[-1]
    assert (last["event"], last["outcome"], last["reward"]) == ("episode", "infrastructure", None)
    assert last["reason"].startswith("RecordingLost: the recording in")


def test_an_attempt_that_will_be_read_again_is_not_deleted_for_space(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, episodes_gb=100e-6)
    folder.open()
    disk = folder._disk
    assert disk is not None

    def ended(group: int) -> Rollout:
        made = rollout(9000, seed=group)
        kept = recorded(folder, made, group=group)
        folder.save_episode(place(folder, group), kept, FIXED)
        folder.log("episode", **(KEY | {"group": group}), reward=1.0, outcome="resolved")
        assert disk.settled(30)
        return kept

    needed = [ended(group) for group in range(4)]
    assert disk.total > 150_000, "far beyond the limit"
    for group, kept in enumerate(needed):
        same(kept.whole(), rollout(9000, seed=group))
    del needed[:3], kept
    gc.collect()
    last = ended(9)
    there = [group for group in (0, 1, 2, 3, 9) if place(folder, group).exists()]
    assert 3 in there and 9 in there and len(there) < 5
    same(needed[0].whole(), rollout(9000, seed=3))
    same(last.whole(), rollout(9000, seed=9))
    folder.close()


# -- Lists of token ids ----------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [5], [0, 248_000, 5, 5], [2**21 - 1], [2**21, 300], [2**40], [-1, 3]])
def test_lists_of_token_ids_are_plain_and_share_their_integers(ids: list[int]) -> None:
    one, two = shared(ids), shared(np.array(ids, np.int64))
    assert one == two == ids and all(type(each) is int for each in one)
    if ids and 0 <= min(ids) <= max(ids) < 2**21:
        assert all(a is b for a, b in zip(one, two, strict=True))


def test_the_sdk_keeps_the_very_list_and_sends_what_it_would_send_of_another() -> None:
    from tinker import types

    ids = shared([1, 300, 248_000])
    ours, theirs = model_input(ids), types.ModelInput.from_ints(list(ids))
    assert ours.chunks[0].tokens is ids  # type: ignore[union-attr]
    assert ours == theirs and ours.model_dump_json() == theirs.model_dump_json()
    assert ours.length == 3 and ours.to_ints() == ids
