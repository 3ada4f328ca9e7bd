"""The loop in trouble: a proxy, sandboxes and a killer that break things on purpose, and what must hold all the same."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar

import httpx
import numpy as np
import pytest
from chaos import checks, leaks, proxy, reference
from chaos import sandboxes as chaotic_sandboxes
from chaos.chaotic import Meddling, run_in, world
from chaos.folders import JOB, MIXED, SAME, Told, story, write
from chaos.history import history, read_log
from chaos.killer import AIMS, Killer
from chaos.proxy import KINDS, Rates, chaos_proxy
from chaos.sandboxes import ChaoticBackend, Shares
from safetensors.numpy import save_file

from swegym_tutorial import TrainingConfig
from swegym_tutorial.sandbox import SandboxError

# -- The long way: whole runs --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_the_midst_of_trouble_makes_all_its_steps(tmp_path):
    config = TrainingConfig.laptop(
        steps=3,
        groups_per_batch=4,
        max_groups_per_batch=4,
        group_size=4,
        rollout_workers=8,
        attempt_retries=4,
    )
    shares = Shares(open=0.04, die=0.04, hang=0.01, flood=0.04)
    with world(tmp_path / "server", Rates.of_each(0.02, outage_every=12, outage_seconds=2)) as place:
        result = run_in(
            place, config, tmp_path / "run", shares, meddling=Meddling(restart_every=25, pause_every=10, pause_seconds=2),
            limit=600,
        )  # fmt: skip
    assert result.wrong == [] and result.left_words == []
    assert result.batches == 3 and result.batches_lost == 0
    assert sum(result.injected.values()) >= 10


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_was_left_alone(tmp_path):
    killer = Killer(tmp_path, seed=3, steps=3)
    runs = killer.run(3)
    assert [run.wrong for run in runs] == [[] for _ in runs]
    assert [run.left for run in runs] == [[] for _ in runs]
    assert sum(len(run.kills) for run in runs) == 3 and all(run.identical for run in runs)


@pytest.mark.slow
def test_two_clients_with_attempts_side_by_side_are_killed_and_lose_nothing(tmp_path):
    aims = [aim for aim in AIMS if aim.name in ("training or publishing", "a checkpoint's file just written")]
    killer = Killer(tmp_path, mode="side by side", seed=5, steps=2, aims=aims)
    runs = killer.run(2)
    assert [run.wrong for run in runs] == [[] for _ in runs]
    assert [run.left for run in runs] == [[] for _ in runs]
    assert sorted(kill.aim for run in runs for kill in run.kills) == sorted(aim.name for aim in aims)


# -- What the checks find ------------------------------------------------------------------------------


def test_a_whole_folder_passes_every_check(tmp_path):
    folder = write(story(), tmp_path / "run")
    assert checks.all_of(folder, steps=2) == []
    assert reference.differences(folder, write(story(), tmp_path / "other")) == []
    told = history(read_log(folder)[0], JOB)
    assert [[group["group"] for group in step.groups] for step in told.steps] == [[0, 1], [2, 3]]
    assert [(why, [g["group"] for g in groups]) for why, groups in told.dropped] == [("killed", [2])]


def _a_step_twice(told: Told) -> None:
    told.log("step_done", **told.step(2, 1, {2: MIXED, 3: MIXED}))


def _a_step_missing(told: Told) -> None:
    told.events.remove(told.find("step_done", step=0))


def _a_version_twice(told: Told) -> None:
    told.find("step_done", step=1)["policy_version"] = 1


def _a_group_in_two_steps(told: Told) -> None:
    for event in told.events:
        if event.get("group") == 3:
            event["group"] = 0


def _a_group_lost(told: Told) -> None:
    told.checkpoint["unfinished_groups"] = []


def _a_group_in_a_step_and_to_be_started_anew(told: Told) -> None:
    told.checkpoint["unfinished_groups"] = [3, 4]


def _a_group_never_started(told: Told) -> None:
    told.events = [e for e in told.events if e["event"] != "rollout_start" or e["group"] != 1]


def _a_group_told_to_be_started_anew_and_passed_over(told: Told) -> None:
    told.find("resumed", restarted=[2])["restarted"] = [1]


def _a_restarted_group_that_the_checkpoint_does_not_name(told: Told) -> None:
    for event in told.events:
        if event["event"] == "resumed":
            event["restarted"] = [2, 3]


def _a_group_lost_by_an_older_checkpoint(told: Told) -> None:
    told.checkpoint["earlier"][0]["unfinished_groups"] = []


def _a_cursor_behind_what_was_begun(told: Told) -> None:
    told.checkpoint |= {"next_group": 4, "unfinished_groups": []}


def _a_cursor_behind_a_step(told: Told) -> None:
    told.checkpoint |= {"next_group": 3, "unfinished_groups": []}


def _an_attempt_under_the_policy_before_the_resume(told: Told) -> None:
    told.find("rollout_start", phase="run-2", group=3)["policy_version"] = 0


def _a_group_trained_on_when_stale(told: Told) -> None:
    for event in told.events:
        if event.get("job") == JOB and event["event"] == "group":
            event["policy_version"] = -1


def _a_group_of_a_policy_that_was_not_there_yet(told: Told) -> None:
    told.find("group", group=0)["policy_version"] = 1


def _a_group_partly_of_an_earlier_part(told: Told) -> None:
    told.find("episode", phase="run-2", group=2, attempt=0)["phase"] = "run-1"
    told.events.insert(0, told.events.pop(told.events.index(told.find("episode", phase="run-1", group=2))))


def _a_group_with_a_reward_that_no_attempt_earned(told: Told) -> None:
    told.find("episode", group=1, attempt=0)["reward"] = 1.0


def _a_group_of_two_policies(told: Told) -> None:
    told.find("episode", group=1, attempt=0)["policy_version"] = 1


def _a_group_with_another_task_after_the_resume(told: Told) -> None:
    for event in told.events:
        if event.get("phase") == "run-2" and event.get("group") == 2:
            event["instance_id"] = "task-9"


def _a_step_that_names_another_group(told: Told) -> None:
    told.find("step_done", step=0)["trained_groups"] = [1]


def _an_attempt_begun_twice(told: Told) -> None:
    told.begin(2, 3, 0, 1)


def _an_attempt_that_was_never_begun(told: Told) -> None:
    told.events.remove(told.find("rollout_start", phase="run-2", group=3, attempt=0))


def _a_client_that_did_nothing(told: Told) -> None:
    told.clients = 2


def _a_step_of_fewer_groups_than_it_says(told: Told) -> None:
    told.events.remove(told.find("group", group=1))


def _a_step_with_more_attempts_than_it_says(told: Told) -> None:
    told.find("group", group=1)["rewards"] = [0.0, 0.0, 0.0]


def _a_checkpoint_ahead_of_the_log(told: Told) -> None:
    told.checkpoint |= {"step": 2}


def _a_checkpoint_that_its_line_does_not_name(told: Told) -> None:
    told.checkpoint["earlier"][0]["checkpoint"] = "tinker://elsewhere/weights/step0"


def _a_gap_in_the_listed_checkpoints(told: Told) -> None:
    told.checkpoint["earlier"][0]["step"] = -1


def _an_attempt_neither_ended_nor_marked(told: Told) -> None:
    told.events.remove(told.find("attempt_unfinished"))


def _an_attempt_with_two_ends(told: Told) -> None:
    told.unfinished(2, 3, 0, 1)


def _a_batch_trained_and_dropped(told: Told) -> None:
    at = told.events.index(told.find("step_done", step=1))
    told.group(2, 4, SAME, 1)
    told.events.insert(at, told.events.pop())


def _a_batch_full_at_the_end(told: Told) -> None:
    at = told.events.index(told.find("run_done"))
    del told.events[at:]
    told.group(2, 4, MIXED, 2)
    told.group(2, 5, MIXED, 2)
    told.log("run_failed", reason="the server is gone")


def _too_few_steps(told: Told) -> None:
    told.events.remove(told.find("step_done", step=1))
    told.checkpoint = {**told.checkpoint, **told.checkpoint["earlier"][0], "earlier": []}


@pytest.mark.parametrize(
    "doctor, words",
    [
        (_a_step_twice, "the steps in effect are [0, 1, 1]"),
        (_a_step_missing, "the steps in effect are [1]"),
        (_a_version_twice, "policy versions of the steps are [1, 1]"),
        (_a_group_in_two_steps, "group 0 is in step 0 and in 1"),
        (_a_group_lost, "step 1: the groups [4] were started and have no fate"),
        (_a_group_lost_by_an_older_checkpoint, "step 0: the groups [2] were started and have no fate"),
        (_a_cursor_behind_what_was_begun, "the groups [4] were begun before, and its next is 4"),
        (_a_cursor_behind_a_step, "step 1: the groups [3] lie beyond its next, 3"),
        (
            _a_restarted_group_that_the_checkpoint_does_not_name,
            "starts [2, 3] anew, its checkpoint names [2]",
        ),
        (_an_attempt_under_the_policy_before_the_resume, "group 3 was begun under version 0 after a resume"),
        (_a_group_trained_on_when_stale, "step 1: group 2 is of version -1"),
        (_a_group_of_a_policy_that_was_not_there_yet, "step 0: group 0 is of version 1"),
        (_a_group_partly_of_an_earlier_part, "group 2 has a fate, and ends of its attempts [1] only"),
        (_a_group_with_a_reward_that_no_attempt_earned, "group 1 has the rewards [0.0, 0.0] and 0 lost"),
        (_a_group_of_two_policies, "group 1 is of version 0, its attempts of {"),
        (_a_group_with_another_task_after_the_resume, "group 2 had the tasks ['task-2', 'task-9']"),
        (_a_step_that_names_another_group, "names the groups [1], and the log shows [0]"),
        (_an_attempt_begun_twice, "was begun 2 times"),
        (_an_attempt_that_was_never_begun, "ended and was never begun"),
        (_a_client_that_did_nothing, "train-job1: 0 of 2 steps"),
        (_a_client_that_did_nothing, "train-job1: no checkpoint can be read"),
        (
            _a_group_in_a_step_and_to_be_started_anew,
            "the groups [3] are in a step and are to be started anew",
        ),
        (_a_group_never_started, "1, 0) ended and was never begun"),
        (_a_group_told_to_be_started_anew_and_passed_over, "starts [1] anew, and began 2"),
        (_a_step_of_fewer_groups_than_it_says, "the log shows {'kept': 1}"),
        (_a_step_with_more_attempts_than_it_says, "counts 4 attempts, and its groups have 5"),
        (_a_checkpoint_ahead_of_the_log, "the checkpoint is of step 2, the last line of 1"),
        (_a_checkpoint_that_its_line_does_not_name, "elsewhere"),
        (_a_gap_in_the_listed_checkpoints, "lists the steps [1, -1]"),
        (_an_attempt_neither_ended_nor_marked, "neither ended nor marked"),
        (_an_attempt_with_two_ends, "has 2 ends"),
        (_a_batch_trained_and_dropped, "step 1 was made of more"),
        (_a_batch_full_at_the_end, "[4, 5], dropped at run_failed"),
        (_too_few_steps, "1 of 2 steps"),
    ],
)
def test_what_is_wrong_in_a_log_is_found(doctor, words, tmp_path):
    told = story()
    doctor(told)
    found = checks.all_of(write(told, tmp_path / "run"), steps=2)
    assert any(words in text for text in found), found


@pytest.mark.parametrize("line", ['{"time": 1.0, "ev', "[]", '{"event": "x", "loss": NaN}'])
def test_a_line_that_is_no_event_is_found(line, tmp_path):
    folder = write(story(), tmp_path / "run")
    with (folder / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    assert any("no event" in text for text in checks.all_of(folder))


@pytest.mark.parametrize("name", [f".{JOB}-checkpoint.json.123", "server/m/weights/s.safetensors.1.part"])
def test_what_was_left_half_written_is_found(name, tmp_path):
    folder = write(story(), tmp_path / "run")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("{")
    assert checks.all_of(folder) == [f"{name} was left half written"]


def _flipped(path: Path) -> None:
    """Change a byte of the tokens' data."""
    data = bytearray(path.read_bytes())
    data[data.index(b"tokens.npy") + 20] ^= 0xFF
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        _flipped,
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_bytes(b""),
    ],
)
def test_an_attempt_that_cannot_be_read_is_found(damage, tmp_path):
    folder = write(story(), tmp_path / "run")
    damage(folder / "episodes" / "run-0" / JOB / "g000000-a0" / "trajectory.npz")
    (text,) = checks.all_of(folder)
    assert "g000000-a0 cannot be read" in text


def test_attempts_of_earlier_versions_are_read_and_what_is_wrong_in_them_is_found(tmp_path):
    folder = write(story(), tmp_path / "run")
    for n, reward in enumerate((MIXED[0], 1 - MIXED[1])):
        place = folder / "episodes" / "run-0" / JOB / f"g000000-a{n}"
        (place / "trajectory.npz").unlink()
        told = json.dumps({"verdict": {"reward": reward}}).encode()
        (place / "trajectory.json.gz").write_bytes(gzip.compress(told))
    (text,) = checks.all_of(folder)
    assert text.endswith("g000000-a1 tells another reward than the log")
    (place / "trajectory.json.gz").write_bytes(b"\x1f\x8b cut")
    (text,) = checks.all_of(folder)
    assert "g000000-a1 cannot be read" in text


def _another_reward(told: Told) -> None:
    told.find("group", group=1)["rewards"] = [0.0, 1.0]


def _another_task(told: Told) -> None:
    told.find("group", group=1)["instance_id"] = "task-7"


def _another_loss(told: Told) -> None:
    told.find("step_done", step=1)["metrics"]["loss:sum"] *= 1.001


def _another_mean(told: Told) -> None:
    told.find("step_done", step=0)["reward_mean"] = 0.3


@pytest.mark.parametrize(
    "doctor, words",
    [
        (_another_reward, "step 0: its groups, tasks or rewards"),
        (_another_task, "step 0: its groups, tasks or rewards"),
        (_another_loss, "step 1: loss:sum is"),
        (_another_mean, "step 0: reward_mean is 0.3"),
        (_too_few_steps, "1 steps, and 2 in the reference"),
    ],
)
def test_what_differs_from_the_reference_is_found(doctor, words, tmp_path):
    told = story()
    doctor(told)
    if doctor is _too_few_steps:
        told.checkpoint["checkpoint"] = story().checkpoint["checkpoint"]
    found = reference.differences(write(told, tmp_path / "run"), write(story(), tmp_path / "reference"))
    assert any(words in text for text in found), found


def test_other_weights_are_found_and_the_last_bits_are_told_apart(tmp_path):
    one, two = (write(story(), tmp_path / name) for name in ("run", "reference"))
    file = next(one.glob("server/*/weights/*"))
    for change, close in ((1e-7, True), (0.01, False)):
        save_file({"lora_a": np.arange(6, dtype=np.float32) + np.float32(change)}, file)
        ours, theirs = (reference.weights(folder, JOB) for folder in (one, two))
        assert reference.same_weights(ours, theirs) == close and not reference.same_weights(
            ours, theirs, exactly=True
        )
        assert (reference.differences(one, two) == []) == close


def test_what_is_left_is_found(tmp_path):
    import subprocess

    before = threading.enumerate()
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="left")
    thread.start()
    process = subprocess.Popen(["sleep", "60"], env={"TMPDIR": str(tmp_path)})
    (tmp_path / "swegym-1").mkdir()
    try:
        assert leaks.after_patience(lambda: [] if leaks.processes(tmp_path) else [1], 60) == []
        assert [found.pid for found in leaks.processes(tmp_path)] == [process.pid]
        assert leaks.threads(before) == [thread] and leaks.folders(tmp_path) == [tmp_path / "swegym-1"]
    finally:
        process.kill()
        process.wait()
        over.set()
        thread.join()
    assert leaks.processes(tmp_path) == [] and leaks.threads(before) == []


# -- The proxy -----------------------------------------------------------------------------------------


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    heard: ClassVar[Counter[str]] = Counter()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.heard[self.path] += 1
        content = json.dumps(
            {"path": self.path, "body": body.decode(), "key": self.headers["X-API-Key"]}
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def _ask(url: str, path: str, content: object = b"hello") -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=20) as client:
        return client.post(f"{url}{path}", content=content, headers={"X-API-Key": "tml-1"})  # type: ignore[arg-type]


def test_calls_pass_the_proxy_as_they_are(echo):
    with chaos_proxy(echo) as between:
        for content, heard in ((b"hello", "hello"), (iter([b"in ", b"chunks"]), "in chunks"), (b"", "")):
            answer = _ask(between.url, "/api?x=1", content)
            assert answer.status_code == 200
            assert answer.json() == {"path": "/api?x=1", "body": heard, "key": "tml-1"}
        with httpx.Client(trust_env=False) as client:  # one connection for many calls
            assert [client.post(f"{between.url}/{n}", content=b"x").status_code for n in range(5)] == [
                200
            ] * 5
        assert not between.injected


@pytest.mark.parametrize("kind, arrived", [
    ("drop_before", 0), ("drop_after", 1), ("delay", 1), ("duplicate", 2), ("error_before", 0), ("error_after", 1),
])  # fmt: skip
def test_each_fault_of_a_call_is_what_it_says(kind, arrived, echo, monkeypatch):
    monkeypatch.setattr(proxy, "DELAY", (0.3, 0.4))
    path = f"/{kind}"
    _Echo.heard.pop(path, None)
    with chaos_proxy(echo, Rates(**{kind: 1.0})) as between:
        began = time.monotonic()
        if kind.startswith("drop"):
            with pytest.raises(httpx.TransportError):
                _ask(between.url, path)
        else:
            status = _ask(between.url, path).status_code
            assert status in (500, 502, 503, 429, 408) if kind.startswith("error") else status == 200
        assert kind != "delay" or time.monotonic() - began >= 0.3
        assert _Echo.heard[path] == arrived and between.injected == {kind: 1}


def test_faults_come_at_their_rates_and_a_seed_repeats_them(echo):
    def faults(seed: int) -> Counter[str]:
        with chaos_proxy(echo, Rates.of_each(0.1, delay=0.0), seed) as between:
            for n in range(60):
                with suppress(httpx.TransportError):
                    _ask(between.url, f"/{n}")
            return between.injected

    first = faults(1)
    assert first == faults(1) != faults(2)
    assert 10 <= sum(first.values()) <= 50 and set(first) <= set(KINDS)


def test_an_outage_cuts_or_refuses_every_call_and_ends(echo):
    with chaos_proxy(echo, Rates(outage_every=0.3, outage_seconds=0.5), seed=1) as between:
        seen: Counter[str] = Counter()
        end = time.monotonic() + 60
        while time.monotonic() < end and len(seen) < 3:
            try:
                seen[str(_ask(between.url, "/outage").status_code)] += 1
            except httpx.TransportError:
                seen["cut"] += 1
        assert set(seen) == {"200", "503", "cut"} and between.injected["outage"] >= 2


def test_a_server_that_is_gone_looks_gone_and_may_come_back_elsewhere(echo):
    with chaos_proxy("http://127.0.0.1:1") as between:
        with pytest.raises(httpx.TransportError):
            _ask(between.url, "/gone")
        between.target = echo
        assert _ask(between.url, "/back").status_code == 200


# -- The sandboxes -------------------------------------------------------------------------------------


CONFIG = TrainingConfig.laptop(tool_timeout=60.0)  # a flood takes as long as the machine is busy


def _backend(sandboxes, shares: Shares) -> ChaoticBackend:
    return ChaoticBackend(sandboxes, CONFIG, shares, seed=1)


def test_a_sandbox_that_cannot_be_had(sandboxes, task):
    backend = _backend(sandboxes, Shares(open=1.0))
    with pytest.raises(SandboxError, match="on purpose"):
        backend.open(task)
    assert backend.injected == {"open": 1} and backend.name == sandboxes.name


@pytest.mark.parametrize("fate", ["die", "hang"])
def test_a_sandbox_that_fails_stays_so(fate, sandboxes, task, monkeypatch):
    monkeypatch.setattr(chaotic_sandboxes, "HANG", (0.2, 0.3))
    monkeypatch.setattr(chaotic_sandboxes, "HANG_TIMEOUT", 0.5)
    backend = _backend(sandboxes, Shares(**{fate: 1.0}))
    with closing(backend.open(task)) as sandbox:
        began, answered = time.monotonic(), 0
        with pytest.raises(SandboxError, match="on purpose"):
            for _ in range(chaotic_sandboxes.CALLS + 1):
                assert sandbox.exec("echo here", timeout=60).output == "here\n"
                answered += 1
        assert answered < chaotic_sandboxes.CALLS and (fate == "die" or time.monotonic() - began > 0.7)
        for call in (lambda: sandbox.write_file("/tmp/x", b""), lambda: sandbox.read_file("/tmp/x")):
            with pytest.raises(SandboxError):
                call()
    assert backend.injected == {fate: 1}


def test_a_flood_comes_before_one_command_of_the_agents_and_before_no_other(sandboxes, task):
    backend = _backend(sandboxes, Shares(flood=1.0))
    with closing(backend.open(task)) as sandbox:
        for _ in range(2 * chaotic_sandboxes.CALLS):  # grading's and the patch's commands
            assert sandbox.exec("echo here", timeout=30).output == "here\n"
        said = [
            sandbox.exec(
                "echo here; exit 3", timeout=CONFIG.tool_timeout, output_bytes=8 * CONFIG.observation_chars
            )
            for _ in range(3)
        ]
    assert [result.exit_code for result in said] == [3, 3, 3]
    assert [result.truncated_bytes > 40_000_000 for result in said] == [True, False, False]
    assert said[0].output.endswith("here\n") and said[1].output == "here\n"
    assert backend.injected == {"flood": 1}


def test_sandboxes_without_faults_are_the_real_ones(sandboxes, task):
    backend = _backend(sandboxes, Shares())
    with closing(backend.open(task)) as sandbox:
        sandbox.write_file("/tmp/x", b"data")
        assert sandbox.read_file("/tmp/x") == b"data" and not backend.injected
    assert backend.missing([task]) == {}
