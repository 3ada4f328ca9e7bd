"""A page on one attempt as plain text: the same as its HTML, for terminals and for readers that take no HTML.

Pure functions. Knows nothing of notebooks or files.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from ..rollout import Turn
from .page import Decode, EpisodePage
from .parts import (
    count,
    cut,
    exit_words,
    facts,
    mask_words,
    patch_text,
    result_rows,
    results_words,
    tokens_words,
    turn_parts,
    verdict_notes,
    verdict_words,
    visible,
)

WIDTH = 100  # characters that words are wrapped at
LONGEST = 2000  # characters of one text
TESTS = 20


def episode_text(page: EpisodePage, decode: Decode | None = None, whole: bool = False) -> str:
    """Return a page on an attempt. decode: what turns token ids into text. whole: leave nothing out."""
    lines = [f"{page.name}  {page.instance_id}  {verdict_words(page)}", *_wrapped("; ".join(facts(page)))]
    for note in [*page.notes, *verdict_notes(page)]:
        lines += _wrapped(_cut(note, whole))
    if page.task is not None:
        lines += ["", "issue", *_indented(_cut(page.task.problem_statement, whole))]
    if page.rollout is not None:
        for number, turn in enumerate(page.rollout.turns, 1):
            lines += ["", f"turn {number} ({count(turn.sampled_tokens, 'token')})", *_turn(turn, whole)]
        patch = _cut(patch_text(page.rollout.patch), whole)
        lines += ["", "patch", *_indented(patch or "the attempt changed nothing")]
        tokens = f"{mask_words(page, page.rollout)}; {tokens_words(page.rollout, decode)}"
        lines += ["", *_tests(page, whole), "", *_wrapped(f"tokens: {tokens}")]
    return visible("\n".join(lines))


def _turn(turn: Turn, whole: bool) -> Iterator[str]:
    parts = turn_parts(turn)
    if parts.thought:
        yield from _indented(_cut(parts.thought, whole), "  thinking: ")
    if parts.said:
        yield from _indented(_cut(parts.said, whole), "  ")
    for call in parts.calls:
        if isinstance(call, str):
            yield from _indented(_cut(call, whole), "  broken call: ")
            continue
        command, result = call
        yield from _indented(_cut(command, whole), "  $ ")
        yield from _indented(_cut(result.output.rstrip("\n"), whole) or "(no output)", "  | ", "  | ")
        yield f"  {exit_words(result)}"


def _tests(page: EpisodePage, whole: bool) -> Iterator[str]:
    rows = result_rows(page)
    graded = page.verdict is not None and bool(page.verdict.tests)
    yield f"tests: {results_words(rows, graded) if rows else 'none ran'}"
    shown = rows if whole else rows[:TESTS]
    for row in shown:
        yield f"  {row.status:9} {row.kind:12} {row.name}"
    if left := len(rows) - len(shown):
        yield f"  [... {left:,} more]"


def _cut(text: str, whole: bool) -> str:
    part = cut(text, None if whole else LONGEST)
    return (
        f"{part.head}\n[... {part.left_out:,} characters left out]\n{part.tail}"
        if part.left_out
        else part.head
    )


def _indented(text: str, first: str = "  ", others: str | None = None) -> list[str]:
    """Return lines, each behind a margin; the first may have one that says what it is."""
    margin = " " * len(first) if others is None else others
    head, *rest = text.split("\n")
    return [first + head, *(margin + line for line in rest)]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False) if text else []
