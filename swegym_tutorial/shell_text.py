"""A bash command cut into the simple commands that it is made of, to be read and not to be run.

Nothing is expanded and nothing looked up: `$(cat a)` is a command `cat a`, and `for` has no loop. What bash would refuse
is read as far as it goes. Takes time in proportion to the text, whatever a model has written.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

LONGEST, MOST = 200_000, 300  # characters of a command, and simple commands in it, that are read
NESTED = 3  # levels of `bash -c`

_BLANK, _OPERATOR, _WORD, _LEFT_OPEN = range(1, 5)
_TOKEN = re.compile(
    # Blanks; and what says nothing: a comment, and arithmetic.
    r"((?:[ \t\r]|\\\n)+|#[^\n]*|\$?\(\((?:[^()]|\([^()]*\))*\)\))"
    r"|(&&|\|\||\|&|<<<|<<-?|&>>?|>>|>&|>\||<&|[;&|()<>\n])"
    r"|((?:\$'(?:[^'\\]|\\.)*'|'[^']*'|\"(?:[^\"\\]|\\.)*\"|\\.|[^\s'\"\\;&|()<>])+)"
    r"|(['\"].*)",
    re.DOTALL,
)
_QUOTED = re.compile(r"\$?'([^']*)'|\"((?:[^\"\\]|\\.)*)\"|\\(.)", re.DOTALL)
_IN_QUOTES = re.compile(r"\\([\\\"$`\n])")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_NUMBER = re.compile(r"\d+(?:\.\d+)?[smhd]?")
# What stands before a command and is none of its words. It may have options, of which some have a word behind them.
_BEFORE = re.compile(
    r"if|then|elif|else|while|until|do|!|\{|time|sudo|env|nohup|exec|command|nice|ionice|xargs|timeout|stdbuf"
)
_WITH_WORD = frozenset(("-s", "--signal", "-k", "-u", "-n", "-I", "-L", "-P", "-d"))
_RUNNERS = frozenset(("conda", "mamba", "micromamba", "poetry", "uv", "hatch", "pdm", "pipenv", "coverage"))
_CLOSING = frozenset(("done", "fi", "esac", "}"))  # words that end what is no command
_SHELLS = frozenset(("bash", "sh", "dash", "zsh"))
_PIPES = frozenset(("|", "|&"))
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
    guarded: bool = False  # it stands behind `&&`, and may not have run
    decides: bool = False  # only `&&` stands behind it: where the command's exit code is 0, so was its own
    last: bool = False  # the command's exit code is its own, if it has run

    @property
    def program(self) -> str:
        return name_of(self.words)


def name_of(words: tuple[str, ...]) -> str:
    """Return a program's name without its folder; "" for no program."""
    return words[0].rpartition("/")[2] if words else ""


@dataclass
class _Draft:
    words: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    behind: str = ""  # the operator that ends it

    @property
    def says_something(self) -> bool:
        return bool(self.writes or (self.words and not set(self.words) <= _CLOSING))


def simple_commands(command: str, depth: int = NESTED) -> list[Simple]:
    """Return the simple commands in the order in which they stand; those of `bash -c` and `find -exec` in place."""
    saying = (draft for draft in _drafts(command[:LONGEST]) if draft.says_something)
    drafts = list(itertools.islice(saying, MOST))
    whole = len(command) <= LONGEST and len(drafts) < MOST
    chain = end = len(drafts) - 1
    while chain > 0 and drafts[chain - 1].behind == "&&":
        chain -= 1
    found: list[Simple] = []
    source = before = ""
    for number, draft in enumerate(drafts):
        words = _without_prefix(draft.words)
        if before not in _PIPES:
            source = name_of(words)
        simple = Simple(
            words,
            source,
            tuple(draft.writes),
            "\n".join(draft.documents),
            piped=draft.behind in _PIPES,
            guarded=before == "&&",
            decides=whole and number >= chain,
            last=whole and number == end,
        )
        found += _within(simple, depth) or [simple]
        before = draft.behind
    return found


def _within(simple: Simple, depth: int) -> list[Simple]:
    """Return the commands that a command is only the frame of."""
    words = simple.words
    if simple.program in _SHELLS and depth:
        scripts = [
            after for word, after in itertools.pairwise(words) if word.startswith("-") and word.endswith("c")
        ]
        if not scripts and simple.document and all(word.startswith("-") for word in words[1:]):
            scripts = [simple.document]
        return [_framed(inner, simple) for inner in simple_commands("".join(scripts[:1]), depth - 1)]
    if simple.program == "find":
        for place, word in enumerate(words):
            if word in ("-exec", "-execdir", "-ok"):
                return [replace(simple, words=_without_prefix(list(words[place + 1 :])))]
    return []


def _framed(inner: Simple, frame: Simple) -> Simple:
    return replace(
        inner,
        writes=(*inner.writes, *frame.writes),
        piped=inner.piped or frame.piped,
        guarded=inner.guarded or frame.guarded,
        decides=inner.decides and frame.decides,
        last=inner.last and frame.last,
    )


def _without_prefix(words: list[str]) -> tuple[str, ...]:
    at, wrapped = 0, False
    while at < len(words):
        word = words[at]
        following = words[at + 1] if at + 1 < len(words) else ""
        if word in _RUNNERS and following == "run":
            at, wrapped = at + 1, True
        elif _BEFORE.fullmatch(word) and not (word == "command" and following.startswith("-")):
            wrapped = True
        elif wrapped and word in _WITH_WORD:
            at += 1
        elif not (_ASSIGNMENT.match(word) or (wrapped and (word.startswith("-") or _NUMBER.fullmatch(word)))):
            break
        at += 1
    return tuple(words[at:])


def _drafts(text: str) -> Iterator[_Draft]:
    draft, redirection = _Draft(), ""
    ends: list[str] = []  # words that end the here-documents of this line
    at = touching = 0  # touching: where the word before ends
    while at < len(text):
        token = _TOKEN.match(text, at)
        begin, at = at, token.end() if token else at + 1
        kind, said = (token.lastindex, token.group()) if token else (_BLANK, "")
        if kind in (_WORD, _LEFT_OPEN):
            _take(draft, redirection, _unquoted(said) if kind == _WORD else said[1:], ends)
            redirection, touching = "", at
        elif kind == _OPERATOR and said in _REDIRECTIONS:
            numbered = touching == begin and draft.words[-1:] in (["0"], ["1"], ["2"])
            redirection = "2>" if numbered and draft.words.pop() == "2" else said
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
