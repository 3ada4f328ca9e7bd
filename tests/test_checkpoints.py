"""Checkpoint files: what is kept, and going back."""

import json

import pytest

from swegym_tutorial.checkpoints import (
    CheckpointError,
    all_checkpoints,
    checkpoint_of,
    go_back,
    read_checkpoint,
    write_checkpoint,
)


def checkpoint(step: int) -> dict:
    return {
        "step": step,
        "policy_version": step + 1,
        "checkpoint": f"tinker://m/weights/{step}",
        "sampler": f"tinker://m/sampler_weights/{step}",
        "next_group": 8 * step + 8,
        "unfinished_groups": [],
        "seed": 0,
        "phase": "run-1",
    }


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "train-job0-checkpoint.json"
    for step in range(-1, 7):
        write_checkpoint(path, checkpoint(step), {"step": step} if step >= 0 else None, keep=4)
    return path


def test_the_last_ones_are_kept_newest_first(path):
    saved = read_checkpoint(path)
    assert saved["step"] == 6 and saved["result"] == {"step": 6}
    assert [each["step"] for each in all_checkpoints(saved)] == [6, 5, 4, 3]
    assert all_checkpoints(saved)[2] == checkpoint(4)


def test_a_checkpoint_that_is_looked_at_changes_nothing(path):
    before = path.read_text()
    assert checkpoint_of(path, 4) == checkpoint(4) and path.read_text() == before


def test_one_can_go_back_and_forward_again(path):
    assert go_back(path, 4) == checkpoint(4)
    saved = read_checkpoint(path)
    assert saved["step"] == 4 and saved["result"] is None
    assert [each["step"] for each in all_checkpoints(saved)] == [4, 3]
    write_checkpoint(path, checkpoint(5), {"step": 5}, keep=4)
    assert [each["step"] for each in all_checkpoints(read_checkpoint(path))] == [5, 4, 3]


def test_a_step_that_is_not_kept_is_refused_with_those_that_are(path):
    before = path.read_text()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; it has those of steps 7, 6, 5, 4"):
        go_back(path, 2)
    assert path.read_text() == before


def test_files_of_earlier_releases_are_read(tmp_path):
    path = tmp_path / "train-job0-checkpoint.json"
    old = checkpoint(3)
    del old["phase"]
    path.write_text(json.dumps(old))
    assert all_checkpoints(read_checkpoint(path)) == [old]
    write_checkpoint(path, checkpoint(4), None, keep=3)
    assert [each["step"] for each in all_checkpoints(read_checkpoint(path))] == [4, 3]
