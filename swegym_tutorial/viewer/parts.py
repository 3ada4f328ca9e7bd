"""An attempt taken apart for people: a turn's thought, words and calls, the tests, the tokens, and words on all of it.

What a page shows and what a terminal prints is the same, and is said here. All text comes out harmless: control
characters are made visible, and what is too long is cut in the middle. Knows nothing of HTML.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from ..habits import IN_SHORT, Habit, habits_of
from ..lines import duration
from ..rollout import Ending, Rollout, Turn
from ..sandbox import CommandResult
from ..tools import parse_tool_calls
from ..verdicts import Outcome
from .page import Decode, EpisodePage

ENDINGS = {
    Ending.FINAL: "ended with an answer",
    Ending.TURN_LIMIT: "ended by the limit of turns",
    Ending.CONTEXT_LIMIT: "ended by the limit of the context",
    Ending.GENERATION_LIMIT: "ended in a turn that used up its budget",
    Ending.INFRASTRUCTURE: "ended by an infrastructure fault",
}
# Characters that a browser or a terminal would obey and not show: control characters, and what turns text around.
_UNSEEN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    **{code: f"\\x{code:02x}" for code in range(0x7F, 0xA0)},
    **{c: f"\\u{c:04x}" for c in (0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF)},
}
LONGEST_GROUP = 8  # tokens that one character may be made of


def visible(text: str) -> str:
    """Return text with what cannot be shown, or would be obeyed, written out."""
    text = text.replace("\r\n", "\n").encode("utf-8", "backslashreplace").decode("utf-8")
    return text.translate(_UNSEEN)


def patch_text(patch: bytes) -> str:
    """Return a patch as text. Carriage returns and foreign bytes are shown, as they may be all that it changes."""
    return patch.decode(errors="backslashreplace").replace("\r", "␍").rstrip("\n")


@dataclass(frozen=True)
class Cut:
    """A text of which the middle may be left out."""

    head: str
    left_out: int = 0  # characters
    tail: str = ""


def cut(text: str, limit: int | None) -> Cut:
    """Return a text, visible, and of a long one about `limit` characters: two thirds from its start, one from its end."""
    if limit is None or len(text) <= limit + limit // 10:
        return Cut(visible(text))
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return Cut(visible(head), len(text) - len(head) - len(tail), visible(tail))


def fair_share(sizes: Sequence[int], total: int) -> int:
    """Return how much of each thing can be had of a total, where what the small ones leave goes to the large ones."""
    for n, size in enumerate(sorted(sizes)):
        if size * (len(sizes) - n) > total:
            return total // (len(sizes) - n)
        total -= size
    return max(sizes, default=0)


@dataclass(frozen=True)
class TurnParts:
    """One turn as people read it."""

    thought: str
    said: str  # beside thoughts and calls
    calls: tuple[
        tuple[str, CommandResult] | str, ...
    ]  # in order; a str: what the model was told of a broken call
    odd: bool  # whether there is more to see in the text as it was sampled


def turn_parts(turn: Turn) -> TurnParts:
    """Take a turn apart as the parser of calls does. A turn that was cut off is all thought, or all words."""
    thought, closed, answer = turn.text.partition("</think>")
    if not closed:
        thought, answer = "", turn.text
    said, *calls = answer.split("<tool_call>", 1)
    after = answer.rpartition("</tool_call>")[2].strip() if calls else ""
    ran = iter(zip(turn.commands, turn.results, strict=True))
    errors = iter(turn.errors)
    merged: list[tuple[str, CommandResult] | str] = []
    for call in parse_tool_calls(turn.text) if turn.commands or turn.errors else ():
        part = next(ran, None) if call.command is not None else next(errors, None)
        merged += [] if part is None else [part]
    merged += [*ran, *errors]  # of a parser of another day
    return TurnParts(
        thought=thought.removeprefix("<think>").strip(),
        said=said.strip(),
        calls=tuple(merged),
        odd=bool(turn.errors or after or (calls and not merged)),
    )


def exit_words(result: CommandResult) -> str:
    """Say how a command ended."""
    told = [f"exit code {result.exit_code}", f"{result.seconds:.2f} s"]
    if result.timed_out:
        told.insert(1, "timed out")
    if result.truncated_bytes:
        told.append(f"{result.truncated_bytes:,} bytes left out")
    return ", ".join(told)


def verdict_words(page: EpisodePage) -> str:
    """Say in short what the attempt was worth."""
    if page.verdict is not None and page.verdict.outcome is not Outcome.INFRASTRUCTURE:
        return f"{page.verdict.outcome.replace('_', ' ')}, reward {page.verdict.reward:.3g}"
    if page.outcome == "infrastructure":
        return "infrastructure fault, no reward"
    if page.outcome:
        return f"{page.outcome.replace('_', ' ')}, by the log"
    return "not graded" if page.rollout is not None else "unknown"


def facts(page: EpisodePage) -> list[str]:
    """Say in a few words each how the attempt went."""
    told = [page.where] if page.where else []
    if page.policy_version is not None:
        told.append(f"policy version {page.policy_version}")
    if (rollout := page.rollout) is not None:
        told += [
            f"{ENDINGS[rollout.ending]} after {count(len(rollout.turns), 'turn')}",
            f"{count(len(rollout.tokens), 'token')}, {int(rollout.mask.sum()):,} of them sampled",
            f"attempt {seconds(rollout.seconds)}",
        ]
    if page.verdict is not None and page.verdict.seconds >= 0.05:
        shared = ", shared with the same patch before" if page.verdict.shared else ""
        told.append(f"grading {seconds(page.verdict.seconds)}{shared}")
    if page.rollout is not None:
        habits = habits_of(page.rollout.turns).items()
        told.append(
            "habits: " + ", ".join(f"{'✓' if had else '✗'} {IN_SHORT[Habit(name)]}" for name, had in habits)
        )
    return told


def seconds(number: float) -> str:
    return f"{number:.1f} s" if number < 9.95 else duration(number)


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def verdict_notes(page: EpisodePage) -> list[str]:
    """Say what the tests don't: the verdict's own words, and where SWE-Gym alone would differ."""
    if page.verdict is None:
        return []
    told = [page.verdict.detail] if page.verdict.detail else []
    return told + (
        ["By itself, SWE-Gym would have said resolved."] if page.verdict.overruled else []
    )  # fmt: skip


@dataclass(frozen=True)
class ResultRow:
    """One hidden test."""

    name: str
    kind: str  # FAIL_TO_PASS | PASS_TO_PASS | "" where it is not known, or it is not among those that count
    status: str  # PASSED, FAILED, ..., or "no result"

    @property
    def passed(self) -> bool:
        return self.status == "PASSED"


def result_rows(page: EpisodePage) -> list[ResultRow]:
    """Return the hidden tests with their results: those that were to be mended first, then what went wrong."""
    told = dict(page.verdict.tests) if page.verdict is not None else {}
    kinds: dict[str, str] = {}
    if page.task is not None:
        kinds = dict.fromkeys(page.task.pass_to_pass, "PASS_TO_PASS")
        kinds |= dict.fromkeys(page.task.fail_to_pass, "FAIL_TO_PASS")
    names = dict.fromkeys([*kinds, *told])
    rows = [ResultRow(visible(n), kinds.get(n, ""), visible(told.get(n, "no result"))) for n in names]
    order = {"FAIL_TO_PASS": 0, "PASS_TO_PASS": 1, "": 2}
    return sorted(rows, key=lambda row: (order[row.kind], row.passed))


def results_words(rows: Sequence[ResultRow], graded: bool) -> str:
    """Say how many of the tests passed."""
    if not graded:
        return f"{count(len(rows), 'hidden test')}, not run"
    told = []
    for kind, some in groupby(rows, lambda row: row.kind):
        of_kind = list(some)
        passed = sum(row.passed for row in of_kind)
        told.append(f"{passed:,} of {len(of_kind):,} {kind or 'others'} passed")
    return ", ".join(told)


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens that were all sampled, or all given; start and end as in a slice."""

    sampled: bool
    start: int
    end: int
    turn: int  # counted from 1; 0: the prompt


def segments(rollout: Rollout) -> list[Segment]:
    """Cut an attempt's tokens where the mask changes."""
    found: list[Segment] = []
    at = turn = 0
    for sampled, run in groupby(rollout.mask.tolist()):
        length = sum(1 for _ in run)
        turn += sampled
        found.append(Segment(sampled, at, at + length, turn))
        at += length
    return found


@dataclass(frozen=True)
class Piece:
    """A sampled token, or a few that make one character together."""

    text: str
    logprob: float  # their sum


def pieces(rollout: Rollout, start: int, end: int, decode: Decode | None) -> Iterator[Piece]:
    """Yield the tokens of a slice with their texts, or without a tokenizer their ids."""
    ids, logprobs = rollout.tokens.tolist(), rollout.logprobs
    at = start
    while at < end:
        last = at + 1
        text = f"{ids[at]} "
        if decode is not None:
            text = decode(ids[at:last])
            if "\ufffd" in text:  # a part of a character, or a character that is none
                last, text = _whole(ids, at, end, decode, text)
        yield Piece(visible(text), float(logprobs[at:last].sum()))
        at = last


def _whole(ids: Sequence[int], at: int, end: int, decode: Decode, alone: str) -> tuple[int, str]:
    for last in range(at + 2, min(end, at + LONGEST_GROUP) + 1):
        if "\ufffd" not in (text := decode(ids[at:last])):
            return last, text
    return at + 1, alone


def given_text(rollout: Rollout, segment: Segment, decode: Decode | None) -> str:
    """Return the text of neighbouring tokens."""
    ids = rollout.tokens[segment.start : segment.end].tolist()
    return decode(ids) if decode is not None else " ".join(map(str, ids))


def chance(logprob: float) -> str:
    """Say a log-probability as a probability in percent."""
    if math.isnan(logprob):
        return "unknown"
    percent = 100 * math.exp(min(0.0, logprob))
    return f"{percent:.0f} %" if percent >= 9.5 else f"{percent:.1f} %" if percent >= 0.095 else "under 0.1 %"


def mask_words(page: EpisodePage, rollout: Rollout) -> str:
    """Say how many of the tokens the policy made, and whether they are for training: only where there is a reward."""
    rewarded = page.verdict is not None and page.verdict.outcome is not Outcome.INFRASTRUCTURE
    use = " and trained on" if page.training and rewarded else ""
    return f"{len(rollout.tokens):,}, of which {int(rollout.mask.sum()):,} are sampled{use}"


def tokens_words(rollout: Rollout, decode: Decode | None, most: int = 5) -> str:
    """Say how many tokens were sampled, how likely they were, and which the least; nan is unknown."""
    sampled = rollout.mask.nonzero()[0]
    if not len(sampled):
        return "no token was sampled"
    known = sampled[~np.isnan(rollout.logprobs[sampled])]
    logprobs = rollout.logprobs[known]
    told = count(len(sampled), "sampled token")
    if unknown := len(sampled) - len(known):
        told += (
            f", of {unknown:,} the probability is unknown" if len(known) else ", their probability is unknown"
        )
    if not len(known):
        return told
    told += f", mean log-probability {logprobs.mean():.3f}"
    least = [int(known[i]) for i in logprobs.argsort()[:most]]
    named = [
        f"{text_of_one(rollout, at, decode)} {chance(float(rollout.logprobs[at]))}"
        for at in least
        if rollout.logprobs[at] < math.log(0.9)
    ]
    if named:
        return f"{told}; the least likely: {', '.join(named)}"
    return f"{told}; all {'others ' if unknown else ''}were at least 90 % likely"


def text_of_one(rollout: Rollout, at: int, decode: Decode | None) -> str:
    token = int(rollout.tokens[at])
    return f"“{visible(decode([token])).replace(chr(10), '⏎')}”" if decode is not None else f"id {token}"
