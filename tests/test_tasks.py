"""Reading tasks: what is refused, and where it is said to be wrong."""

import json
from dataclasses import replace

import pytest

from swegym_tutorial import load_tasks
from swegym_tutorial.task_text import describe, listing
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


def swegym_row(row: dict) -> dict:
    """Make it a row that says nothing of how it is tested."""
    for name in ("files", "test_command", "parser"):
        row.pop(name, None)
    return row


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda r: r.pop("instance"), "field 'instance' is missing"),
        (lambda r: r["instance"].pop("patch"), "lacks patch"),
        (lambda r: r["instance"].update(FAIL_TO_PASS=None, repo=None), "lacks repo, FAIL_TO_PASS"),
        (lambda r: r["instance"].update(hints_text=1.5), "'hints_text' must be a text, not float"),
        (lambda r: r["instance"].update(patch="\ud800"), "'patch' holds half of a character"),
        (lambda r: r["instance"].update(base_commit="main"), "'base_commit' must be a git commit"),
        (lambda r: r.update(instance_id="other"), "'instance_id' is 'other' and"),
        (lambda r: r["instance"].update(repo=3), "'repo' must be a text"),
        (lambda r: r["instance"].update(FAIL_TO_PASS="x"), "'FAIL_TO_PASS' is a text that is no JSON list"),
        (lambda r: r["instance"].update(PASS_TO_PASS=[1]), "'PASS_TO_PASS' must be a list"),
        (lambda r: r["instance"].update(instance_id="org/repo-0"), "'instance_id' names folders"),
        (lambda r: r["instance"].update(instance_id="../x"), "'instance_id' names folders"),
        (lambda r: r.update(files="text"), "'files' must map"),
        (lambda r: r.update(split=None), "'split' must be a text"),
        (lambda r: r.pop("test_command"), "'test_command'"),
        (lambda r: r.pop("files"), "'files'"),
        (lambda r: r.update(image="python:3.12"), "one too many"),
        (lambda r: r.update(parser="unittest"), "'parser' must be pytest or swegym, not 'unittest'"),
        (lambda r: r.update(parser="swegym"), "swegym brings its own test command, so 'test_command'"),
        (lambda r: (r.update(parser="swegym"), r.pop("test_command")), "so 'files' cannot go with it"),
        (lambda r: swegym_row(r)["instance"].update(version=""), "'version' is empty"),
        (lambda r: swegym_row(r)["instance"].update(version=None), "'version' is empty"),
        (lambda r: swegym_row(r)["instance"].update(base_commit=""), "'base_commit' must be"),
        (lambda r: swegym_row(r)["instance"].update(instance_id="a+b-1"), "'instance_id': .* no image name"),
        (lambda r: swegym_row(r).update(image="-v /:/host"), "'image' must name"),
        (lambda r: swegym_row(r).update(parser="pytest"), "'test_command' and 'image'"),
        (lambda r: r["instance"].update(instance_id="a" * 256), "'instance_id' names folders, .*at most 200"),
        (
            lambda r: r["instance"].update(FAIL_TO_PASS=["a\ud800"]),
            "'FAIL_TO_PASS' holds half of a character",
        ),
        (
            lambda r: r["instance"].update(FAIL_TO_PASS="[" * 100_000),
            "'FAIL_TO_PASS' is a text that is no JSON",
        ),
        (lambda r: r["instance"].update(FAIL_TO_PASS=[]), "'FAIL_TO_PASS' is empty: it lists the tests"),
        (lambda r: r["instance"].update(FAIL_TO_PASS="[]"), "'FAIL_TO_PASS' is empty"),
        (lambda r: r["instance"]["FAIL_TO_PASS"].append(""), "'FAIL_TO_PASS' holds an empty test id"),
        (lambda r: r["instance"].update(PASS_TO_PASS=[" "]), "'PASS_TO_PASS' holds an empty test id"),
        (
            lambda r: r["instance"]["PASS_TO_PASS"].append(r["instance"]["FAIL_TO_PASS"][0]),
            "'PASS_TO_PASS' holds 'tests/.*', which 'FAIL_TO_PASS' holds too",
        ),
        (lambda r: r["instance"].update(patch="\n"), "'patch' is empty: the gold patch shows"),
        (lambda r: r["files"].update({"a.txt": "\ud800"}), "'files' holds half of a character"),
        (lambda r: r["files"].update({"\ud800": "a"}), "'files' holds half of a character"),
        *(
            (lambda r, path=path: r["files"].update({path: "a"}), "'files' has .* no path of a file")
            for path in ("", "/etc/x", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b", "README.md/b")
        ),
    ],
)
def test_a_malformed_line_names_itself_and_its_field(tmp_path, row, change, told):
    good = json.dumps(row)
    change(row)
    with pytest.raises(TaskError, match=f"own.jsonl, line 2: .*{told}"):
        load_tasks(written(tmp_path, good, row))


@pytest.mark.parametrize("path", [".git/config", ".GIT/config", "vendor/.git/config"])
def test_a_file_of_tasks_cannot_set_up_git_on_this_machine(tmp_path, row, path):
    row["files"][path] = f"[core]\nfsmonitor = touch {tmp_path / 'ran'}; false\n"
    row["instance"]["base_commit"] = ""
    with pytest.raises(TaskError, match="no path of a file in the repository"):
        materialise(load_tasks(written(tmp_path, row))[0], tmp_path / "repository")
    assert not (tmp_path / "ran").exists()


def forms(row: dict) -> dict[str, dict]:
    """The same task in each form that is read."""
    instance, beside = row["instance"], {k: v for k, v in row.items() if k != "instance"}
    texts = {k: json.dumps(instance[k]) for k in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    metadata = {"instance_id": instance["instance_id"], "instance": instance, "split": row["split"]}
    return {
        "ours": row,
        "the 293-task file's": {**beside, "prompt": [{"role": "user"}], "label": "", "metadata": metadata},
        "flat": {**instance, **beside},
        "flat, lists as texts": {**instance, **texts, **beside},
        "more fields": {**row, "instance": {**instance, "nr": 1, "image_name": "x"}, "metadata": {"a": 1}},
    }


@pytest.mark.parametrize("swegym", [False, True], ids=["own", "swegym"])
def test_all_forms_of_a_row_give_the_same_task(tmp_path, row, swegym):
    rows = forms(swegym_row(row) if swegym else row)
    tasks = {name: load_tasks(written(tmp_path, form))[0] for name, form in rows.items()}
    for name, task in tasks.items():
        assert task == tasks["ours"], name
    assert (tasks["ours"].parser, bool(tasks["ours"].image)) == (
        ("swegym", True) if swegym else ("pytest", False)
    )


def test_a_list_of_rows_and_a_byte_order_mark_are_read(tmp_path, row):
    path = tmp_path / "own.json"
    path.write_text("\ufeff " + json.dumps([row], indent=1), encoding="utf-8")
    assert load_tasks(path) == load_tasks()[:1]
    path.write_text(json.dumps([row, 3]))
    with pytest.raises(TaskError, match=r"own\.json, row 2: a row is a JSON object, not int"):
        load_tasks(path)


def test_what_other_files_leave_out_may_be_missing(tmp_path, row):
    for name in ("hints_text", "created_at"):
        del row["instance"][name]
    row["instance"]["environment_setup_commit"] = row["instance"]["version"] = None
    del row["split"]
    (task,) = load_tasks(written(tmp_path, row))
    assert (task.hints_text, task.created_at, task.environment_setup_commit, task.version) == ("",) * 4
    assert task.split == "train"


def test_line_ends_and_names_stay_as_they_are(tmp_path, row):
    texts = {"problem_statement": "a\r\nb\r", "patch": "-x\r\n+y\n\n", "repo": "Project-MONAI/MONAI"}
    row["instance"].update(texts)
    (tmp_path / "own.jsonl").write_bytes(json.dumps(row).encode() + b"\r\n\r\n")
    (task,) = load_tasks(tmp_path / "own.jsonl")
    assert {name: getattr(task, name) for name in texts} == texts


def test_a_row_may_bring_its_own_image(tmp_path, row):
    swegym_row(row).update(image="localhost:5000/me/x@sha256:ab", test_command="pytest -rA", setup="source v")
    (task,) = load_tasks(written(tmp_path, row))
    assert (task.image, task.test_command, task.setup, task.parser) == (
        row["image"],
        "pytest -rA",
        "source v",
        "pytest",
    )
    del row["test_command"]
    (task,) = load_tasks(written(tmp_path, row))  # a SWE-Gym task in another image
    assert (task.image, task.test_command, task.setup, task.parser) == (
        row["image"],
        "",
        "source v",
        "swegym",
    )


def test_a_task_of_a_data_set_is_taken_as_it_is(tmp_path, row):
    swegym_row(row).update(image="somebody/some:1", test_command="pytest")
    row["instance"].update(FAIL_TO_PASS=[], PASS_TO_PASS=["t", ""], patch="")
    (task,) = load_tasks(written(tmp_path, row))
    assert task.fail_to_pass == () and task.pass_to_pass == ("t", "")


def test_a_choice_holds_for_every_source(tmp_path, row):
    other = json.loads(json.dumps(row))
    other["instance"].update(instance_id="me__mine-2", repo="Me/Mine")
    other["split"] = "validation"
    path = written(tmp_path, row, other)
    (first, second) = load_tasks(path, split=None)
    assert load_tasks(f"{path}:all") == [first] and load_tasks(f"{path}:all", split="validation") == [second]
    assert (
        load_tasks(f"{path}:me/mine", split=None)
        == load_tasks(path, split=None, repos=["ME/mine"])
        == [second]
    )
    assert load_tasks(f"{path}:me__mine-2,{first.instance_id}", split=None) == [second, first]
    with pytest.raises(TaskError, match="no task of the split 'train'; it has \\['validation'\\]"):
        load_tasks(f"{path}:me/mine")
    names = [task.instance_id for task in load_tasks()]
    assert [t.instance_id for t in load_tasks(f"bundled:{names[3]},{names[1]}")] == [names[3], names[1]]
    with pytest.raises(TaskError, match="no task of the split 'train' among those"):
        load_tasks(path, repos=["me/mine"])
    with pytest.raises(TaskError, match="nothing behind the colon"):
        load_tasks(f"{path}:")


def test_a_path_may_hold_a_colon(tmp_path, row):
    (tmp_path / "a:b.jsonl").write_text(json.dumps(row))
    assert load_tasks(tmp_path / "a:b.jsonl") == load_tasks(f"{tmp_path}/a:b.jsonl:all") == load_tasks()[:1]


def test_a_task_in_words(tmp_path, row):
    row["instance"].update(problem_statement="Broken \x1b[31mred\r\n\r\nmore", repo="me/mine")
    row["instance"]["PASS_TO_PASS"] = [f"t.py::test_{n}" for n in range(2345)]
    (task,) = load_tasks(written(tmp_path, swegym_row(row)))
    text = describe(task)
    assert text.startswith(
        f"{task.instance_id}  (me/mine at {task.base_commit[:12]}, version 1.0, split train)\n"
    )
    for part in (
        task.patch,
        task.test_patch,
        task.image,
        task.setup,
        "swegym's own test command",
        *task.fail_to_pass,
    ):
        assert part in text
    assert "PASS_TO_PASS (2,345)\n  t.py::test_0\n" in text and text.endswith(
        "t.py::test_19\n  ... and 2,325 more"
    )
    assert "\x1b" not in text and "\r" not in text
    bundled = load_tasks()[0]
    assert bundled.test_command in describe(bundled) and "files that the task brings" in describe(bundled)
    lines = listing([task, bundled], width=60)
    assert lines[0].startswith(f"train  {task.instance_id}  -       Broken") and lines[1].endswith("...")
    assert all(len(line) <= 60 for line in lines) and len(listing(load_tasks(split=None))) == 120


@pytest.mark.parametrize(
    "issue, told",
    [
        ("Traceback:\n    assert add(1, 2) == 3\nAssertionError", "assert add(1, 2) == 3"),
        ("### Traceback\n\n```python-traceback\nTraceback (most recent call last):\n  1 / 0", "1 / 0"),
        ("**Traceback:**\n~~~\nZeroDivisionError", "ZeroDivisionError"),
        ("Traceback is cut off\nmore", "Traceback is cut off"),
        ("`x` is wrong", "`x` is wrong"),
        ("Traceback:", "Traceback:"),
        ("", ""),
    ],
)
def test_a_task_is_listed_with_the_first_line_of_its_issue_that_tells_something(issue, told):
    task = replace(load_tasks()[0], problem_statement=issue)
    (line,) = listing([task], states={task.instance_id: "valid"})
    assert line == f"{task.split}  {task.instance_id}  valid   {told}".rstrip()


def test_what_is_no_task_file_is_refused(tmp_path, row):
    with pytest.raises(TaskError, match="line 1: not JSON"):
        load_tasks(written(tmp_path, "{"))
    with pytest.raises(TaskError, match="twice: bundled__"):
        load_tasks(written(tmp_path, row, row))
    with pytest.raises(TaskError, match="no task of the split 'held-out'"):
        load_tasks(written(tmp_path, row), split="held-out")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TaskError, match="not UTF-8"):
        load_tasks(tmp_path / "latin.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskError, match=r"empty\.jsonl holds no tasks"):
        load_tasks(tmp_path / "empty.jsonl")
    with pytest.raises(
        TaskError, match=r"no tasks at nowhere\.jsonl: a source is bundled, swegym, swegym:CHOICE, or"
    ):
        load_tasks("nowhere.jsonl")


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
    with pytest.raises(TaskError, match="outside"):
        materialise(replace(task, files={**task.files, "../out": "x"}), tmp_path / "r2")
    for form in (task.base_commit[:8], task.base_commit.upper()):
        assert materialise(replace(task, base_commit=form), tmp_path / form) == task.base_commit


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
