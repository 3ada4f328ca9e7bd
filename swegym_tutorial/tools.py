"""The one tool of the agent: bash. Its schema, the parser of its calls, and how results are shown.

Knows the text of a turn and the result of a command; nothing of tokens, sampling or rewards.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .sandbox import CommandResult

BASH_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a bash command in the repository and return its output.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command to run."}},
            "required": ["command"],
        },
    },
}


@dataclass(frozen=True)
class ToolCall:
    """One call in a turn: a command to run, or an error that tells the model how its call was broken."""

    command: str | None
    error: str | None = None


_CALL = "<tool_call>"
_END = re.compile(r"</parameter>\s*</function>\s*</tool_call>")
_CALL_OR_TEXTS_END = re.compile(r"\s*(?:<tool_call>|\Z)")
_OPEN = re.compile(r"\s*<function=([^>\s]*)>\s*<parameter=([^>\s]*)>\n?")
_NEXT_PARAMETER = re.compile(r"\n</parameter>\s*<parameter=([^>\s]*)>\n")
_FORM = (
    "<tool_call>\\n<function=bash>\\n<parameter=command>\\n...\\n</parameter>\\n</function>\\n</tool_call>"
)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls that a turn makes, in order; none means that the turn is the agent's final answer.

    Looks behind the first `</think>` where the text has one: it ends the thinking that the prompt opened. Takes
    the form that Qwen3.5 and Qwen3-Coder write (XML-like, one parameter). A call ends at its three closing tags
    in a row, so that a command may contain any one of them; and a broken call becomes an error for the model,
    without discarding good ones.
    """
    answer = text.partition("</think>")[2] if "</think>" in text else text
    closings = _Closings(answer)
    calls, at = [], answer.find(_CALL)
    while at >= 0:
        start = at + len(_CALL)
        end = closings.of_call(start)
        body_end, after = end.span() if end else (len(answer), len(answer))
        calls.append(_parse_call(answer[start:body_end].rstrip(), closed=end is not None))
        at = answer.find(_CALL, after)
    return calls


class _Closings:
    """The closing tags of a text, read once: a text of n tags takes n log n, however they lie."""

    def __init__(self, answer: str) -> None:
        self._ends = list(_END.finditer(answer))
        self._starts = [end.start() for end in self._ends]
        self._opened = [opening.start() for opening in re.finditer(_CALL, answer)]
        self._clean = [n for n, end in enumerate(self._ends) if _CALL_OR_TEXTS_END.match(answer, end.end())]
        self._of_depth: dict[int, list[int]] = {}
        for n, start in enumerate(self._starts):
            self._of_depth.setdefault(self._opened_before(start) - n, []).append(n)

    def of_call(self, start: int) -> re.Match[str] | None:
        """Find the closing tags of the call that starts there, or None.

        The first before which as many calls were opened as closed: a command may write a whole call into a
        file. Where a lone opening tag in a command makes that impossible, closing tags that another call or
        the end follows.
        """
        first = bisect_left(self._starts, start)
        if first == len(self._ends):
            return None
        balanced = _first_from(first, self._of_depth.get(self._opened_before(start) - first, []))
        clean = _first_from(first, self._clean)
        return self._ends[next((n for n in (balanced, clean) if n is not None), first)]

    def _opened_before(self, position: int) -> int:
        return bisect_left(self._opened, position)


def _first_from(least: int, numbers: Sequence[int]) -> int | None:
    """Return the first of the rising numbers that is not below `least`."""
    at = bisect_left(numbers, least)
    return numbers[at] if at < len(numbers) else None


def _parse_call(body: str, *, closed: bool) -> ToolCall:
    head = _OPEN.match(body)
    if body.lstrip().startswith("{"):
        return _broken("it is JSON; <function=bash> and <parameter=command> must open it")
    if not closed:
        return _broken("it is not closed with </parameter>, </function> and </tool_call> in this order")
    if head is None:
        return _broken("<function=bash> and <parameter=command> must open it")
    function, parameter = head.groups()
    if function != "bash":
        return _broken(f"there is no function {function!r}; the one function is bash")
    if parameter != "command":
        return _broken(f"bash has no parameter {parameter!r}; its one parameter is command")
    command = body[head.end() :]
    more = _NEXT_PARAMETER.search(command)
    if more and "<<" not in command[: more.start()]:  # a heredoc may hold such lines
        return _broken(f"bash has no parameter {more[1]!r}; its one parameter is command")
    if not command.strip():
        return _broken("its command is empty")
    return ToolCall(command)


def _broken(why: str) -> ToolCall:
    return ToolCall(None, f"This tool call was not run: {why}. The form is {_FORM}")


def observation(result: CommandResult, limit: int) -> str:
    """Return what the agent is shown of a command: its exit code, and the last `limit` characters of output."""
    output = result.output.rstrip("\n")
    if cut := max(0, len(output) - limit):
        output = f"[{cut} characters left out]\n{output[-limit:]}"
    code = f"exit_code={result.exit_code}"
    if result.timed_out:
        code += f" (killed after {result.seconds:.0f} s)"
    return f"{code}\n{output}"
