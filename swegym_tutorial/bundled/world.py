"""The world of the bundled tasks: small packages of one-line functions, one of which has a bug.

Everything is drawn from a `random.Random`, so that a seed gives the same world everywhere. Knows nothing of git,
of the frozen set of tasks, or of policies; `generate` makes tasks of it, `demonstrations` makes training texts.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# fmt: off
VERBS = ["get", "find", "make", "check", "read", "merge", "apply", "adjust"]
NOUNS = [
    "price", "rate", "count", "size", "width", "height", "depth", "score",
    "limit", "weight", "amount", "speed", "level", "stock", "order", "cost",
    "volume", "angle", "offset", "scale", "factor", "ticket", "room", "table",
    "budget", "radius", "length", "margin", "profit", "signal", "period", "delay",
]
MODULES = ["cart", "store", "route", "sensor", "player", "garden", "engine", "ledger"]
# fmt: on


class Part(StrEnum):
    """Who may use a function name. No name belongs to two parts, so that a name learned by heart helps nobody."""

    TRAIN = "train"
    HELD_OUT = "held-out"
    DEMONSTRATIONS = "demonstrations"


def names_of(part: Part) -> list[str]:
    """Return the function names of a part: a quarter of all for each split, half for the demonstrations.

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
class Family:
    """One kind of function, and so one kind of bug: the wrong fragment in its one expression.

    The fragments keep the blanks around them, so that `sed` can replace each without touching anything else in
    its line, and no two of them give the same results for all calls.
    """

    name: str
    parameters: str
    expression: str
    fragments: Mapping[str, str]  # fragment -> what the function should return, in words
    calls: tuple[str, ...]  # the arguments that the tests pass


ARITHMETIC = Family(
    "arith",
    "{a}, {b}",
    " {a}{fragment}{b}",
    {" + ": "{a} plus {b}", " - ": "{a} minus {b}", " % ": "{a} modulo {b}"},  # " * " is a pattern to sed
    ("7, 3", "12, 5"),
)
COMPARISON = Family(
    "cmp",
    "{a}, {b}",
    " {a}{fragment}{b}",
    {
        " < ": "whether {a} is below {b}",
        " > ": "whether {a} is above {b}",
        " <= ": "whether {a} is at most {b}",
        " >= ": "whether {a} is at least {b}",
    },
    ("3, 3", "2, 3", "4, 3"),
)
BUILTIN = Family(
    "builtin",
    "{a}",
    "{fragment}({a})",
    {
        " max": "the largest of {a}",
        " min": "the smallest of {a}",
        " sum": "the total of {a}",
        " len": "the number of items in {a}",
    },
    ("[3, 9, 2]", "[8, 5, 7, 6]"),
)
CONSTANT = Family(
    "const", "{a}", " {a} *{fragment}", {f" {n}": f"{{a}} scaled by {n}" for n in range(2, 10)}, ("10", "21")
)
FAMILIES = (ARITHMETIC, COMPARISON, BUILTIN, CONSTANT)


@dataclass(frozen=True)
class Function:
    """A function of two lines. `fragment` is the right one."""

    family: Family
    name: str
    a: str
    b: str
    fragment: str

    def source(self, fragment: str | None = None) -> str:
        """Return the function's two lines, with the right fragment or another one in place."""
        words = {"a": self.a, "b": self.b, "fragment": self.fragment if fragment is None else fragment}
        head = f"def {self.name}({self.family.parameters.format(**words)}):"
        return f"{head}\n    return{self.family.expression.format(**words)}\n"

    @property
    def behaviour(self) -> str:
        """What the function should return, in words."""
        return self.family.fragments[self.fragment].format(a=self.a, b=self.b)

    def test(self) -> str:
        """Return the source of a pytest test that only the right fragment passes."""
        namespace: dict[str, object] = {}
        exec(self.source(), namespace)
        lines = [f"def test_{self.name}():"]
        for call in self.family.calls:
            expected = eval(f"{self.name}({call})", namespace)
            equals = "is" if isinstance(expected, bool) else "=="
            lines.append(f"    assert {self.name}({call}) {equals} {expected!r}")
        return "\n".join(lines) + "\n"


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

    def tests(self, left_out: str = "") -> str:
        """Return the text of its tests file, without the test of one function where named."""
        tested = [f for f in self.functions if f.name != left_out]
        head = f"from src.{self.name} import {', '.join(f.name for f in tested)}\n"
        return "\n\n".join([head, *(f.test() for f in tested)])


@dataclass(frozen=True)
class World:
    """One package with one bug. Beside the target stands a sibling for which the buggy fragment is right.

    So a replacement in the whole file breaks the sibling: the target's line must be found and named.
    """

    modules: tuple[Module, ...]
    module: Module  # the target's
    target: Function
    bug: str  # the fragment that stands in the target

    @property
    def issue(self) -> str:
        return f"Function {self.target.name} should return {self.target.behaviour}."

    @property
    def line(self) -> int:
        """The number of the buggy line, counted from 1."""
        before, _, _ = self.module.source({}).partition(self.target.source())
        return before.count("\n") + 2

    def sources(self, *, fixed: bool) -> dict[str, str]:
        """Return path -> text of the package's modules."""
        bugs = {} if fixed else {self.target.name: self.bug}
        return {module.path: module.source(bugs) for module in self.modules}


def make_world(rng: random.Random, family: Family, names: list[str], target: str | None = None) -> World:
    """Draw a package of two or three modules whose bug is of this family.

    names: the function names to draw from; target: the target's name, where it is not to be drawn as well.
    """
    unused = rng.sample([name for name in names if name != target], len(names) - (target is not None))
    buggy = _draw(rng, family, target or unused.pop())
    bug = rng.choice([fragment for fragment in family.fragments if fragment != buggy.fragment])
    sibling = _draw(rng, family, unused.pop(), bug)
    others = [_draw(rng, rng.choice(FAMILIES), unused.pop()) for _ in range(rng.choice([0, 1]))]
    first = _module(rng, [buggy, sibling, *others], MODULES)
    modules = [first]
    for _ in range(rng.choice([1, 2])):
        functions = [_draw(rng, rng.choice(FAMILIES), unused.pop()) for _ in range(rng.choice([2, 3]))]
        modules.append(
            _module(rng, functions, [m for m in MODULES if m not in {known.name for known in modules}])
        )
    rng.shuffle(modules)
    return World(tuple(modules), first, buggy, bug)


def _draw(rng: random.Random, family: Family, name: str, fragment: str | None = None) -> Function:
    a, b = rng.sample([noun for noun in NOUNS if noun != name.partition("_")[2]], 2)
    return Function(family, name, a, b, fragment or rng.choice(list(family.fragments)))


def _module(rng: random.Random, functions: list[Function], names: list[str]) -> Module:
    name = rng.choice(names)
    rng.shuffle(functions)
    detail = rng.choice(["", "\n\nPlain functions without side effects.\n"])  # moves the lines below it
    return Module(name, f'"""Helpers for the {name}.{detail}"""\n', tuple(functions))
