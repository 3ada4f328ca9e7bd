"""The families of functions, and so of bugs: each has one place in which a wrong fragment may stand.

A family tells how its functions look, what each fragment makes them do in the words of an issue, and which calls
its tests make. Knows nothing of files, repositories or policies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

KEYS = ["owner", "color", "email", "brand", "phone", "grade"]
ROW = {key: number for number, key in enumerate(KEYS, start=1)}  # what the tests of dictionaries pass


@dataclass(frozen=True)
class Family:
    """One kind of function. {a} and {b} stand for parameters, {x} for the fragment: once, in one line.

    No fragment has a character that is a pattern to `sed`, and no two give the same results for all calls.
    """

    name: str
    parameters: str
    docstring: str
    body: str
    fragments: Mapping[str, tuple[str, ...]]  # fragment -> what the function should return, in words
    calls: tuple[str, ...]  # the arguments that the tests pass

    def source(self, name: str, a: str, b: str, fragment: str) -> str:
        """Return a function's text: its head, one line of docstring, its body."""
        text = f'def {name}({self.parameters}):\n    """{self.docstring}"""\n{self.body}\n'
        return text.format(a=a, b=b, x=fragment)

    @property
    def line(self) -> int:
        """The fragment's line, counted from the head's, which is 0."""
        before, _, _ = f"{self.parameters}\n\n{self.body}".partition("{x}")
        return before.count("\n")

    @cache  # noqa: B019 (there are a dozen families)
    def results(self, fragment: str) -> tuple[object, ...]:
        """Return what the calls give with a fragment in place, whatever the names."""
        namespace: dict[str, object] = {"ROW": ROW}
        exec(self.source("function", "a", "b", fragment), namespace)
        return tuple(eval(f"function({call})", namespace) for call in self.calls)

    def __hash__(self) -> int:
        return hash(self.name)


ARITHMETIC = Family(
    "arithmetic",
    "{a}, {b}",
    "Combine {a} with {b}.",
    "    return {a}{x}{b}",
    {  # " * " is a pattern to sed
        " + ": ("{a} plus {b}", "{b} added to {a}"),
        " - ": ("{a} minus {b}", "{b} taken from {a}"),
        " % ": ("{a} modulo {b}", "the rest of {a} by {b}"),
    },
    ("7, 3", "12, 5"),
)
COMPARISON = Family(
    "comparison",
    "{a}, {b}",
    "Compare {a} with {b}.",
    "    return {a}{x}{b}",
    {
        " < ": ("whether {a} is below {b}", "True for {a} smaller than {b}"),
        " > ": ("whether {a} is above {b}", "True for {a} larger than {b}"),
        " <= ": ("whether {a} is at most {b}", "True for {a} no larger than {b}"),
        " >= ": ("whether {a} is at least {b}", "True for {a} no smaller than {b}"),
    },
    ("3, 3", "2, 3", "4, 3"),
)
BUILTIN = Family(
    "builtin",
    "{a}",
    "Make one number of {a}.",
    "    return{x}({a})",
    {
        " max": ("the largest of {a}", "the highest item of {a}"),
        " min": ("the smallest of {a}", "the lowest item of {a}"),
        " sum": ("the total of {a}", "all of {a} added up"),
        " len": ("the number of items in {a}", "how many items {a} has"),
    },
    ("[3, 9, 2]", "[8, 5, 7, 6]"),
)
CONSTANT = Family(
    "constant",
    "{a}",
    "Scale {a}.",
    "    scaled = {a} *{x}\n    return scaled",
    {f" {n}": (f"{{a}} times {n}", f"{{a}} scaled by {n}") for n in range(2, 10)},
    ("10", "21"),
)
LOOP = Family(
    "loop",
    "{a}",
    "Add up the items of {a}.",
    "    total = 0\n    for place in{x} len({a})):\n        total += {a}[place]\n    return total",
    {
        " range(0,": (
            "the total of {a} from the first item on",
            "the items of {a} added up with none left out",
        ),
        " range(1,": (
            "the total of {a} from the second item on",
            "the items of {a} added up with one left out",
        ),
        " range(2,": (
            "the total of {a} from the third item on",
            "the items of {a} added up with two left out",
        ),
    },
    ("[3, 9, 2]", "[8, 5, 7, 6]"),
)
NEGATION = Family(
    "negation",
    "{a}, {b}",
    "Choose {a} by {b}.",
    "    return {a}{x} {b} else 0",
    {
        " if": ("{a} when {b} is set", "{a} only with {b}"),
        " if not": ("{a} unless {b} is set", "{a} only without {b}"),
    },
    ("7, True", "5, False"),
)
DEFAULT = Family(
    "default",
    "{a}, {b}{x}",
    "Scale {a} by {b}.",
    "    return {a} * {b}",
    {
        f"={n}": (f"{{a}} times {{b}}, by default with {{b}}={n}", f"the same as with {{b}}={n}")
        for n in range(2, 10)
    },
    ("10", "21"),
)
KEY = Family(
    "key",
    "{a}",
    "Read an entry of {a}.",
    '    return {a}["{x}"]',
    {key: (f'the "{key}" of {{a}}', f'what {{a}} has as "{key}"') for key in KEYS},
    ("ROW",),
)
METHOD = Family(
    "method",
    "{a}",
    "Tidy {a}.",
    "    tidied = {a}.{x}()\n    return tidied",
    {
        "upper": ("{a} in upper case", "{a} with large letters only"),
        "lower": ("{a} in lower case", "{a} with small letters only"),
        "title": ("{a} like a title", "{a} with a large letter in each word"),
        "strip": ("{a} without blanks around", "{a} stripped of blanks"),
    },
    ('" one Two "', '"three FOUR"'),
)
EARLY = Family(
    "early",
    "{a}",
    "Go through {a}.",
    "    total = 0\n    for item in {a}:\n        if item < 0:\n           {x}\n        total += item\n    return total",
    {
        " continue": ("the total of {a} without negative items", "{a} added up, negative items skipped"),
        " break": (
            "the total of {a} before the first negative item",
            "{a} added up until an item is negative",
        ),
        " return 0": ("0 once {a} has a negative item", "0 as soon as an item of {a} is negative"),
    },
    ("[3, -1, 2]", "[4, 1]"),
)
INDEX = Family(
    "index",
    "{a}",
    "Pick an item of {a}.",
    "    picked = {a}[{x}\n    return picked",
    {
        "0]": ("the first item of {a}", "item 0 of {a}"),
        "1]": ("the second item of {a}", "item 1 of {a}"),
        "2]": ("the third item of {a}", "item 2 of {a}"),
    },
    ("[3, 9, 2]", "[8, 5, 7, 6]"),
)
LOGIC = Family(
    "logic",
    "{a}, {b}",
    "Check {a} with {b}.",
    "    return {a}{x}{b}",
    {
        " and ": ("whether {a} and {b} are both set", "True with both {a} and {b} set"),
        " or ": ("whether {a} or {b} is set", "True with one of {a} and {b} set"),
    },
    ("True, False", "False, False", "True, True"),
)

PRACTISED = (
    ARITHMETIC,
    COMPARISON,
    BUILTIN,
    CONSTANT,
    LOOP,
    NEGATION,
    DEFAULT,
    KEY,
    METHOD,
    EARLY,
)  # training tasks are of these
UNPRACTISED = (INDEX, LOGIC)  # shown while the skill is learned, never after: no training task is of these
FAMILIES = (*PRACTISED, *UNPRACTISED)
