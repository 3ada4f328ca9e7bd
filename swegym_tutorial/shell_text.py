"""A bash command cut into the simple commands that it is made of, to be read and not to be run.

Nothing is expanded and nothing looked up: `$(cat a)` is a command `cat a`, and `for` has no loop. What bash would refuse
is read as far as it goes. Takes time in proportion to the text, whatever a model has written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

LONGEST = 20_000  # characters of a command that are read
NESTED = 3  # levels of `bash -c`

_BLANK, _OPERATOR, _WORD, _LEFT_OPEN = range(1, 5)
_TOKEN = re.compile(
    r"((?:[ \t\r]|\\\n)+)"
    r"|(&&|\|\||\|&|<<<|<<-?|&>>?|>>|>&|>\||<&|[;&|()<>\n])"
    r"|((?:'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\;&|()<>])+)"
    r"|(['\"].*)",
    re.DOTALL,
)
_QUOTED = re.compile(r"'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)", re.DOTALL)
_IN_QUOTES = re.compile(r"\\([\\\"$`\n])")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_NUMBER = re.compile(r"\d+(?:\.\d+)?[smhd]?")
# What stands before a command and is none of its words; some take options.
_BEFORE = re.compile(
    r"if|then|elif|else|while|until|do|!|\{|time|sudo|env|nohup|exec|command|nice|ionice|xargs|timeout|stdbuf"
)
_INTO = frozenset((">", ">>", ">|", "&>", "&>>"))
_REDIRECTIONS = _INTO | {"<", "<<", "<<-", "<<<", ">&", "<&"}


@dataclass(frozen=True)
class Simple:
    """One program with its words."""

    words: tuple[str, ...]  # the program first, as it is called; quotes are gone
    source: str  # the program at the head of its pipeline
    writes: tuple[str, ...] = ()  # files that its output goes to
    document: str = ""  # its here-document
    piped: bool = False  # its output goes to another program
    last: bool = False  # the command's exit code is its own

    @property
    def program(self) -> str:
        return name_of(self.words)


def name_of(words: tuple[str, ...]) -> str:
    """Return a program's name without its folder; "" for no program."""
    return PurePosixPath(words[0]).name if words else ""


@dataclass
class _Draft:
    words: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    behind: str = ""  # the operator that ends it


def simple_commands(command: str, depth: int = NESTED) -> list[Simple]:
    """Return the simple commands in the order in which they stand; those of `bash -c` and `find -exec` in place."""
    drafts = [draft for draft in _drafts(command[:LONGEST]) if draft.words or draft.writes]
    found: list[Simple] = []
    source = ""
    for number, draft in enumerate(drafts):
        words = _without_prefix(draft.words)
        if number == 0 or drafts[number - 1].behind not in ("|", "|&"):
            source = name_of(words)
        piped = draft.behind in ("|", "|&")
        last = number == len(drafts) - 1
        whole = Simple(words, source, tuple(draft.writes), "\n".join(draft.documents), piped, last)
        found += _within(whole, depth) or [whole]
    return found


def _within(simple: Simple, depth: int) -> list[Simple]:
    """Return the commands that a command is only the frame of."""
    words = simple.words
    if simple.program in ("bash", "sh", "dash", "zsh") and depth:
        for option, script in itertools.pairwise(words):
            if option.startswith("-") and option.endswith("c"):
                return simple_commands(script, depth - 1)
    if simple.program == "find":
        for place, word in enumerate(words):
            if word in ("-exec", "-execdir", "-ok"):
                return [Simple(_without_prefix(list(words[place + 1 :])), simple.source, piped=simple.piped)]
    return []


def _without_prefix(words: list[str]) -> tuple[str, ...]:
    at, wrapped = 0, False
    while at < len(words):
        word = words[at]
        if _BEFORE.fullmatch(word):
            wrapped = True
        elif not (_ASSIGNMENT.match(word) or (wrapped and (word.startswith("-") or _NUMBER.fullmatch(word)))):
            break
        at += 1
    return tuple(words[at:])


def _drafts(text: str) -> Iterator[_Draft]:
    draft, redirection = _Draft(), ""
    ends: list[str] = []  # words that end the here-documents of this line
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        at = token.end() if token else at + 1
        kind, said = (token.lastindex, token.group()) if token else (_BLANK, "")
        if kind in (_WORD, _LEFT_OPEN):
            _take(draft, redirection, _unquoted(said) if kind == _WORD else said[1:], ends)
            redirection = ""
        elif kind == _OPERATOR and said in _REDIRECTIONS:
            stream = draft.words.pop() if draft.words and draft.words[-1] in ("0", "1", "2") else "1"
            redirection = "2>" if stream == "2" else said
        elif kind == _OPERATOR:
            if said == "\n" and ends:
                document, at = _document(text, at, ends)
                draft.documents.append(document)
                ends = []
            draft.behind, redirection = said, ""
            yield draft
            draft = _Draft()
    yield draft


def _take(draft: _Draft, redirection: str, word: str, ends: list[str]) -> None:
    """Put a word where it belongs."""
    if not redirection:
        draft.words.append(word)
    elif redirection in ("<<", "<<-"):
        ends.append(word)
    elif redirection in _INTO:
        draft.writes.append(word)
    elif redirection == "<<<":
        draft.documents.append(word)


def _document(text: str, at: int, ends: list[str]) -> tuple[str, int]:
    """Return the here-documents that begin at a place, and where the text goes on."""
    begin = at
    for end in ends:
        line = ""
        while at < len(text) and line != end:
            after = text.find("\n", at) + 1 or len(text)
            line, at = text[at:after].strip(), after
    return text[begin:at], at


def _unquoted(word: str) -> str:
    def plain(found: re.Match[str]) -> str:
        single, double, escaped = found.groups()
        return (
            single
            if single is not None
            else escaped
            if escaped is not None
            else _IN_QUOTES.sub(r"\1", double)
        )

    return _QUOTED.sub(plain, word)
