"""What a command does, by its program and words: does it edit, read, or run tests? Did those fail?

Made for what coding agents write. Knows nothing of attempts and habits.
"""

from __future__ import annotations

import itertools
import re
from typing import Protocol

from .shell_text import Simple, name_of


class Result(Protocol):
    @property
    def exit_code(self) -> int: ...
    @property
    def output(self) -> str: ...
    @property
    def timed_out(self) -> bool: ...


_READERS = re.compile(
    r"[efz]?grep|rg|ag|ack|b?cat|nl|head|tail|less|more|view|g?awk|sed|find|ls|tree|wc|diff"
)
_GIT_READS = frozenset(("grep", "show", "diff", "log", "blame", "ls-files"))
# Their output is text for a file; that of other programs is a log, which is no edit wherever it goes.
_WRITERS = frozenset(
    ("", ":", "cat", "echo", "printf", "sed", "awk", "gawk", "perl", "head", "tail", "tr", "sort")
)
_PYTHON = re.compile(r"python[\d.]*")
_WRITTEN = re.compile(  # in Python; the file's name, where it stands there
    r"\bopen\(\s{0,9}(?:[rf]{0,2}['\"](?P<name>[^'\"\n]{0,200})['\"]|[^\n]{0,200}?),\s{0,9}(?:mode=)?['\"][wax]"
    r"|(?:Path\(\s{0,9}['\"](?P<path>[^'\"\n]{0,200})['\"]\s{0,9}\))?\.(?:write_(?:text|bytes)\(|open\(\s{0,9}['\"][wax])"
    r"|\bfileinput\."
)
_READ = re.compile(r"\.read(?:_text|lines)?\(")
_ELSEWHERE = ("/tmp", "/dev/", "/var/", "/proc/", "~", "$")  # targets that are not in the repository
_SCRATCH = re.compile(r"(?:repro|debug|tmp|temp|scratch|demo|verify)\w*\.\w+")
_EDITORS = frozenset(("ed", "ex", "patch", "apply_patch", "applypatch", "str_replace", "str_replace_editor"))
_TRIES = frozenset(
    ("--check", "--stat", "--numstat", "--summary", "--dry-run")
)  # of editors that change nothing then
_TEST_PROGRAMS = frozenset(("pytest", "py.test", "tox", "nox", "nosetests", "nose2", "trial"))
_TEST_MODULES = _TEST_PROGRAMS | {"unittest", "doctest", "nose", "test"}
_TEST_FILES = re.compile(r"(?:check|run_?tests?|test_\w+|\w+_tests?)\.(?:py|sh)|run_?tests?")
_NO_TESTS = frozenset(("--version", "--help", "-h", "--collect-only", "--co"))
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_NOT_RUN = frozenset((4, 5, 126, 127))  # pytest's for no tests, bash's for no program
_NOT_RUN_WORDS = re.compile(r"no tests ran|command not found|No module named (?:pytest|nose|tox|unittest)\b")
_FAILURES = re.compile(
    r"\b[1-9]\d{0,6} (?:failed\b|errors?(?:,| in \d+\.| =))|^FAILED\b|^ERROR \S+(?:\.py|::)|^make: \*\*\*",
    re.MULTILINE,
)
_PASSES = re.compile(r"\b\d{1,7} passed\b|^Ran \d{1,7} tests?\b|^OK\b|tests pass", re.MULTILINE)


def edits(simple: Simple) -> bool:
    program, words = simple.program, simple.words
    if program in ("sed", "gsed"):
        return _in_place(words) or _writes(simple)
    if program == "perl":
        return any(re.match(r"-[0pnlaweEsT]*i", word) for word in words[1:]) or _writes(simple)
    if program == "git":
        return _git(words)[:1] in (("apply",), ("am",)) and not _TRIES & set(words)
    if program in _EDITORS:
        return not _TRIES & set(words)
    if program == "tee":
        targets = [word for word in words[1:] if not word.startswith("-")]
        return _by_a_writer(simple) and any(map(_inside, targets))
    if program in ("mv", "cp"):
        return len(words) > 2 and _inside(words[-1]) and (program == "mv" or not _inside(words[-2]))
    if _PYTHON.fullmatch(program) and any(map(_in_the_repository, _WRITTEN.finditer(_python_text(simple)))):
        return True
    return _writes(simple)


def _git(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return git's subcommand and what follows."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        at += 2 if words[at] in ("-C", "-c") else 1
    return words[at:]


def _in_place(words: tuple[str, ...]) -> bool:
    options = [word for word in words[1:] if word.startswith("-")]
    return any(re.match(r"-(?!-)[nErsz]*i|--in-place", option) for option in options)


def _writes(simple: Simple) -> bool:
    return _by_a_writer(simple) and any(map(_inside, simple.writes))


def _by_a_writer(simple: Simple) -> bool:
    return simple.source in _WRITERS or bool(_PYTHON.fullmatch(simple.source) and not runs_tests(simple))


def _inside(target: str) -> bool:
    """Whether a file is one of the repository's, and none that only tries something out."""
    return not (target.startswith(_ELSEWHERE) or _SCRATCH.fullmatch(name_of((target,))))


def _in_the_repository(written: re.Match[str]) -> bool:
    return _inside(written["name"] or written["path"] or "")


def _python_text(simple: Simple) -> str:
    words = simple.words
    script = words[words.index("-c") + 1 :][:1] if "-c" in words else ()
    return "\n".join((*script, simple.document))


def looks(simple: Simple) -> bool:
    if simple.program == "git":
        return not _GIT_READS.isdisjoint(_git(simple.words)[:1])
    if _PYTHON.fullmatch(simple.program):
        return bool(_READ.search(_python_text(simple)))
    return bool(_READERS.fullmatch(simple.program)) and not simple.document


def runs_tests(simple: Simple) -> bool:
    """Whether it runs tests. Not one that prints or installs what tests are run with."""
    program, words = simple.program, simple.words[1:]
    if _NO_TESTS & set(words):
        return False
    if _PYTHON.fullmatch(program):
        if "-m" in words:
            (module, *rest) = words[words.index("-m") + 1 :] or ("",)
            return module in _TEST_MODULES or (module in ("coverage", "django") and "test" in " ".join(rest))
        program, words = name_of(tuple(w for w in words if not w.startswith("-"))[:1]), words[1:]
    if program in ("make", "manage.py", "setup.py"):
        return bool({"test", "tests", "check"} & set(words))
    if program == "test":
        return "/" in simple.words[0]  # bin/test, and not the shell's own
    return program in _TEST_PROGRAMS or bool(_TEST_FILES.fullmatch(program))


def tests_failed(simple: Simple, result: Result) -> bool | None:
    """Whether tests failed, by the exit code where it is theirs, else by what was printed; None: they were not run."""
    if result.timed_out:
        return False
    output = _COLOUR.sub("", result.output)
    if _NOT_RUN_WORDS.search(output):
        return None
    if simple.decides and not simple.piped:
        if result.exit_code == 0:
            return False
        if result.exit_code in _NOT_RUN:
            return None
        if simple.last and not simple.guarded:
            return True
        if not (_FAILURES.search(output) or _PASSES.search(output)):
            return None  # what stands before it has failed, and said why
    return bool(_FAILURES.search(output))


def names_lines(simple: Simple) -> bool | None:
    """Whether a replacement names its lines, and does not go through a whole file; None: can't be told."""
    words = simple.words[1:]
    if simple.program == "perl":
        scripts = [word for word in words if re.match(r"\W*s\W", word)]
        return "$." in " ".join(scripts) if scripts else None
    if simple.program not in ("sed", "gsed") or not _in_place(simple.words) or {"-f", "--file"} & set(words):
        return None
    scripts = [after for word, after in itertools.pairwise(words) if word in ("-e", "--expression")]
    scripts += [word.partition("=")[2] for word in words if word.startswith("--expression=")]
    scripts += [word[2:] for word in words if word.startswith("-e") and len(word) > 3]
    scripts = scripts or [word for word in words if not word.startswith("-")][:1]
    return all(map(_addressed, scripts)) if scripts else None


_ADDRESS = r"(?:\d+|\$|/(?:[^/\\\n]|\\.)*/[IM]*|\\(?P<%s>[^\w\s])[^\n]*?(?P=%s))"
_SED = re.compile(  # one command of a script, with its address
    r"[\s;]*+(?P<address>"
    + _ADDRESS % ("a", "a")
    + r"(?:\s*+[,~]\s*+(?:[+~]?"
    + _ADDRESS % ("b", "b")
    + r"))?)?\s*+!?\s*+"
    r"(?:(?P<frame>[{}])|(?P<change>[sy])(?P<by>[^\w\s])(?:(?!(?P=by))[^\\\n]|\\.)*(?P=by)(?:(?!(?P=by))[^\\]|\\.)*(?P=by)[^\n;}]*"
    r"|(?P<text>[aicrRwW][^\n]*)|(?P<other>[a-zA-Z=:][^\n;}]*))"
)
_WHOLE = re.compile(r"1\s*,\s*\$|0\s*,.*|\d+\s*~.*|/[.^$]?\*?/[IM]*|(?P<first>\d+)\s*,\s*(?P<end>\d+)")
MANY_LINES = 50  # a range of so many is as good as the whole file


def _addressed(script: str) -> bool:
    """Whether each command of a sed script names a line, some lines, or what stands in them."""
    at, inside, found = 0, 0, False
    while at < len(script) and (command := _SED.match(script, at)):
        at = command.end()
        named = inside > 0 or _names_some(command["address"])
        if command["frame"] == "{":
            inside += named
        elif command["frame"] == "}":
            inside = max(0, inside - 1)
        elif not named and (command["change"] or (command["text"] or command["other"])[0] in "acdiD"):
            return False
        found = True
    return found


def _names_some(address: str | None) -> bool:
    if not address:
        return False
    whole = _WHOLE.fullmatch(address)
    if whole and whole["first"]:
        return int(whole["end"][:9]) - int(whole["first"][:9]) < MANY_LINES
    return whole is None
