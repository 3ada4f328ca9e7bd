"""The viewer: recorded attempts of every fate, hostile text, sizes, and a notebook with and without widgets."""

from __future__ import annotations

import ast
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded import rollout_to_json
from test_dashboard import run_cells
from tokenizers import Tokenizer

import swegym_tutorial
from swegym_tutorial import EpisodeViewer, TrainingConfig, load_tasks
from swegym_tutorial.attempt_json import (
    rollout_from_json,
    verdict_from_json,
    verdict_to_json,
)
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.cli import main
from swegym_tutorial.events import RunFolder, dumps, read_episode
from swegym_tutorial.grading import Outcome, Verdict
from swegym_tutorial.rollout import Ending, Rollout, Turn
from swegym_tutorial.sandbox import CommandResult
from swegym_tutorial.viewer.chooser import MOST, Chooser
from swegym_tutorial.viewer.episodes import EpisodeList
from swegym_tutorial.viewer.html_page import episode_html
from swegym_tutorial.viewer.page import EpisodePage, decoder, find_decoder
from swegym_tutorial.viewer.parts import fair_share, pieces, segments, tokens_words, turn_parts
from swegym_tutorial.viewer.style import BAD, GOOD, MINUS, NEITHER, PLUS, SHADES

TASK = load_tasks()[0]
TOKENIZER = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
DECODE = decoder(TOKENIZER)
EVIL = (
    "</pre></details></div><script>alert('owned')</script><img src=x onerror=alert(1)>"
    " $x^2$ \\(y\\) \x1b[31mred \u202eback \udc80 &amp; é漢🎉 \x00"
)
UNSEEN = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]"


def turn(text: str, *calls: tuple[str, CommandResult], errors: tuple[str, ...] = ()) -> Turn:
    commands, results = tuple(c for c, _ in calls), tuple(r for _, r in calls)
    return Turn(text, len(encode(text)), commands, results, errors, 0.0, sum(r.seconds for r in results))


def call(command: str) -> str:
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text.encode("utf-8", "backslashreplace").decode()).ids


def rollout(*turns: Turn, patch: bytes = b"", ending: Ending = Ending.FINAL) -> Rollout:
    """An attempt whose sampled tokens are the turns' texts, with log-probabilities of all sizes."""
    turns = turns or (
        turn("Look.\n</think>\n\n" + call("ls"), ("ls", CommandResult(0, "a\n", False, 0, 0.1))),
    )
    rng, tokens, mask, logprobs = random.Random(0), list[int](), list[int](), list[float]()
    for each in turns:
        given, sampled = encode("<|im_start|>user\nThe issue.<|im_end|>\n"), encode(each.text)
        tokens += given + sampled
        mask += [0] * len(given) + [1] * len(sampled)
        logprobs += [0.0] * len(given) + [-rng.expovariate(0.8) for _ in sampled]
    arrays = np.array(tokens, np.int32), np.array(mask, bool), np.array(logprobs, np.float32)
    return Rollout(TASK.instance_id, *arrays, turns, ending, patch, 83.2)


PATCH = b"""diff --git a/x.py b/x.py
--- a/x.py
+++ b/x.py
@@ -1,3 +1,3 @@
 context
--- an SQL comment
+++ counter
"""
FIXED = Verdict(Outcome.RESOLVED, dict.fromkeys(TASK.fail_to_pass + TASK.pass_to_pass, "PASSED"), seconds=2.5)


class Writer:
    """A run's folder, written by the code that runs write it with."""

    def __init__(self, path: Path, config: TrainingConfig | None = None) -> None:
        self.folder = RunFolder(path)
        self.folder.open()
        (path / "config.json").write_text(dumps((config or TrainingConfig.laptop()).to_json()))

    def save(
        self, group: int, attempt: int, made: Rollout | None = None, verdict: Verdict | None = FIXED,
        phase: str = "run-1", job: str = "train-job0",
    ) -> Path:  # fmt: skip
        made = made or rollout()
        path = self.folder.episode(phase, job, group, attempt)
        self.folder.save_rollout(path, made)
        if verdict is not None:
            self.folder.save_episode(path, made, verdict)
            self.log(group, attempt, verdict.reward, verdict.outcome, phase=phase, job=job)
        return path

    def log(self, group: int, attempt: int, reward: float | None, outcome: str, **more: Any) -> None:
        fields = {
            "phase": "run-1",
            "job": "train-job0",
            "instance_id": TASK.instance_id,
            "policy_version": 3,
        } | more
        self.folder.log("episode", **fields, group=group, attempt=attempt, reward=reward, outcome=outcome)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(tmp_path / "run")


class Elements(HTMLParser):
    """Reads a page as a browser does, and fails where it is not well made."""

    VOID = ("br",)

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []  # innermost element, text
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def text(self) -> str:
        return "".join(text for tag, text in self.texts if tag != "style")


# -- Names -----------------------------------------------------------------------------------------


def test_names_are_as_short_as_they_can_be_and_in_order(writer: Writer) -> None:
    for group, attempt in ((0, 10), (0, 2), (1, 0)):
        writer.save(group, attempt)
    writer.save(0, 0, phase="evaluation-before", job="base")
    writer.save(0, 0, phase="evaluation-after")
    episodes = EpisodeList(writer.folder.path)
    assert episodes.names == (
        "evaluation-before/g000000-a0", "g000000-a2", "g000000-a10", "g000001-a0", "evaluation-after/g000000-a0",
    )  # fmt: skip
    writer.save(0, 2, phase="run-2")  # done again by a later part of the run
    writer.save(0, 2, job="train-job10")
    writer.save(0, 2, job="train-job9")
    episodes.refresh()
    ours = [name for name in episodes.names if name.endswith("g000000-a2")]
    assert ours == [
        "run-1/train-job0/g000000-a2", "train-job9/g000000-a2", "train-job10/g000000-a2", "train-job0/g000000-a2",
    ]  # fmt: skip
    for name in episodes.names:
        assert episodes.find(name) == name and read_episode(episodes.path(name))["turns"]


def test_a_name_may_say_more_or_less_and_the_newest_training_comes_first(writer: Writer) -> None:
    for phase in ("evaluation-before", "run-1", "run-2"):
        writer.save(0, 0, phase=phase)
    episodes = EpisodeList(writer.folder.path)
    assert episodes.find("run-2/train-job0/g000000-a0") == "g000000-a0"
    assert episodes.find("train-job0/g000000-a0/") == "g000000-a0"
    assert episodes.find("run-1/g000000-a0") == "run-1/g000000-a0"
    assert episodes.find("evaluation-before/train-job0/g000000-a0") == "evaluation-before/g000000-a0"
    assert episodes.path("g000000-a0").parts[-3] == "run-2"


def test_an_unknown_name_is_told_with_near_ones(writer: Writer) -> None:
    for attempt in range(4):
        writer.save(7, attempt)
    with pytest.raises(
        LookupError, match=r"no episode g000007-a9; near it: g000007-a\d, .* 4, from g000007-a0"
    ):
        EpisodeViewer(writer.folder.path, "g000007-a9")
    with pytest.raises(LookupError, match="near it: g000007-a"):
        EpisodeViewer(writer.folder.path, "nonsense")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        EpisodeViewer(writer.folder.path / "not")


def test_listing_reads_no_attempt_and_passes_over_what_is_none(writer: Writer) -> None:
    for attempt in range(3):
        (writer.save(0, attempt) / "trajectory.npz").write_bytes(b"damaged")
    root = writer.folder.path / "episodes"
    for odd in ("run-1/train-job0/notes", "run-1/train-job0/.g000009-a0", ".deleted+run-1/x/g000000-a0"):
        (root / odd).mkdir(parents=True)
    (root / "run-1" / "file").write_text("")
    writer.folder.log("episode", phase=3, group="x")
    assert EpisodeList(writer.folder.path).names == ("g000000-a0", "g000000-a1", "g000000-a2")


# -- Records ---------------------------------------------------------------------------------------


def test_an_attempt_and_a_verdict_are_read_as_they_were_written() -> None:
    killed = CommandResult(137, EVIL, True, 12, 10.0)
    made = rollout(turn("a</think>" + call("x"), ("x", killed), errors=("broken",)), turn("b"), patch=PATCH)
    read = rollout_from_json(json.loads(dumps(rollout_to_json(made))), PATCH)
    for name in ("task_id", "turns", "ending", "patch", "seconds"):
        assert getattr(read, name) == getattr(made, name)
    for name in ("tokens", "mask", "logprobs"):
        one, two = getattr(read, name), getattr(made, name)
        assert one.dtype == two.dtype and np.allclose(one, two, atol=1e-6)
    verdict = replace(
        FIXED, outcome=Outcome.TAMPERED, detail="x", log="l", shared=True, plain=Outcome.RESOLVED
    )
    for each in (verdict, replace(verdict, own_reward=0.25)):
        assert verdict_from_json(json.loads(dumps(verdict_to_json(each))), "l") == each


def test_an_own_reward_is_told_and_is_not_taken_for_resolved(writer: Writer) -> None:
    half = Verdict(Outcome.UNRESOLVED, {}, own_reward=0.5)
    writer.save(0, 0, rollout(turn("Done.")), half)
    writer.log(0, 0, 0.5, "unresolved")
    viewer = EpisodeViewer(writer.folder.path)
    assert "unresolved, reward 0.5" in viewer.html and "unresolved, reward 0.5" in str(viewer)
    ended = EpisodeList(writer.folder.path).ended("g000000-a0")
    assert ended is not None and ended.kind == "not resolved"


# -- Pages -----------------------------------------------------------------------------------------


def test_a_page_tells_issue_turns_patch_tests_and_tokens(writer: Writer) -> None:
    made = rollout(
        turn(
            "<think>\nFirst this.\n</think>\n\nI look.\n" + call("ls") + "\n" + call("false"),
            ("ls", CommandResult(0, "setup.py\n", False, 0, 0.1)),
            ("false", CommandResult(1, "", False, 0, 0.02)),
        ),
        turn(
            "Wait.\n</think>\n\n"
            + call("sleep 9")
            + "\n<tool_call>\n<function=sh>\n</function>\n</tool_call>",
            ("sleep 9", CommandResult(137, "partly", True, 2048, 10.0)),
            errors=("there is no function 'sh'",),
        ),
        turn("Done.\n</think>\n\nFixed it."),
        patch=PATCH,
    )
    tests = {TASK.fail_to_pass[0]: "FAILED", TASK.pass_to_pass[0]: "PASSED", "tests/other.py::test": "ERROR"}
    verdict = Verdict(Outcome.UNRESOLVED, tests, "not passed: one", "printed", 12.0, True, Outcome.RESOLVED)
    writer.save(3, 2, made, verdict)
    viewer = EpisodeViewer(writer.folder.path, "g000003-a2")
    assert viewer.name == "g000003-a2" and viewer.names == ("g000003-a2",)
    page = Elements(viewer.html)
    words = [
        "g000003-a2", TASK.instance_id, "✗ unresolved, reward 0", "training, train-job0", "policy version 3",
        "ended with an answer after 3 turns", "attempt 1 min 23 s", "grading 12 s, shared", "habits: ✓ looks first, ✗ edits", "not passed: one",
        "SWE-Gym would have said resolved", "Issue", *TASK.problem_statement.splitlines(),
        "Turn 1", "thinking", "First this.", "said", "I look.", "command", "ls", "exit code 0", "setup.py",
        "false", "exit code 1", "no output",
        "Turn 2", "Wait.", "sleep 9", "exit code 137", "timed out", "10.00 s", "2,048 bytes", "partly",
        "broken call", "there is no function", "as sampled", "<function=sh>", "Turn 3", "answer", "Fixed it.",
        "Patch", "1 file, +1 −1", "--- an SQL comment", "+++ counter",
        "Tests", "0 of 1 FAIL_TO_PASS passed, 1 of ", "✗ FAILED", TASK.fail_to_pass[0], "✓ PASSED", "✗ ERROR", "printed",
        "Tokens", "sampled tokens, mean log-probability", "prompt", "turn 1", "given",
    ]  # fmt: skip
    at = 0
    for word in words:
        at = page.text.find(word, at)
        assert at >= 0, f"{word!r} is not where it should be"
    plain = str(viewer)
    for word in ("unresolved, reward 0", "thinking: First this.", "$ ls", "| setup.py", "exit code 137, timed out, 10.00 s",
                 "broken call: there is no function", "--- an SQL comment", "FAILED    FAIL_TO_PASS", "tokens:"):  # fmt: skip
        assert word in plain


def test_text_of_models_tasks_and_commands_does_no_harm(writer: Writer) -> None:
    evil = turn(
        f"{EVIL}</think>\n{EVIL}\n" + call(EVIL),
        (EVIL, CommandResult(0, f"{EVIL}\n" * 40, False, 0, 0.1)),  # of which the most is folded
        errors=(EVIL,),
    )
    patch = b"diff --git a/x b/x\n@@ -0,0 +1 @@\n+" + EVIL.encode("utf-8", "surrogateescape")
    tests = {f"test[{EVIL}]": EVIL}
    writer.save(0, 0, rollout(evil, patch=patch), Verdict(Outcome.UNRESOLVED, tests, EVIL, EVIL))
    writer.log(0, 1, None, "infrastructure", reason=EVIL, instance_id=EVIL)
    viewer = EpisodeViewer(writer.folder.path, "g000000-a0")
    page = episode_html(replace(viewer._page, task=replace(TASK, problem_statement=EVIL)), DECODE)
    viewer.show("g000000-a1")
    for made, plain in (
        (page, str(EpisodeViewer(writer.folder.path, "g000000-a0"))),
        (viewer.html, str(viewer)),
    ):
        elements = Elements(made)
        assert not {tag for tag, _ in elements.tags} & {"script", "img", "a", "iframe", "link"}
        assert not [name for _, attributes in elements.tags for name in attributes if name.startswith("on")]
        assert "<script>alert('owned')</script>" in elements.text
        assert not re.search(UNSEEN, made)
        assert not re.search(UNSEEN, plain)
    # Notebooks look for formulas outside of these only.
    root = Elements(page).tags[0][1]["class"] or ""
    assert "tex2jax_ignore" in root and "mathjax_ignore" in root
    assert {tag for tag, text in Elements(page).texts if "$x^2$" in text} <= {"pre", "code", "span", "b"}


def test_patch_lines_are_told_apart_by_their_place_and_by_sign_and_ground() -> None:
    page = Elements(episode_html(EpisodePage("n", "t", rollout=rollout(patch=PATCH))))
    lines = {
        a["class"]: a for tag, a in page.tags if tag == "span" and (a.get("class") or "").startswith("line")
    }
    assert set(lines) == {"line file", "line head", "line hunk", "line ", "line plus", "line minus"}
    assert (
        "background-color" in lines["line plus"]["style"]
        and "background-color" in lines["line minus"]["style"]
    )
    assert lines["line plus"]["style"] != lines["line minus"]["style"]


def test_a_patch_that_changes_line_ends_or_bytes_alone_shows_them(writer: Writer) -> None:
    writer.save(
        0,
        0,
        rollout(patch=b"diff --git a/x b/x\n@@ -1,2 +1,2 @@\n-one\r\n+one\n-t\rwo\r\r\n+two\n-\xff\n+\xe9\n"),
    )
    viewer = EpisodeViewer(writer.folder.path)
    lines = ["-one␍", "+one", "-t␍wo␍␍", "+two", "-\\xff", "+\\xe9"]
    assert [line for line in Elements(viewer.html).text.split("\n") if line in lines] == lines
    assert [line[2:] for line in str(viewer).split("\n") if line[2:] in lines] == lines


def test_a_page_has_no_colour_of_text_and_headings_for_those_who_listen() -> None:
    made = episode_html(EpisodePage("n", "t", rollout=rollout(patch=PATCH), verdict=FIXED, task=TASK), DECODE)
    assert not re.search(r"(?<![-\w])color:(?!inherit)", made)
    assert not re.search(r"background(-color)?:(?!none|rgba\([\d,]+,\.?[\d.]+\))", made)
    elements = Elements(made)
    assert [text.strip() for tag, text in elements.texts if tag == "h5" and text.strip()] == [
        "Issue",
        "Turns",
        "Patch",
        "Tests",
    ]
    assert elements.tags[0][1]["aria-label"] == "episode n" and "h4" in [tag for tag, _ in elements.tags]
    assert [a.get("role") for tag, a in elements.tags if tag == "b" and "role" in a] == ["heading"]


def contrast(ground: str, under: tuple[int, ...], text: tuple[int, ...]) -> float:
    """Return WCAG's contrast of a text on a ground that lets the page's own shine through."""

    def light(color: list[float]) -> float:
        parts = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in color)
        ]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    *rgb, alpha = (float(x) for x in re.findall(r"[\d.]+", ground))
    mixed = [alpha * over + (1 - alpha) * below for over, below in zip(rgb, under, strict=True)]
    high, low = sorted((light(mixed), light([*map(float, text)])), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("page", "text"), [((255,) * 3, (33,) * 3), ((17,) * 3, (224,) * 3)], ids=["light", "dark"]
)
def test_text_can_be_read_on_every_ground_in_both_themes(
    page: tuple[int, ...], text: tuple[int, ...]
) -> None:
    for ground in (GOOD, BAD, PLUS, MINUS, NEITHER, *filter(None, SHADES)):
        assert contrast(ground, page, text) >= 4.5, ground


def test_what_small_ones_leave_goes_to_large_ones() -> None:
    assert fair_share([1, 1, 100, 100], 22) == 10
    assert fair_share([3, 4], 100) == 4 and fair_share([], 5) == 0 and fair_share([9, 9, 9], 2) == 0


def test_tokens_are_coloured_by_mask_and_by_probability_and_say_it(writer: Writer) -> None:
    made = rollout(turn("Look first.\n</think>\n\nFixed the bug."))
    number = int(made.mask.sum())
    made.logprobs[made.mask] = np.log(np.sort(np.resize([0.95, 0.7, 0.3, 0.05, 0.005], number))[::-1])
    made.logprobs[-1] = np.nan  # what a server could not say
    page = episode_html(EpisodePage("n", "t", rollout=made), DECODE)
    sampled = re.search(r'<pre class="sampled"[^>]*>(.*?)</pre>', page, re.S)
    given = re.search(r'<pre class="given">(.*?)</pre>', page, re.S)
    assert sampled and given and "The issue." in given[1] and "first" not in given[1]
    tokens = Elements(sampled[1])
    assert tokens.text == "Look first.\n</think>\n\nFixed the bug."
    assert len(tokens.tags) == int(made.mask.sum()) and all(
        "log p -" in a["title"] or "nan" in a["title"] for _, a in tokens.tags
    )
    grounds = [a.get("style") for _, a in tokens.tags[:-1]]
    assert grounds[0] is None and len(set(grounds)) == 5, "five shades, the likeliest without one"
    assert [tag for tag, _ in tokens.tags[:-1]] == sorted(
        (tag for tag, _ in tokens.tags[:-1]), key=lambda t: t == "b"
    )
    assert tokens.tags[-1][1]["title"] == "p unknown, log p nan"
    assert "the least likely:" in page and "under 1 %" in page


def test_only_rewarded_attempts_of_the_training_are_said_to_be_trained_on(writer: Writer) -> None:
    writer.save(0, 0)
    writer.save(0, 1, verdict=None)
    writer.save(0, 2, verdict=None)
    writer.log(0, 2, None, "infrastructure", reason="SandboxError")
    writer.save(0, 0, phase="evaluation-before", job="base")
    writer.save(0, 0, phase="evaluation-after")
    viewer = EpisodeViewer(writer.folder.path)
    assert len(viewer.names) == 5
    for name in viewer.names:
        viewer.show(name)
        for text in (viewer.html, str(viewer)):
            assert re.search(r"[\d,]+, of which \d+ are sampled", text)
            assert ("trained on" in text) == (name == "g000000-a0"), name


def test_unknown_probabilities_count_for_none(writer: Writer) -> None:
    made = rollout(turn("Look first.\n</think>\n\nFixed the bug."))
    sampled, number = made.mask.nonzero()[0], int(made.mask.sum())
    made.logprobs[sampled] = np.log(0.95)
    assert "; all were at least 90 % likely" in tokens_words(made, DECODE)
    made.logprobs[sampled[:3]] = np.nan
    told = f"{number} sampled tokens, of 3 the probability is unknown, mean log-probability -0.051"
    assert tokens_words(made, DECODE) == f"{told}; all others were at least 90 % likely"
    made.logprobs[sampled[3]] = np.log(0.02)
    assert re.search("; the least likely: “[^“]*” 2.0 %$", tokens_words(made, DECODE))
    made.logprobs[sampled] = np.nan
    assert tokens_words(made, DECODE) == f"{number} sampled tokens, their probability is unknown"
    writer.save(0, 0, made)
    viewer = EpisodeViewer(writer.folder.path)
    for text in (viewer.html, str(viewer)):
        assert "their probability is unknown" in text and "at least 90 % likely" not in text
        assert "mean log-probability" not in text


def test_tokens_of_one_character_are_shown_as_it_and_ids_where_there_is_no_tokenizer() -> None:
    text = "é 漢字 🎉 done"
    made = rollout(turn(text))
    (_, sampled) = segments(made)
    found = list(pieces(made, sampled.start, sampled.end, DECODE))
    assert "".join(piece.text for piece in found) == text and len(found) < sampled.end - sampled.start
    assert sum(piece.logprob for piece in found) == pytest.approx(made.logprobs[made.mask].sum(), rel=1e-5)
    page = episode_html(EpisodePage("n", "t", rollout=made), None, "the tokenizer <X> is not here")
    assert "the tokenizer &lt;X&gt; is not here" in page and f">{made.tokens[-1]} </" in page


def test_a_tokenizer_is_looked_for_on_this_machine_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    decode, why = find_decoder(TrainingConfig.laptop())
    assert decode is not None and decode(encode("Look first.")) == "Look first." and not why
    assert find_decoder(TrainingConfig.laptop(tokenizer=str(POLICY)))[0] is not None
    for name in ("nobody/such-a-model", "/no/such/folder", "a b"):
        decode, why = find_decoder(TrainingConfig.laptop(tokenizer=name))
        assert decode is None and f"the tokenizer {name} is not on this machine" in why
    assert find_decoder(None)[0] is None
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "tokenizer.json").write_text("{")
    assert "cannot be loaded" in find_decoder(TrainingConfig.laptop(tokenizer=str(broken)))[1]
    assert find_decoder(None, TOKENIZER)[0] is not None


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("only words", "", "only words"),
        ("never ending thought " + call("ls"), "", "never ending thought"),
        ("<think>a</think>b", "a", "b"),
        ("a</think>b</think>c", "a", "b</think>c"),
        ("</think>", "", ""),
    ],
)
def test_a_turn_is_taken_apart_as_its_calls_are_read(text: str, thought: str, said: str) -> None:
    parts = turn_parts(turn(text))
    assert (parts.thought, parts.said) == (thought, said)


# -- What is missing -------------------------------------------------------------------------------


def test_an_attempt_that_is_being_graded_is_shown_and_refreshed(writer: Writer) -> None:
    writer.save(0, 0, verdict=None)
    viewer = EpisodeViewer(writer.folder.path)
    assert "not graded: the grading had not ended" in viewer.html and "Turn 1" in viewer.html
    writer.save(0, 0)
    writer.save(0, 1)
    viewer.refresh()
    assert viewer.names == ("g000000-a0", "g000000-a1")
    assert "resolved, reward 1" in viewer.html and "not graded" not in viewer.html
    writer.save(0, 2)
    viewer.show("g000000-a2")  # which it did not know yet
    assert viewer.name == "g000000-a2"


def test_a_run_without_attempts_says_so_until_there_is_one(writer: Writer) -> None:
    viewer = EpisodeViewer(writer.folder.path)
    assert viewer.names == () and viewer.name is None
    assert "No episode has been recorded yet" in viewer.html and str(viewer) in viewer.html
    viewer.show()
    with pytest.raises(LookupError, match="none has been recorded yet"):
        viewer.show("g000000-a0")
    writer.save(0, 0)
    viewer.refresh()
    assert viewer.name == "g000000-a0"


def test_what_is_lost_or_deleted_is_told_from_the_log(writer: Writer) -> None:
    writer.save(0, 0)
    writer.log(0, 1, None, "infrastructure", reason="SandboxError: the server is <gone>")
    writer.log(0, 2, 1.0, "resolved")
    writer.save(0, 3, verdict=None)
    writer.log(0, 3, None, "infrastructure", reason="SandboxError: while grading")
    viewer = EpisodeViewer(writer.folder.path, "g000000-a1")
    assert viewer.names == ("g000000-a0", "g000000-a1", "g000000-a3")
    text = Elements(viewer.html).text
    assert (
        "infrastructure fault, no reward" in text
        and "the server is <gone>" in text
        and "reward 0" not in text
    )
    viewer.show("g000000-a2")
    assert (
        "its recording is gone" in viewer.html
        and "episodes_gb" in str(viewer)
        and "resolved, by the log" in str(viewer)
    )
    viewer.show("g000000-a3")
    assert "while grading" in viewer.html and "Turn 1" in viewer.html and "not graded" not in viewer.html


# -- Names that change while a run is live ---------------------------------------------------------


def first_and_other(writer: Writer, one: tuple[str, str], other: tuple[str, str]) -> EpisodeViewer:
    """Show an attempt, then record another one of the same numbers, told from the first by its instance."""
    writer.save(0, 0, replace(rollout(), task_id="the__first-1"), phase=one[0], job=one[1])
    viewer = EpisodeViewer(writer.folder.path)
    viewer._row = Chooser(viewer._episodes, viewer.name, viewer.show, viewer.refresh)
    assert viewer._page is not None and viewer._page.instance_id == "the__first-1"
    writer.save(0, 0, replace(rollout(), task_id="the__other-2"), phase=other[0], job=other[1])
    return viewer


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        (("run-1", "train-job1"), ("run-1", "train-job0"), "train-job1/g000000-a0"),
        (("run-1", "train-job0"), ("run-2", "train-job0"), "run-1/g000000-a0"),
        (
            ("evaluation-after", "train-job0"),
            ("evaluation-after", "train-job1"),
            "evaluation-after/train-job0/g000000-a0",
        ),
    ],
    ids=["two clients", "resumed", "evaluations"],
)
def test_what_is_shown_stays_when_its_name_becomes_longer(
    writer: Writer, one: tuple[str, str], other: tuple[str, str], name: str
) -> None:
    def check(viewer: EpisodeViewer) -> None:
        assert viewer._page is not None and viewer._page.instance_id == "the__first-1"
        assert viewer.name == name and str(viewer).startswith(f"{name}  the__first-1")
        assert viewer._row.list.value == name and viewer._place == (*one, "g000000-a0")
        values = [value for _, value in viewer._row.list.options]
        assert values == list(viewer.names) and len(values) == 2

    viewer = first_and_other(writer, one, other)
    viewer.refresh()
    check(viewer)
    viewer.show()
    check(viewer)
    viewer._row.next.click()
    assert viewer._page is not None and viewer._page.instance_id == "the__other-2"
    viewer._row.previous.click()
    check(viewer)
    viewer._row.renew.click()
    check(viewer)
    assert "the__first-1" in viewer.html and "the__other-2" not in viewer.html


def test_a_name_that_is_not_found_leaves_the_new_names_of_the_rest_right(writer: Writer) -> None:
    viewer = first_and_other(writer, ("run-1", "train-job1"), ("run-1", "train-job0"))
    with pytest.raises(LookupError, match="no episode g000009-a0"):
        viewer.show("g000009-a0")
    assert viewer.name == viewer._row.list.value == "train-job1/g000000-a0"
    viewer.show()
    assert viewer._page is not None and viewer._page.instance_id == "the__first-1"


GONE = "this is what was read before it was gone: it was deleted, by hand or by the run"


def test_what_is_shown_is_kept_with_a_note_when_it_is_gone(writer: Writer) -> None:
    path = writer.save(0, 0, verdict=None)
    writer.save(1, 0, verdict=None)
    viewer = EpisodeViewer(writer.folder.path)
    viewer._row = Chooser(viewer._episodes, viewer.name, viewer.show, viewer.refresh)
    writer.save(0, 0, phase="run-2")
    shutil.rmtree(path)
    for act in (viewer.refresh, viewer.show, viewer._row.renew.click):
        act()
        assert viewer.name == "run-1/train-job0/g000000-a0" and "Turn 1" in viewer.html
        assert viewer.html.count(GONE) == 1 == str(viewer).count(GONE)
        assert viewer._row.list.value is None
    viewer._row.next.click()
    assert viewer.name == viewer._row.list.value == "g000001-a0" and GONE not in viewer.html


def test_after_the_folder_is_deleted_that_is_what_is_said(writer: Writer) -> None:
    writer.save(0, 0)
    writer.save(1, 0, verdict=None)
    logged, unlogged = (EpisodeViewer(writer.folder.path, name) for name in ("g000000-a0", "g000001-a0"))
    shutil.rmtree(writer.folder.path)
    for viewer in (logged, unlogged):
        viewer.refresh()
        for text in (Elements(viewer.html).text, " ".join(str(viewer).split())):
            assert f"gone: there is no run folder {writer.folder.path} any more" in text
            assert "episodes_gb" not in text
        with pytest.raises(LookupError, match=r"g000007-a0: there is no run folder .* any more$"):
            viewer.show("g000007-a0")
    assert logged.name == "g000000-a0" and "resolved, by the log" in str(logged)
    assert unlogged.name == "run-1/train-job0/g000001-a0" and "Turn 1" in unlogged.html


def test_where_all_recordings_are_gone_near_names_are_told_from_the_log(writer: Writer) -> None:
    writer.log(0, 0, 1.0, "resolved")
    for name in ("g000007-a0", "g000000-a7"):
        with pytest.raises(LookupError, match=r"near it: g000000-a0; the recordings of all are gone$"):
            EpisodeViewer(writer.folder.path, name)


def test_it_says_in_a_few_words_what_it_shows(writer: Writer) -> None:
    viewer = EpisodeViewer(writer.folder.path)
    assert repr(viewer) == "<EpisodeViewer: no episode has been recorded yet>"
    writer.save(0, 0)
    writer.log(0, 1, None, "infra\x1b", instance_id="x\x1b")
    viewer.refresh()
    words = f"g000000-a0 {TASK.instance_id}, resolved, reward 1"
    assert repr(viewer) == f"<EpisodeViewer: {words}; print() says all of it>"
    viewer.show("g000000-a1")
    assert repr(viewer) == "<EpisodeViewer: g000000-a1 x␛, infra␛, by the log; print() says all of it>"


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def as_text(value: Any) -> np.ndarray:
    return np.frombuffer(dumps(value).encode(), np.uint8)


def other_json(value: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        if path.suffix == ".npz":
            members = dict(np.load(path))
            saved = json.loads(bytes(members["attempt"]))
            changed = {**saved, **value} if isinstance(value, dict) else value
            members["attempt"] = as_text(changed)
            for name in members.keys() & (value if isinstance(value, dict) else {}).keys():
                members[name] = as_text(value[name]) if name == "verdict" else np.array(value[name])
            return np.savez(path, **members)
        saved = json.loads(gzip.decompress(path.read_bytes()))
        changed = {**saved, **value} if isinstance(value, dict) else value
        path.write_bytes(gzip.compress(dumps(changed).encode()))

    return write


DEEP = b"[" * 200_000 + b"]" * 200_000


def other_text(old: bytes, new: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        if path.suffix == ".npz":
            members = dict(np.load(path))
            text = bytes(members["attempt"])
            assert old in text
            members["attempt"] = np.frombuffer(text.replace(old, new), np.uint8)
            return np.savez(path, **members)
        text = gzip.decompress(path.read_bytes())
        assert old in text
        path.write_bytes(gzip.compress(text.replace(old, new)))

    return write


def by_an_earlier_version(path: Path, made: Rollout, verdict: Verdict | None) -> None:
    """Write an attempt's file as earlier versions did, in place of the one that is there."""
    new, name = ("trajectory", "trajectory.json.gz") if verdict else ("ungraded", "ungraded.json.gz")
    (path / f"{new}.npz").unlink()
    told = {"verdict": verdict_to_json(verdict)} if verdict else {}
    (path / name).write_bytes(gzip.compress(dumps(rollout_to_json(made) | told).encode()))


def test_what_earlier_versions_recorded_is_shown_as_ever(writer: Writer) -> None:
    shown = []
    for old in (False, True):
        for attempt, verdict in enumerate((FIXED, None)):
            path = writer.save(0, attempt, rollout(), verdict)
            if old:
                by_an_earlier_version(path, rollout(), verdict)
        viewer = EpisodeViewer(writer.folder.path, "g000000-a0")
        whole = viewer.html
        viewer.show("g000000-a1")
        shown.append((whole, viewer.html))
    assert shown[0] == shown[1] and all("Turn 1" in page for page in shown[0])


@pytest.mark.parametrize(
    "damage",
    [
        cut_short,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\x1f\x8b no gzip"),
        lambda path: path.write_bytes(b"PK\x03\x04 no zip"),
        other_json([]),
        other_json(None),
        other_json({"tokens": [1]}),
        other_json({"tokens": "text"}),
        other_json({"tokens": [2**40]}),
        other_json({"ending": "new"}),
        other_json({"turns": [{}]}),
        other_json({"turns": None}),
        other_json({"verdict": {"outcome": "new"}}),
        other_json({"verdict": None}),
        other_json({"tokens": [-1], "mask": [1], "logprobs": [0.0]}),
        other_json({"seconds": "1.5"}),
        other_text(b'"seconds": 83.2', b'"seconds": Infinity'),
        other_text(b'"seconds": 0.1', b'"seconds": "1.5"'),
        other_text(b'"seconds": 0.1', b'"seconds": NaN'),
        other_text(b'"exit_code": 0', b'"exit_code": null'),
        other_text(b'"output": "a\\n"', b'"output": null'),
        other_text(b'"timed_out": false', b'"timed_out": "no"'),
        other_text(b'"truncated_bytes": 0', b'"truncated_bytes": "x"'),
        other_text(b'"sampled_tokens": ', b'"sampled_tokens": 1.5, "was": '),
        other_text(b'"errors": []', b'"errors": ' + DEEP),
    ],
)
@pytest.mark.parametrize("name", ["trajectory.npz", "trajectory.json.gz"])
def test_a_damaged_recording_is_told_and_hides_no_other(
    writer: Writer, damage: Callable[[Path], None], name: str
) -> None:
    path = writer.save(0, 0)
    writer.save(0, 1)
    if name.endswith(".gz"):
        by_an_earlier_version(path, rollout(), FIXED)
    damage(path / name)
    viewer = EpisodeViewer(writer.folder.path, "g000000-a0")
    assert "its recording in g000000-a0 is damaged" in viewer.html and "is damaged" in str(viewer)
    Elements(viewer.html)
    assert main(["show", str(writer.folder.path), "--episode", "g000000-a0"]) == 0
    viewer.show("g000000-a1")
    assert "resolved, reward 1" in viewer.html


def test_without_patch_settings_task_or_log_the_rest_is_shown(writer: Writer) -> None:
    path = writer.save(0, 0)
    (path / "prediction.patch").unlink()
    (writer.folder.path / "config.json").unlink()
    writer.folder.events.unlink()
    for settings in ("", dumps(TrainingConfig.laptop(tasks="/gone.jsonl", tokenizer="/gone").to_json())):
        if settings:
            (writer.folder.path / "config.json").write_text(settings)
        viewer = EpisodeViewer(writer.folder.path)
        assert (
            "the patch cannot be read" in viewer.html
            and "Turn 1" in viewer.html
            and "Issue" not in viewer.html
        )
        assert "resolved, reward 1" in viewer.html and "Token ids" in viewer.html


def test_foreign_lines_and_settings_hide_no_attempt(writer: Writer) -> None:
    writer.save(0, 0)
    with writer.folder.events.open("ab") as file:
        file.write(b'{"event": "episode", "deep": ' + DEEP + b"}\n")
        odd = b'{"event": "episode", "phase": "run-1", "job": "j", "attempt": 0, "reward": 1, "outcome": "resolved", '
        file.write(odd + b'"group": Infinity}\n')
        file.write(odd + b'"group": "x"}\n')
    writer.save(0, 1)
    config = TrainingConfig.laptop().to_json()
    for settings in (
        b'{"tasks": ' + DEEP + b"}",
        *(dumps(config | {"tasks": v}).encode() for v in (5, [], "a\0")),
    ):
        (writer.folder.path / "config.json").write_bytes(settings)
        viewer = EpisodeViewer(writer.folder.path)
        assert viewer.names == ("g000000-a0", "g000000-a1") and "resolved, reward 1" in viewer.html


# -- Sizes -----------------------------------------------------------------------------------------


def test_a_small_attempt_makes_a_small_page(writer: Writer) -> None:
    writer.save(0, 0)
    viewer = EpisodeViewer(writer.folder.path)
    assert len(viewer.html) < 20_000 and len(str(viewer)) < 3000


@pytest.mark.slow
def test_however_long_an_attempt_is_its_page_is_short_and_says_what_it_leaves_out(writer: Writer) -> None:
    size = 131_072
    output = "".join(f"line {n} <&>\n" for n in range(90_000))
    calls = [("cat log", CommandResult(0, output, False, 7, 1.0))] * 3
    turns = tuple(turn(f"{'Hm. ' * 2000}</think>{call('cat log') * 3}", *calls) for _ in range(2))
    made = replace(
        rollout(*turns, patch=PATCH + b"+line <&>\n" * 100_000),
        tokens=np.full(size, encode("first")[0], np.int32),
        mask=np.arange(size) % 100 > 50,
        logprobs=-np.random.default_rng(0).exponential(1.0, size).astype(np.float32),
    )
    tests = {f"test_{n}": "PASSED" for n in range(5000)}
    writer.save(0, 0, made, Verdict(Outcome.UNRESOLVED, tests, "why " * 10_000, "log\n" * 200_000))
    viewer = EpisodeViewer(writer.folder.path)
    page = Elements(viewer.html)
    assert len(viewer.html) < 400_000 and len(str(viewer)) < 60_000
    assert page.text.count("viewer.show(whole=True) shows all") > 10
    assert re.search(r"1,[\d,]{7} characters left out", page.text) and "segments left out" in page.text
    assert "line 0 <&>" in page.text and "line 89999 <&>" in page.text, "both ends are kept"
    viewer.show(whole=True)
    assert "left out: viewer" not in viewer.html and viewer.html.count("log p ") > size * 0.48
    viewer.show("g000000-a0")
    assert len(viewer.html) < 400_000


# -- The row to choose from ------------------------------------------------------------------------


def test_the_chooser_filters_steps_and_follows(writer: Writer) -> None:
    failed = Verdict(Outcome.UNRESOLVED, {}, "no")
    for attempt, verdict in enumerate((FIXED, failed, FIXED, None)):
        writer.save(0, attempt, verdict=verdict)
    writer.save(0, 0, phase="evaluation-before", job="base")
    writer.log(0, 4, None, "infrastructure", reason="SandboxError")
    episodes, shown = EpisodeList(writer.folder.path), list[str]()

    def show(name: str) -> None:
        shown.append(name)
        row.follow(name)

    row = Chooser(episodes, "g000000-a0", show, lambda: shown.append("refresh"))
    assert [value for _, value in row.list.options] == list(episodes.names) and row.list.value == "g000000-a0"
    assert [label for label, _ in row.kinds.options] == [
        "all (6)", "resolved (3)", "not resolved (1)", "infrastructure faults (1)", "not graded (1)",
    ]  # fmt: skip
    row.list.value = "g000000-a1"
    assert shown == ["g000000-a1"]
    row.kinds.value = "resolved"  # which that one is not
    assert shown[-1] == "evaluation-before/g000000-a0" == row.list.value and len(row.list.options) == 3
    row.places.value = "training, train-job0"
    assert shown[-1] == "g000000-a0" and [v for _, v in row.list.options] == ["g000000-a0", "g000000-a2"]
    row.next.click()
    row.next.click()
    row.previous.click()
    assert shown[-3:] == ["g000000-a2", "g000000-a0", "g000000-a2"]
    row.renew.click()
    assert shown[-1] == "refresh"
    row.follow("g000000-a4")  # shown by a call: the filter gives way
    assert (row.places.value, row.kinds.value, row.list.value) == ("training, train-job0", "", "g000000-a4")


def test_of_many_attempts_a_part_is_listed_and_all_can_be_reached(writer: Writer) -> None:
    for number in range(MOST + 200):
        writer.log(number, 0, None, "infrastructure", reason="x")
    episodes = EpisodeList(writer.folder.path)
    row = Chooser(episodes, "g000400-a0", lambda name: row.follow(name), lambda: None)
    assert len(row.list.options) == MOST and row.list.value == "g000400-a0" and "of 500" in row.word.value
    row.list.value = episodes.names[-1]
    row.next.click()
    assert row.list.value == "g000000-a0" and row.list.options[0][1] == "g000000-a0"
    row.previous.click()
    assert row.list.value == "g000499-a0"


# -- Notebooks -------------------------------------------------------------------------------------

WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.mark.slow
def test_case_43_shown_in_place_by_call_and_by_list_and_one_page_is_left(writer: Writer) -> None:
    """GitHub shows no notebook with widget metadata: what stays needs none."""
    for attempt in range(3):
        writer.save(0, attempt)
    client, outputs = run_cells(
        f"from swegym_tutorial import EpisodeViewer\nviewer = EpisodeViewer({str(writer.folder.path)!r})\nviewer",
        "viewer.show('g000000-a1')",
        "viewer._row.list.value = 'g000000-a2'\nprint(viewer.name)",
        "viewer.show('g000000-a2')",  # what is shown already is not sent again
    )
    states = [m["data"]["state"] for m in client.sent if m["type"] == "comm_open"]
    assert {s["_model_module"] for s in states} == {"@jupyter-widgets/base", "@jupyter-widgets/controls"}
    assert [next(iter(o.get("data", {"stream": 0}))) for o in outputs] == [
        "text/plain",
        "text/html",
        "stream",
    ]
    widget, page, printed = outputs
    assert WIDGET in widget.data and set(page.data) == {"text/html", "text/plain"}
    assert "episode g000000-a2" in page.data["text/html"] and page.data["text/plain"].startswith("g000000-a2")
    assert "widget" not in page.data["text/html"] and printed.text == "g000000-a2\n"
    titles = [re.search(r'aria-label="episode (.*?)"', html) for html in client.shown("text/html")]
    assert [t and t[1] for t in titles] == ["g000000-a0", "g000000-a1", "g000000-a2"]


# Version skew, jupyter-widgets/ipywidgets#3823: without widgets, or with some that don't fit, the rest works.
@pytest.mark.slow
def test_case_41_without_widgets_there_is_a_list_and_the_page(writer: Writer) -> None:
    for attempt in range(25):
        writer.save(0, attempt)
    make = f"viewer = EpisodeViewer({str(writer.folder.path)!r}, chooser=%s)"
    client, outputs = run_cells(
        "import sys\nsys.modules['ipywidgets'] = None\nfrom swegym_tutorial import EpisodeViewer\n"
        + make % True,
        "viewer.show('g000000-a7')",
        "sys.modules['ipywidgets'] = __import__('types').ModuleType('ipywidgets')\n" + make % True,
        make % False,
    )
    kinds = [sorted(output.data) for output in outputs]
    assert kinds == [["text/plain"], ["text/html", "text/plain"]] * 2 + [["text/html", "text/plain"]]
    text = outputs[0].data["text/plain"]
    assert "no chooser here" in text and "viewer.show(name) does the same" in text
    assert "g000000-a19  resolved" in text and "5 more in viewer.names, to g000000-a24" in text
    assert "episode g000000-a7" in outputs[1].data["text/html"]
    assert not client.shown(WIDGET)


def test_without_ipython_it_is_printed(writer: Writer) -> None:
    writer.save(0, 0, rollout(patch=PATCH))
    script = """
import sys
sys.modules["IPython"] = sys.modules["ipywidgets"] = None
from swegym_tutorial import EpisodeViewer
viewer = EpisodeViewer(sys.argv[1])
print(viewer)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(writer.folder.path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    issue = TASK.problem_statement.splitlines()
    for word in ("g000000-a0", "resolved, reward 1", *issue, "turn 1", "$ ls", "+++ counter"):
        assert word in done.stdout


def test_the_command_shows_the_same_text_and_takes_the_same_names(
    writer: Writer, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = f"{EVIL}[bold] x[:100:2] :bug: a\tb"
    evil = turn("a</think>" + call("cat x"), ("cat x", CommandResult(0, odd, False, 0, 0.1)))
    for phase in ("run-1", "evaluation-before"):
        writer.save(0, 0, rollout(evil), phase=phase)
    for name in EpisodeList(writer.folder.path).names:
        assert main(["show", str(writer.folder.path), "--episode", name]) == 0
        printed = capsys.readouterr().out
        assert printed == f"{EpisodeViewer(writer.folder.path, name)}\n"
        assert (
            printed.startswith(f"{name}  ")
            and "\x1b" not in printed
            and "[bold] x[:100:2] :bug: a\tb" in printed
        )
    assert main(["show", str(writer.folder.path), "--episode", "g000001-a0"]) == 1
    assert "has no episode g000001-a0; near it: " in capsys.readouterr().err


def test_the_command_prints_a_patch_as_it_is(writer: Writer, capsys: pytest.CaptureFixture[str]) -> None:
    patch = PATCH + b"+\ty = x[:100:2] if d[:key:] else {':bug:': '[bold]x[/bold] d41:train:0/weights'}\n"
    writer.save(0, 0, rollout(patch=patch))
    assert main(["show", str(writer.folder.path), "--episode", "g000000-a0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [f"  {line}" for line in patch.decode().splitlines()] == printed[printed.index("patch") + 1 :][:8]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--episode", "g000000-a0", "--png", "x.png"], "leave out --png, --timeline and --habits"),
        (["--episode", "g000000-a0", "--habits", "x.png"], "leave out --png, --timeline and --habits"),
        (["--episode", "g000000-a0", "--timeline", "x.png"], "leave out --png, --timeline and --habits"),
        (["--episode", ""], "--episode wants the name of an attempt"),
        (["--episode", " "], "--episode wants the name of an attempt"),
        (
            ["--timeline", "x.pdf"],
            "--timeline: what is drawn is a PNG: name a file that ends in .png, not 'x.pdf'",
        ),
        (["--timeline", "x.svg"], "ends in .png, not 'x.svg'"),
        (["--timeline", ""], "ends in .png, not ''"),
        (["--png", "x.jpg"], "--png: what is drawn is a PNG"),
        (["--png", "x"], "ends in .png, not 'x'"),
    ],
)
def test_show_refuses_what_it_would_not_do(
    writer: Writer,
    arguments: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer.save(0, 0)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as ended:
        main(["show", str(writer.folder.path), *arguments])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out and why in printed.err
    assert sorted(tmp_path.rglob("*")) == before


def test_no_console_of_the_package_changes_what_it_prints() -> None:
    """By itself rich makes an emoji of x[:100:2], and a style of [bold]."""
    package = Path(swegym_tutorial.__file__).parent
    calls = [
        (path.name, ast.unparse(node))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "Console"
    ]
    assert len(calls) >= 4
    for name, text in calls:
        assert "emoji=False" in text and "markup=False" in text, f"{text} in {name}"
