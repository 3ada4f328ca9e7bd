"""The world of the bundled tasks: small packages of documented functions, one or two of which have a bug.

Everything is drawn from a `random.Random`, so that a seed gives the same world everywhere. Knows nothing of git,
of the frozen set of tasks, or of policies; `generate` makes tasks of it, `demonstrations` makes training texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from .families import FAMILIES, ROW, Family
from .issues import PHRASINGS, Report

# fmt: off
VERBS = ["get", "find", "make", "check", "read", "merge", "apply", "adjust", "pick", "build"]
NOUNS = [
    "price", "rate", "count", "size", "width", "height", "depth", "score",
    "limit", "weight", "amount", "speed", "level", "stock", "order", "cost",
    "volume", "angle", "offset", "scale", "factor", "ticket", "room", "table",
    "budget", "radius", "pace", "margin", "profit", "signal", "period", "delay",
    "sample", "border", "target", "charge", "mass", "power", "load", "tax",
]
MODULES = ["cart", "store", "route", "sensor", "player", "garden", "engine", "ledger"]
# fmt: on
TWINS = 0.5  # share of worlds in which a second function has the same bug, which the issue doesn't mention


class Part(StrEnum):
    """Who may use a function name. No name belongs to two parts, so that a name learned by heart helps nobody."""

    TRAIN = "train"
    HELD_OUT = "held-out"  # of all three held-out splits
    DEMONSTRATIONS = "demonstrations"


def names_of(part: Part) -> list[str]:
    """Return the function names of a part: a quarter of all for training, one for what is held out, half to show.

    Along the diagonals of the table of verbs and nouns, so that every word occurs in every part.
    """
    owners = (Part.TRAIN, Part.HELD_OUT, Part.DEMONSTRATIONS, Part.DEMONSTRATIONS)
    return [
        f"{verb}_{noun}"
        for v, verb in enumerate(VERBS)
        for n, noun in enumerate(NOUNS)
        if owners[(v + n) % len(owners)] is part
    ]


@dataclass(frozen=True)
class Function:
    """A function of a package. `fragment` is the right one."""

    family: Family
    name: str
    a: str
    b: str
    fragment: str

    def source(self, fragment: str | None = None) -> str:
        """Return the function's text, with the right fragment or another one in place."""
        return self.family.source(self.name, self.a, self.b, self.fragment if fragment is None else fragment)

    @property
    def assertions(self) -> list[str]:
        """What its test asserts; only the right fragment passes."""
        found = []
        for call, expected in zip(self.family.calls, self.family.results(self.fragment), strict=True):
            equals = "is" if isinstance(expected, bool) else "=="
            found.append(f"assert {self.name}({call}) {equals} {expected!r}")
        return found

    def test(self) -> str:
        """Return the source of a pytest test."""
        return "".join([f"def test_{self.name}():\n", *(f"    {line}\n" for line in self.assertions)])


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    name: str
    docstring: str
    functions: tuple[Function, ...]

    @property
    def path(self) -> str:
        return f"src/{self.name}.py"

    @property
    def tests_path(self) -> str:
        return f"tests/test_{self.name}.py"

    def source(self, bugs: Mapping[str, str]) -> str:
        """Return the file's text; bugs: function name -> the wrong fragment that stands in it."""
        parts = [self.docstring, *(f.source(bugs.get(f.name)) for f in self.functions)]
        return "\n\n".join(parts)

    def line(self, function: Function) -> int:
        """Return the number, from 1, of the line in which a function's fragment stands."""
        before, _, _ = self.source({}).partition(function.source())
        return before.count("\n") + 1 + function.family.line

    def tests(self, left_out: str = "") -> str:
        """Return the text of its tests file, without the test of one function where named."""
        tested = [f for f in self.functions if f.name != left_out]
        head = f"from src.{self.name} import {', '.join(f.name for f in tested)}\n"
        if "ROW" in {call for f in tested for call in f.family.calls}:
            head += f"\nROW = {ROW!r}\n".replace("'", '"')
        return "\n\n".join([head, *(f.test() for f in tested)])


@dataclass(frozen=True)
class World:
    """One package with a bug in the target, which the issue names and no visible test runs.

    Beside it stands a sibling for which the buggy fragment is right, so that a replacement in the whole file
    breaks it: the line must be named. In some worlds a twin has the same bug, and only a visible test tells.
    """

    modules: tuple[Module, ...]
    module: Module  # the target's, the sibling's and the twin's
    target: Function
    sibling: Function
    twin: Function | None
    bug: str  # the fragment that stands in the target and in the twin
    issue: str

    @property
    def buggy(self) -> tuple[Function, ...]:
        return (self.target, self.twin) if self.twin else (self.target,)

    def sources(self, *, fixed: bool) -> dict[str, str]:
        """Return path -> text of the package's modules."""
        bugs = {} if fixed else {function.name: self.bug for function in self.buggy}
        return {module.path: module.source(bugs) for module in self.modules}


def make_world(
    rng: random.Random,
    family: Family,
    names: Sequence[str],
    target: str | None = None,
    *,
    phrasings: Sequence[str] = PHRASINGS,
    twin: bool | None = None,
    families: Sequence[Family] = FAMILIES,
) -> World:
    """Draw a package of two modules whose bug is of this family.

    names: the function names to draw from; target: the target's name, twin: whether it has one, where they are not
    to be drawn as well; families: of the functions that play no part.
    """
    unused = iter(rng.sample([name for name in names if name != target], 8))
    buggy = _draw(rng, family, target or next(unused))
    bug = rng.choice([fragment for fragment in family.fragments if fragment != buggy.fragment])
    sibling = _draw(rng, family, next(unused), bug)
    functions = [buggy, sibling]
    second = None
    if twin if twin is not None else rng.random() < TWINS:
        second = _draw(rng, family, next(unused), buggy.fragment)
        functions.append(second)
    elif rng.random() < 0.5:
        functions.append(next(_harmless(rng, families, unused, bug)))
    first, other = rng.sample(MODULES, 2)
    modules = [
        _module(rng, first, functions),
        _module(
            rng, other, [_draw(rng, rng.choice(families), next(unused)) for _ in range(rng.choice([1, 2]))]
        ),
    ]
    issue = _issue(rng, buggy, bug, phrasings)
    return World(tuple(sorted(modules, key=lambda m: m.name)), modules[0], buggy, sibling, second, bug, issue)


def _harmless(
    rng: random.Random, families: Sequence[Family], names: Iterator[str], bug: str
) -> Iterator[Function]:
    """Yield functions in which the buggy fragment does not occur: a replacement in the file leaves them alone."""
    name = next(names)
    while True:
        function = _draw(rng, rng.choice(families), name)
        if bug not in function.source():
            yield function


def _draw(rng: random.Random, family: Family, name: str, fragment: str | None = None) -> Function:
    a, b = rng.sample([noun for noun in NOUNS if noun != name.partition("_")[2]], 2)
    return Function(family, name, a, b, fragment or rng.choice(list(family.fragments)))


def _module(rng: random.Random, name: str, functions: list[Function]) -> Module:
    rng.shuffle(functions)
    detail = rng.choice(["", "\n\nPlain functions without side effects.\n"])  # moves the lines below it
    return Module(name, f'"""Helpers for the {name}.{detail}"""\n', tuple(functions))


def _issue(rng: random.Random, target: Function, bug: str, phrasings: Sequence[str]) -> str:
    family = target.family
    seen = list(zip(family.calls, family.results(bug), family.results(target.fragment), strict=True))
    call, got, expected = rng.choice([each for each in seen if each[1] != each[2]])
    want = rng.choice(family.fragments[target.fragment]).format(a=target.a, b=target.b)
    report = Report(target.name, want, call, repr(got), repr(expected))
    return report.worded(rng.choice(phrasings))
