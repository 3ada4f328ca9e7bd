"""How an issue is worded: what is expected and what was seen, as people report it.

Every phrasing tells what the function should return; some show a call, a console or a traceback. Knows nothing of
families and files.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of the training tasks and the demonstrations. A blank stands before each {f} and {call}: names have one token.
PHRASINGS = (
    "Function {f} should return {want}.",
    "Function {f} should return {want}, but {call} gives {got}.",
    "Wrong result from {f}.\nExpected: {want}.\n>>> {call}\n{got}",
    "I expect {want} from {f}, and I get {got} for {args}.",
    "The function {f} does not return {want}. For {args} it gives {got} where {expected} is right.",
    "Traceback:\n    assert {call} == {expected}\nAssertionError: {got}\nThe right result of {f} is {want}.",
    "Our report is wrong since the last update: {f} must give {want}, and {call} is {got}.",
    "Calling {call} gives {got}, not {expected}. It should be {want}.",
    "The result of {f} is wrong.\nExpected: {want}; for {args} that is {expected}.",
)
# Of held-out tasks only: other sentences, in words that the ones above have as well.
KEPT_PHRASINGS = (
    "The report is not right: for {args} the function {f} must give {expected}, {want}.",
    ">>> {call}\n{got}\nWrong. The right result is {want}.",
    "The last update is wrong: {f} gives {got} for {args}. It should give {want}.",
    "I get {got} from {call}, and that is not right. I expect {want}, {expected}.",
)


@dataclass(frozen=True)
class Report:
    """What an issue tells."""

    function: str
    want: str  # what the function should return, in words
    arguments: str
    got: str
    expected: str

    def worded(self, phrasing: str) -> str:
        return phrasing.format(
            f=self.function,
            want=self.want,
            args=self.arguments,
            call=f"{self.function}({self.arguments})",
            got=self.got,
            expected=self.expected,
        )
