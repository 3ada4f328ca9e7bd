"""A page on one attempt as HTML: issue, turns, patch, tests and tokens, with nothing that needs a living kernel.

Pure functions. All that models, tasks and commands have written is escaped, and stands in <pre> or <code>, where no
notebook looks for formulas. Knows nothing of notebooks or files.
"""

from __future__ import annotations

import html
import math

from ..rollout import Ending, Rollout, Turn
from .page import Decode, EpisodePage
from .parts import (
    Cut,
    ResultRow,
    Segment,
    chance,
    count,
    cut,
    exit_words,
    facts,
    fair_share,
    given_text,
    mask_words,
    patch_text,
    pieces,
    result_rows,
    results_words,
    segments,
    tokens_words,
    turn_parts,
    verdict_notes,
    verdict_words,
    visible,
)
from .style import BAD, GOOD, MINUS, NEITHER, PLUS, ROOT, SAMPLED, SHADES, style

PAGE = 120_000  # characters of a page's turns, of which each text has its share
LONGEST, SHORTEST = 6000, 600  # characters of one text that are shown at most, and at least
OPEN_LINES, OPEN = 12, 1200  # lines, characters of a long text that are seen at once
PATCH = 20_000  # characters
PATCH_LINES, OPEN_PATCH = 300, 40  # lines in all, and that are seen at once
GIVEN = 700  # characters of given tokens between two turns
COLOURED = 1000  # sampled tokens of a page that are coloured one by one
SEGMENTS = 120  # stretches of sampled and of given tokens
TESTS = 60  # rows
LEFT = ' style="text-align:left"'  # a place that drops our rules may have its own
CUT_OFF = (Ending.CONTEXT_LIMIT, Ending.GENERATION_LIMIT)  # the last turn may have no end
BORDERS = (0.9, 0.5, 0.1, 0.01)  # probabilities where the next shade begins


def episode_html(
    page: EpisodePage, decode: Decode | None = None, why_not: str = "", whole: bool = False
) -> str:
    """Return a page on an attempt.

    decode: what turns token ids into text; without it ids are shown, and `why_not` is told. whole: leave nothing out,
    however much it is; else about 200 KB of HTML are the most.
    """
    parts = [_head(page, whole)]
    if page.task is not None:
        parts.append(_issue(page.task.problem_statement, whole))
    if (rollout := page.rollout) is not None:
        parts += [_turns(rollout, whole), _patch(rollout.patch, whole), _tests(page, whole)]
        parts.append(_tokens(page, rollout, decode, why_not, whole))
    body = "\n".join(parts)
    # The classes tell MathJax, old and new, to look for no formulas here.
    label = f'role="region" aria-label="episode {_escaped(page.name)}"'
    return f'<div class="{ROOT} tex2jax_ignore mathjax_ignore" {label}>\n{style()}\n{body}\n</div>'


def _escaped(text: str) -> str:
    return html.escape(visible(text))


def _head(page: EpisodePage, whole: bool) -> str:
    words = verdict_words(page)
    good = page.verdict is not None and page.verdict.outcome == "resolved"
    bad = page.verdict is not None and not good
    kind, sign, ground = ("good", "✓ ", GOOD) if good else ("bad", "✗ ", BAD) if bad else ("", "", NEITHER)
    lines = [
        f"<h4>{_escaped(page.name)} <small>{_escaped(page.instance_id)}</small> "
        f'<span class="pill {kind}" style="{ground}">{sign}{_escaped(words)}</span></h4>',
        f'<p class="facts">{_escaped(" · ".join(facts(page)))}</p>',
    ]
    notes = [*page.notes, *verdict_notes(page)]
    return "\n".join(lines + [f'<p class="note">{_quoted(note, whole)}</p>' for note in notes])


def _quoted(text: str, whole: bool = False) -> str:
    """Return words from outside within a line, where nobody looks for formulas."""
    shown = html.escape(_whole_of(cut(text, None if whole else LONGEST)), quote=False)
    return f'<span class="tex2jax_ignore mathjax_ignore">{shown}</span>'


def _whole_of(part: Cut) -> str:
    return f"{part.head}{_left_out(part.left_out)}{part.tail}" if part.left_out else part.head


def _left_out(number: int, what: str = "character") -> str:
    return f"\n[… {count(number, what)} left out: viewer.show(whole=True) shows all …]\n"


def text_block(text: str, kind: str = "", limit: int | None = LONGEST) -> str:
    """Return a text as it is; what is behind the first lines of a long one is folded, and its middle may be left out."""
    shown = _whole_of(cut(text.strip("\n"), limit))
    head, rest = _opening(shown)
    block = f'<pre class="{kind}">{html.escape(head, quote=False)}</pre>'
    if rest:
        more = (
            count(rest.count("\n") + 1, "more line") if "\n" in head else count(len(rest), "more character")
        )
        block += _folded(more, f'<pre class="{kind}">{html.escape(rest, quote=False)}</pre>')
    return block


def _opening(text: str) -> tuple[str, str]:
    """Cut a long text behind what is seen at once: at a line's end where there is one."""
    lines = text.split("\n")
    if len(lines) <= OPEN_LINES + 3 and len(text) <= OPEN + 400:
        return text, ""
    head = "\n".join(lines[:OPEN_LINES])
    if len(head) > OPEN:
        at = head.rfind("\n", OPEN // 2, OPEN)
        head = head[: at if at > 0 else OPEN]
    return head, text[len(head) :].removeprefix("\n")


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{html.escape(title, quote=False)}</summary>{body}</details>"


def _part(title: str, words: str, body: str, *, folded: bool) -> str:
    """Return one of the page's parts under its heading; what is folded can be opened."""
    small = f" <small>{_escaped(words)}</small>" if words else ""
    if folded:
        head = f'<summary><b role="heading" aria-level="5">{title}</b>{small}</summary>'
        return f'<details class="part">{head}\n<div>{body}</div>\n</details>'
    return f'<section aria-label="{title.lower()}"><h5>{title}{small}</h5>\n{body}\n</section>'


def _issue(text: str, whole: bool) -> str:
    return _part("Issue", "", text_block(text, "prose", None if whole else LONGEST), folded=False)


def _turns(rollout: Rollout, whole: bool) -> str:
    sizes = [len(text) for t in rollout.turns for text in (t.text, *(result.output for result in t.results))]
    limit = None if whole else max(SHORTEST, min(LONGEST, fair_share(sizes, PAGE)))
    last = len(rollout.turns) if rollout.ending in CUT_OFF else 0
    turns = [_turn(number, turn, limit, number == last) for number, turn in enumerate(rollout.turns, 1)]
    body = "\n".join(turns) or "<p>No turn was sampled.</p>"
    return _part("Turns", "", body, folded=False)


def _turn(number: int, turn: Turn, limit: int | None, unended: bool) -> str:
    parts = turn_parts(turn)
    rows: list[str] = []
    if parts.thought:
        rows.append(_row("thinking", text_block(parts.thought, "thought", limit)))
    if parts.said:
        rows.append(
            _row(
                "cut off" if unended and not parts.calls else "said" if parts.calls else "answer",
                text_block(parts.said, "prose", limit),
            )
        )
    for call in parts.calls:
        if isinstance(call, str):
            rows.append(_row("broken call", text_block(call, "", limit), wrong=True))
            continue
        command, result = call
        output = text_block(result.output, "", limit) if result.output.strip() else "<small>no output</small>"
        wrong = bool(result.exit_code or result.timed_out)
        rows += [
            _row("command", text_block(command, "command", limit)),
            _row(exit_words(result), output, wrong),
        ]
    if parts.odd:
        rows.append(_row("as sampled", _folded("the turn's whole text", text_block(turn.text, "", limit))))
    head = f"<b>Turn {number}</b> <small>{count(turn.sampled_tokens, 'token')}</small>"
    return f'<section class="turn" aria-label="turn {number}">{head}\n{"".join(rows)}</section>'


def _row(name: str, body: str, wrong: bool = False) -> str:
    words = html.escape(name).replace(", ", "<br>")
    named = f'<b class="wrong">{words}</b>' if wrong else f"<small>{words}</small>"
    return f'<div class="row">{named}<div>{body}</div></div>\n'


def _patch(patch: bytes, whole: bool) -> str:
    text = patch_text(patch)
    if not text.strip():
        return _part("Patch", "", "<small>The attempt changed nothing.</small>", folded=False)
    counts = [sum(kind == sign for kind, _ in _patch_lines(text)) for sign in ("file", "plus", "minus")]
    lines = _patch_lines(_whole_of(cut(text, None if whole else PATCH)))
    if not whole and len(lines) > PATCH_LINES:
        middle = ("head", _left_out(len(lines) - PATCH_LINES, "line").strip())
        lines = [*lines[: PATCH_LINES * 2 // 3], middle, *lines[-PATCH_LINES // 3 :]]
    body = _diff(lines[:OPEN_PATCH])
    if rest := lines[OPEN_PATCH:]:
        body += _folded(count(len(rest), "more line"), _diff(rest))
    words = f"{count(counts[0], 'file')}, +{counts[1]:,} −{counts[2]:,}"
    return _part("Patch", words, body, folded=False)


def _patch_lines(text: str) -> list[tuple[str, str]]:
    """Return each line of a diff with its kind: file, head, hunk, plus, minus, or "" for what stays."""
    found, inside = [], False
    for line in text.split("\n"):
        if line.startswith("diff --git "):
            inside, kind = False, "file"
        elif line.startswith("@@"):
            inside, kind = True, "hunk"
        elif inside:
            kind = {"+": "plus", "-": "minus"}.get(line[:1], "")
        else:
            kind = "head"
        found.append((kind, line))
    return found


def _diff(lines: list[tuple[str, str]]) -> str:
    grounds = {"plus": f' style="{PLUS}"', "minus": f' style="{MINUS}"'}
    shown = (
        f'<span class="line {kind}"{grounds.get(kind, "")}>{html.escape(line, quote=False)}\n</span>'
        for kind, line in lines
    )
    return f"<pre>{''.join(shown)}</pre>"


def _tests(page: EpisodePage, whole: bool) -> str:
    rows = result_rows(page)
    graded = page.verdict is not None and bool(page.verdict.tests)
    body = _table(rows if whole else rows[:TESTS])
    if len(rows) > TESTS and not whole:
        body += f"<p><small>{_left_out(len(rows) - TESTS, 'test').strip()}</small></p>"
    if page.verdict is not None and page.verdict.log.strip():
        log = page.verdict.log
        body += _folded(
            "what the tests printed; the grader's own tests of known results are among them",
            text_block(log, "", None if whole else LONGEST),
        )
    words = results_words(rows, graded) if rows else "no tests ran"
    return _part("Tests", words, body, folded=len(rows) > 12 and all(row.passed for row in rows))


def _table(rows: list[ResultRow]) -> str:
    if not rows:
        return ""
    lines = "".join(
        f"<tr><td{LEFT}>{'✓' if row.passed else '✗' if row.status != 'no result' else '–'} {_quoted(row.status)}</td>"
        f"<td{LEFT}><code>{html.escape(row.name)}</code></td><td{LEFT}>{row.kind}</td></tr>"
        for row in rows
    )
    heads = "".join(f'<th scope="col"{LEFT}>{name}</th>' for name in ("result", "test", "kind"))
    return f"<table><tr>{heads}</tr>{lines}</table>"


def _tokens(page: EpisodePage, rollout: Rollout, decode: Decode | None, why_not: str, whole: bool) -> str:
    found = segments(rollout)
    shown = found if whole or len(found) <= SEGMENTS else found[: SEGMENTS // 2] + found[-SEGMENTS // 2 :]
    sizes = [segment.end - segment.start for segment in shown if segment.sampled]
    each = None if whole else max(1, fair_share(sizes, COLOURED))
    rows = [f"<p>{_quoted(tokens_words(rollout, decode))}.</p>", _key()]
    if decode is None:
        rows.append(f'<p class="note">Token ids, as there is no text: {_quoted(why_not)}</p>')
    blocks = [_segment(rollout, segment, decode, each) for segment in shown]
    if left := len(found) - len(shown):
        blocks.insert(SEGMENTS // 2, _row("", f"<small>{_left_out(left, 'segment')}</small>"))
    rows.append("".join(blocks))
    return _part("Tokens", mask_words(page, rollout), "\n".join(rows), folded=True)


def _key() -> str:
    names = [
        "at least 90 %", "under 90 %", "<b>under 50 %</b>", "<b>under 10 %</b>", "<b>under 1 %</b>",
    ]  # fmt: skip
    shades = "".join(
        f'<span style="{ground}">{name}</span> ' for name, ground in zip(names, SHADES, strict=True)
    )
    return (
        '<p class="key"><span class="given">given: prompt and outputs</span> '
        f'<span class="sampled" style="{SAMPLED}">sampled by the policy</span> each token by its probability p: '
        f"{shades}</p>"
    )


def _segment(rollout: Rollout, segment: Segment, decode: Decode | None, most: int | None) -> str:
    size = count(segment.end - segment.start, "token")
    if not segment.sampled:
        name = "prompt" if segment.turn == 0 else "given"
        text = _whole_of(cut(given_text(rollout, segment, decode), None if most is None else GIVEN))
        return _row(f"{name}, {size}", f'<pre class="given">{html.escape(text, quote=False)}</pre>')
    end = segment.end if most is None else min(segment.end, segment.start + most)
    body = "".join(_token(piece.text, piece.logprob) for piece in pieces(rollout, segment.start, end, decode))
    if end < segment.end:
        body += _left_out(segment.end - end, "token")
    return _row(f"turn {segment.turn}, {size}", f'<pre class="sampled" style="{SAMPLED}">{body}</pre>')


def _token(text: str, logprob: float) -> str:
    shade = 0 if math.isnan(logprob) else sum(logprob < math.log(border) for border in BORDERS)
    title = f"p {chance(logprob)}, log p {logprob:.3f}"
    tag = "b" if shade > 1 else "span"
    mark = f' style="{SHADES[shade]}"' if shade else ""
    return f'<{tag}{mark} title="{title}">{html.escape(text, quote=False)}</{tag}>'
