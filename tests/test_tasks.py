"""Reading tasks: what is refused, and where it is said to be wrong."""

import json

import pytest

from swegym_tutorial import load_tasks
from swegym_tutorial.tasks import BUNDLED, TaskError, materialise


@pytest.fixture
def row() -> dict:
    return json.loads(BUNDLED.read_text(encoding="utf-8").splitlines()[0])


def written(tmp_path, *rows) -> str:
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return str(path)


def test_own_tasks_are_read_like_the_bundled_ones(tmp_path, row):
    row["instance"]["FAIL_TO_PASS"] = json.dumps(row["instance"]["FAIL_TO_PASS"])  # some copies hold a text
    (task,) = load_tasks(written(tmp_path, row))
    assert task == load_tasks()[0]


def test_ids_come_in_the_order_asked_for():
    names = [task.instance_id for task in load_tasks()]
    assert [t.instance_id for t in load_tasks(ids=[names[5], names[2]])] == [names[5], names[2]]
    with pytest.raises(TaskError, match="nobody__x-1"):
        load_tasks(ids=["nobody__x-1"])


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda r: r.pop("instance"), "field 'instance' is missing"),
        (lambda r: r["instance"].pop("patch"), "lacks patch"),
        (lambda r: r["instance"].update(repo=3), "'repo' must be a text"),
        (lambda r: r["instance"].update(FAIL_TO_PASS="x"), "'FAIL_TO_PASS' is a text that is no JSON list"),
        (lambda r: r["instance"].update(PASS_TO_PASS=[1]), "'PASS_TO_PASS' must be a list"),
        (lambda r: r["instance"].update(instance_id="org/repo-0"), "'instance_id' names folders"),
        (lambda r: r["instance"].update(instance_id="../x"), "'instance_id' names folders"),
        (lambda r: r.update(files="text"), "'files' must map"),
        (lambda r: r.update(split=None), "'split' must be a text"),
        (lambda r: r.pop("test_command"), "'test_command'"),
    ],
)
def test_a_malformed_line_names_itself_and_its_field(tmp_path, row, change, told):
    good = json.dumps(row)
    change(row)
    with pytest.raises(TaskError, match=f"own.jsonl, line 2: .*{told}"):
        load_tasks(written(tmp_path, good, row))


def test_what_is_no_task_file_is_refused(tmp_path, row):
    with pytest.raises(TaskError, match="line 1: not JSON"):
        load_tasks(written(tmp_path, "{"))
    with pytest.raises(TaskError, match="twice"):
        load_tasks(written(tmp_path, row, row))
    with pytest.raises(TaskError, match="no task of the split 'held-out'"):
        load_tasks(written(tmp_path, row), split="held-out")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_tasks(tmp_path / "latin.jsonl")
    with pytest.raises(TaskError, match="SWE-Gym"):
        load_tasks("swegym")


def test_a_repository_has_its_hash_and_nothing_else(tmp_path, task):
    assert materialise(task, tmp_path / "r") == task.base_commit
    assert sorted(p.name for p in (tmp_path / "r").iterdir() if p.name != ".git") == sorted(
        {name.split("/")[0] for name in task.files}
    )


def test_a_repository_of_other_files_is_refused(tmp_path, row, task):
    row["files"]["README.md"] += "more"
    (other,) = load_tasks(written(tmp_path, row))
    with pytest.raises(TaskError, match="not base_commit"):
        materialise(other, tmp_path / "r")
    row["files"]["../out"] = "x"
    (other,) = load_tasks(written(tmp_path, row))
    with pytest.raises(TaskError, match="outside"):
        materialise(other, tmp_path / "r2")


def test_case_10_the_repository_holds_no_history_but_its_base(tmp_path, task):
    # SWE-bench#465, mini-swe-agent#787: no object outside base, no remotes, tags, reflog or stash.
    import subprocess

    materialise(task, tmp_path / "r")

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=tmp_path / "r", capture_output=True, text=True
        ).stdout.split("\n")

    reachable = {line.split()[0] for line in git("rev-list", "--objects", task.base_commit) if line}
    stored = {line.split()[0] for line in git("cat-file", "--batch-all-objects", "--batch-check") if line}
    assert stored == reachable
    assert not any(git("for-each-ref")) and not any(git("remote")) and not any(git("reflog", "--all"))
