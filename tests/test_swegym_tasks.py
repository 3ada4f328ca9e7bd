"""SWE-Gym's tasks: the download with all that goes wrong, the cache, the choice, the images.

A server on loopback serves a file in the form of the real one, made here.
"""

import hashlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from swegym_tutorial import download, load_tasks
from swegym_tutorial.download import cache_folder
from swegym_tutorial.swegym_tasks import ACTIVATE, ROWS, TRAINING_IDS, URL, cached_path, image_of
from swegym_tutorial.tasks import TaskError

OTHERS = {
    "getmoto__moto": 130,
    "Project-MONAI__MONAI": 60,
    "pydantic__pydantic": 50,
    "modin-project__modin": 22,
}


def row(instance_id: str, commit: int) -> dict:
    """A row with the fields and the oddities of the real file."""
    instance = {
        "FAIL_TO_PASS": ["tests/test_a.py::test_new[a"],  # ids with spaces are cut in this data set
        "PASS_TO_PASS": [f"tests/test_a.py::test_{n}" for n in range(40)],
        "base_commit": f"{commit:040x}",
        "created_at": "2024-02-19 20:29:03",
        "hints_text": "",
        "instance_id": instance_id,
        "patch": "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-a = 1\r\n+a = 2\r\n",
        "problem_statement": f"Issue of {instance_id}\r\n\r\nIt fails – at once.\r\n",
        "repo": instance_id.rpartition("-")[0].replace("__", "/"),
        "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n",
        "version": "5.0",
    }
    if commit % 2:
        instance["environment_setup_commit"] = instance[
            "base_commit"
        ]  # not all rows of the real file have it
    metadata = {
        "instance_id": instance_id,
        "instance": instance,
        "base_image": "/x.sif",
        "split": "train",
    }
    prompt = [{"role": "user", "content": instance["problem_statement"].strip()}]
    return {"prompt": prompt, "label": "", "metadata": metadata}


def file_of(rows: list[dict]) -> bytes:
    return "".join(json.dumps(r) + "\n" for r in rows).encode()


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    others = [f"{name}-{n}" for name, count in OTHERS.items() for n in range(90_000, 90_000 + count)]
    ids = [*others[:100], *reversed(TRAINING_IDS), *others[100:]]  # not in the order of the published run
    assert len(ids) == ROWS
    return [row(i, n) for n, i in enumerate(ids)]


@pytest.fixture(scope="module")
def content(rows) -> bytes:
    return file_of(rows)


class Server(ThreadingHTTPServer):
    """Answers each request with the next of `answers`, and the last one from then on."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list = []
        self.paths: list[str] = []
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/swegym_train_293.jsonl"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """A client that gave up is what some of these tests are about."""


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.paths.append(self.path)
            answers = self.server.answers
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def log_message(self, *words) -> None:
        pass


def whole(data: bytes):
    return lambda handler: send(handler, 200, data)


def status(code: int, **headers: str):
    return lambda handler: send(handler, code, b"no", **headers)


def send(handler: Handler, code: int, data: bytes, length: int | None = None, **headers: str) -> None:
    handler.send_response(code)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def cut(data: bytes):
    """Half of it, then the end of the connection."""
    return lambda handler: send(handler, 200, data[: len(data) // 2], length=len(data))


def stalled(data: bytes, seconds: float):
    def answer(handler: Handler) -> None:
        send(handler, 200, data[:1000], length=len(data))
        handler.wfile.flush()
        time.sleep(seconds)

    return answer


@pytest.fixture
def server(tmp_path, monkeypatch):
    serving = Server()
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", serving.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE", 0.01)
    yield serving
    serving.shutdown()
    serving.server_close()


@pytest.fixture
def loaded(server, content):
    """The server, with the file already in the cache."""
    server.answers = [whole(content)]
    load_tasks("swegym")
    server.paths.clear()
    return server


@pytest.fixture
def offline(server, monkeypatch) -> str:
    """No server at the address."""
    monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", "http://127.0.0.1:9/tasks.jsonl")
    return "http://127.0.0.1:9/tasks.jsonl"


# -- the download and the cache --------------------------------------------------------------------


def test_the_31_tasks_are_downloaded_once(server, content, capsys):
    server.answers = [whole(content)]
    tasks = load_tasks("swegym")
    assert [task.instance_id for task in tasks] == list(TRAINING_IDS) and len(tasks) == 31
    assert load_tasks("swegym") == tasks and len(server.paths) == 1
    assert cached_path().read_bytes() == content
    recorded = cached_path().with_name(cached_path().name + ".sha256").read_text()
    assert recorded.strip() == hashlib.sha256(content).hexdigest()
    assert sorted(p.name for p in cached_path().parent.iterdir()) == [
        cached_path().name,
        f"{cached_path().name}.sha256",
    ]
    told = capsys.readouterr()
    assert server.url in told.err and "MB" in told.err and not told.out


def test_a_task_is_what_its_row_says(loaded, rows):
    task = load_tasks("swegym", ids=["Project-MONAI__MONAI-440"])[0]
    instance = next(r for r in rows if r["metadata"]["instance_id"] == task.instance_id)["metadata"][
        "instance"
    ]
    assert task.repo == "Project-MONAI/MONAI"  # as written: only comparisons look past upper and lower case
    for name in ("base_commit", "problem_statement", "patch", "test_patch", "version", "hints_text"):
        assert getattr(task, name) == instance[name]  # line ends included
    assert task.fail_to_pass == ("tests/test_a.py::test_new[a",) and len(task.pass_to_pass) == 40
    assert (task.parser, task.test_command, task.setup, task.files) == ("swegym", "", ACTIVATE, {})
    assert task.image == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-440:latest"


@pytest.mark.parametrize(
    "failures",
    [
        lambda data: [status(500), status(503)],
        lambda data: [status(429, Retry_After="0")],
        lambda data: [cut(data)],
        lambda data: [lambda handler: handler.connection.close()],
    ],
    ids=["5xx", "429", "cut", "reset"],
)
def test_what_may_pass_is_tried_again(server, content, failures, capsys):
    failing = failures(content)
    server.answers = [*failing, whole(content)]
    assert len(load_tasks("swegym")) == 31 and len(server.paths) == len(failing) + 1
    assert capsys.readouterr().err.count("trying again") == len(failing)


def test_a_stalled_download_is_tried_again(server, content, monkeypatch):
    def first(handler: Handler) -> None:
        monkeypatch.setattr(download, "READ_TIMEOUT", 30.0)  # of the next try, on however busy a machine
        stalled(content, 2.0)(handler)

    monkeypatch.setattr(download, "READ_TIMEOUT", 0.3)
    server.answers = [first, whole(content)]
    assert len(load_tasks("swegym")) == 31 and len(server.paths) == 2


def test_tries_end(server, monkeypatch):
    server.answers = [status(503)]
    with pytest.raises(TaskError, match=r"503 Service Unavailable \(tried 4 times\)"):
        load_tasks("swegym")
    assert len(server.paths) == 4 and not cached_path().parent.exists()


def test_a_dripping_download_ends(server, content, monkeypatch):
    monkeypatch.setattr(download, "DEADLINE", 0.0)
    server.answers = [whole(content)]
    with pytest.raises(TaskError, match="longer than"):
        load_tasks("swegym")


def test_a_missing_file_is_not_asked_for_again(server):
    server.answers = [status(404)]
    with pytest.raises(TaskError, match="404 Not Found") as told:
        load_tasks("swegym")
    assert len(server.paths) == 1
    assert server.url in str(told.value) and str(cached_path()) in str(told.value)


def wrong_contents(rows: list[dict]) -> list[tuple[bytes, str]]:
    twice, lacking, broken = [*rows[:-1], rows[0]], json.loads(json.dumps(rows)), json.loads(json.dumps(rows))
    lost = next(i for i, r in enumerate(rows) if r["metadata"]["instance_id"] == TRAINING_IDS[3])
    for part in (lacking[lost]["metadata"], lacking[lost]["metadata"]["instance"]):
        part["instance_id"] = "getmoto__moto-1"
    del broken[7]["metadata"]["instance"]["patch"]
    return [
        (b"<html>Log in to this network</html>", "line 1: not JSON"),
        (b"", "0 tasks, not 293"),
        (file_of(rows[:-1]), "292 tasks, not 293"),
        (file_of(twice), "twice"),
        (file_of(lacking), f"lacks {TRAINING_IDS[3]}"),
        (file_of(broken), "line 8: the instance lacks patch"),
        (file_of(rows)[:-2000], "not JSON"),
    ]


def test_other_content_is_refused_and_not_kept(server, rows):
    for data, why in wrong_contents(rows):
        server.answers = [whole(data)]
        with pytest.raises(TaskError, match=f"what came is not that file: .*{why}"):
            load_tasks("swegym")
        assert not cached_path().exists()


def test_offline_the_error_says_what_to_do(offline, content):
    with pytest.raises(TaskError, match="ConnectError") as told:
        load_tasks("swegym")
    assert offline in str(told.value) and f"put it at {cached_path()}" in str(told.value)
    cached_path().parent.mkdir(parents=True)
    cached_path().write_bytes(content)  # by hand, as told
    assert len(load_tasks("swegym")) == 31
    recorded = cached_path().with_name(cached_path().name + ".sha256").read_text()
    assert recorded.strip() == hashlib.sha256(content).hexdigest()


def test_a_hand_placed_file_is_checked(offline, rows):
    cached_path().parent.mkdir(parents=True)
    cached_path().write_bytes(file_of(rows[:30]))
    with pytest.raises(TaskError, match=r"damaged \(it has 30 tasks, not 293\): delete it"):
        load_tasks("swegym")


def test_a_file_put_in_a_damaged_ones_place_as_told_is_used(loaded, content):
    record = cached_path().with_name(cached_path().name + ".sha256")
    record.write_text("")  # a crash, say
    loaded.answers = [status(404)]
    with pytest.raises(TaskError, match=f"delete it and {record.name}"):
        load_tasks("swegym")
    cached_path().unlink()
    with pytest.raises(TaskError, match="by hand"):
        load_tasks("swegym")
    cached_path().write_bytes(content)
    assert (
        len(load_tasks("swegym")) == 31 and record.read_text().strip() == hashlib.sha256(content).hexdigest()
    )


def test_without_a_home_folder_the_error_names_the_mend(server, monkeypatch):
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", "~no-such-user/cache")
    with pytest.raises(TaskError, match=r"no folder for downloaded files: .*SWEGYM_TUTORIAL_CACHE"):
        load_tasks("swegym")


def test_certificates_that_are_not_there_are_named(server, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", "/no/such/file.pem")
    with pytest.raises(TaskError, match=r"No such file .*\(SSL_CERT_FILE is /no/such/file\.pem\)"):
        load_tasks("swegym")
    assert not server.paths


def test_the_cache_needs_no_network(loaded, monkeypatch):
    loaded.answers = [status(500)]
    for source in ("swegym", "swegym:all", "swegym:getmoto/moto"):
        assert load_tasks(source)
    assert not loaded.paths


def test_a_damaged_cache_is_told_and_fetched_again(loaded, content, capsys):
    data = bytearray(content)
    data[content.index(b"It fails")] ^= 1  # still 293 good rows: only the checksum tells
    cached_path().write_bytes(data)
    assert len(load_tasks("swegym")) == 31 and len(loaded.paths) == 1
    assert f"{cached_path()} is damaged" in capsys.readouterr().err
    assert cached_path().read_bytes() == content


def test_a_damaged_cache_offline_names_the_file_to_delete(loaded, content):
    cached_path().write_bytes(content[:5000])
    loaded.answers = [status(404)]
    with pytest.raises(TaskError, match="SHA-256") as told:
        load_tasks("swegym")
    assert f"The file at {cached_path()} is damaged" in str(told.value) and "delete it" in str(told.value)


def test_a_cache_that_cannot_be_written_to_is_told(server, content, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path / "file" / "cache"))
    server.answers = [whole(content)]
    with pytest.raises(TaskError, match="SWEGYM_TUTORIAL_CACHE"):
        load_tasks("swegym")


LOAD = "import sys; from swegym_tutorial import load_tasks; print(len(load_tasks('swegym')))"


def test_two_processes_that_download_at_once_do_no_harm(server, content):
    both = threading.Barrier(2, timeout=60)

    def together(handler: Handler) -> None:
        both.wait()  # neither is answered before the other has asked
        send(handler, 200, content)

    server.answers = [together]
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out == b"31\n", err
    assert len(server.paths) == 2 and cached_path().read_bytes() == content
    assert len(list(cached_path().parent.iterdir())) == 2
    assert len(load_tasks("swegym")) == 31 and len(server.paths) == 2


def test_on_a_terminal_a_bar_shows_the_progress(server, content):
    server.answers = [status(503), whole(content)]
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    code = LOAD.replace("from", "import swegym_tutorial.download as d; d.PAUSE = 0.01; from", 1)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.communicate(timeout=60)[0] == b"31\n"
    assert b"trying again" in shown and b"the SWE-Gym tasks" in shown and b"\x1b[" in shown


def test_a_proxy_in_the_environment_is_used(server, content, monkeypatch):
    address = "http://tasks.invalid/swegym.jsonl"  # no such host: only the proxy can answer
    monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", address)
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
    server.answers = [whole(content)]
    assert len(load_tasks("swegym")) == 31 and server.paths == [address]


def test_an_address_that_is_none_is_not_tried_again(server, monkeypatch):
    for address in ("file:///tasks.jsonl", "tasks.jsonl", "http://127.0.0.1:port/x", "ftp://127.0.0.1/x"):
        monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", address)
        with pytest.raises(TaskError, match=re.escape(address)) as told:
            load_tasks("swegym")
        assert "tried" not in str(told.value)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("SWEGYM_TUTORIAL_TASKS_URL", raising=False)
    monkeypatch.setenv("SWEGYM_TUTORIAL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path and cached_path().name == "swegym_train_293-6a1ead6bfac0.jsonl"
    monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", URL)
    pinned = cached_path()
    monkeypatch.setenv("SWEGYM_TUTORIAL_TASKS_URL", "http://127.0.0.1/other")
    assert cached_path() != pinned and cached_path().parent == pinned.parent
    monkeypatch.delenv("SWEGYM_TUTORIAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "swegym_tutorial"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        monkeypatch.setattr(sys, "platform", "linux")
        assert cache_folder() == tmp_path / ".cache" / "swegym_tutorial"
        monkeypatch.setattr(sys, "platform", "darwin")
        assert cache_folder() == tmp_path / "Library" / "Caches" / "swegym_tutorial"


def test_the_address_is_pinned_to_a_commit():
    assert re.fullmatch(
        r"https://raw\.githubusercontent\.com/[\w-]+/[\w-]+/[0-9a-f]{40}/[\w/]+/swegym_train_293\.jsonl", URL
    )


# -- the choice ------------------------------------------------------------------------------------


def names(*args, **kwargs) -> list[str]:
    return [task.instance_id for task in load_tasks(*args, **kwargs)]


def test_a_choice_is_all_or_repositories_or_ids(loaded, rows):
    every = [r["metadata"]["instance_id"] for r in rows]
    moto = [i for i in every if i.startswith("getmoto__moto-")]
    assert names("swegym:all") == every and len(every) == 293
    assert names("swegym:getmoto/moto") == names("swegym:GetMoto/Moto") == moto and len(moto) > 130
    assert len(names("swegym:project-monai/monai")) == 60 + 10
    assert names("swegym:dask__dask-9212, PYTHON__mypy-11134") == ["dask__dask-9212", "python__mypy-11134"]
    mixed = names("swegym:dask__dask-9235,dask/dask,getmoto/moto,dask__dask-9235")
    assert mixed[0] == "dask__dask-9235" and len(mixed) == len(set(mixed)) == 3 + len(moto)


def test_what_a_choice_leaves_is_held_out(loaded, rows):
    held_out = load_tasks("swegym", split="held-out")
    assert len(held_out) == 262 and {task.split for task in held_out} == {"held-out"}
    assert not {task.instance_id for task in held_out} & set(TRAINING_IDS)
    assert {task.split for task in load_tasks("swegym")} == {"train"}
    assert load_tasks("swegym", split=None) == load_tasks("swegym")  # all of the choice
    for source in ("swegym:getmoto/moto", "swegym:dask__dask-9212"):
        parts = names(source) + names(source, split="held-out")
        assert sorted(parts) == sorted(r["metadata"]["instance_id"] for r in rows)
    with pytest.raises(
        TaskError, match="swegym:all trains on all 293 tasks of the file, so that none is held out"
    ):
        load_tasks("swegym:all", split="held-out")
    with pytest.raises(TaskError, match="'validation'; it has"):
        load_tasks("swegym", split="validation")


def test_ids_and_repos_choose_from_all_of_the_file(loaded):
    (task,) = load_tasks("swegym", ids=["pydantic__pydantic-90007"])
    assert task.split == "held-out"  # of swegym, which is the 31
    assert names("swegym", ids=["dask__dask-9235", "dask__dask-7894"]) == [
        "dask__dask-9235",
        "dask__dask-7894",
    ]
    assert names("swegym", repos=["dask/dask"]) == ["dask__dask-7894", "dask__dask-9212", "dask__dask-9235"]
    assert len(names("swegym", repos=["Dask/dask", "pydantic/Pydantic"], split="held-out")) == 50
    with pytest.raises(TaskError, match="no task of the split 'train' among those"):
        load_tasks("swegym", repos=["pydantic/pydantic"])


@pytest.mark.parametrize(
    "source, told",
    [
        ("swegym:", "names nothing behind the colon"),
        ("swegym:getmoto/motto", "no repository getmoto/motto; did you mean getmoto/moto?"),
        ("swegym:dask__dask-9213", "no task dask__dask-9213; did you mean dask__dask-9"),
        ("swegym:%%%", "no task %%%; `tasks list`"),
    ],
)
def test_a_choice_of_nothing_is_told(loaded, source, told):
    with pytest.raises(TaskError, match=re.escape(told)):
        load_tasks(source)


# -- the images ------------------------------------------------------------------------------------

IMAGES = {
    "Project-MONAI__MONAI-440": "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-440:latest",
    "getmoto__moto-7365": "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest",
    "python__mypy-16781": "xingyaoww/sweb.eval.x86_64.python_s_mypy-16781:latest",
    "pandas-dev__pandas-57488": "xingyaoww/sweb.eval.x86_64.pandas-dev_s_pandas-57488:latest",
    "sqlfluff__sqlfluff-1625": "xingyaoww/sweb.eval.x86_64.sqlfluff_s_sqlfluff-1625:latest",
}


@pytest.mark.parametrize("instance_id, image", IMAGES.items())
def test_case_11_an_id_gives_its_image(instance_id, image):
    # SWE-Gym#18, OpenHands#7168: images missing or misnamed.
    assert image_of(instance_id) == image


@pytest.mark.parametrize(
    "instance_id", ["", "a/b-1", "a__b-1:latest", "a__b 1", "a__b-", "a..b", "a+b-1", "ä__b-1"]
)
def test_case_11_an_id_that_makes_no_image_name_is_refused(instance_id):
    with pytest.raises(ValueError, match="no image name"):
        image_of(instance_id)


def test_case_11_all_ids_of_the_published_run_have_an_image_of_their_own():
    assert len({image_of(i) for i in TRAINING_IDS}) == len(TRAINING_IDS) == 31
