"""The one tool of the agent: bash. Its schema, the parser of its calls, and how results are shown.

Knows the text of a turn and the result of a command; nothing of tokens, sampling or rewards.
"""

from __future__ import annotations

import re
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


_END = re.compile(r"\s*</parameter>\s*</function>\s*</tool_call>")
_OPEN = re.compile(r"\s*<function=([^>\s]*)>\s*<parameter=([^>\s]*)>\n?")
_FORM = (
    "<tool_call>\\n<function=bash>\\n<parameter=command>\\n...\\n</parameter>\\n</function>\\n</tool_call>"
)


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return the calls that a turn makes, in order; none means that the turn is the agent's final answer.

    Looks behind `</think>` where the text has one, and takes the form that Qwen3.5 and Qwen3-Coder write
    (XML-like, one parameter). A call ends at its three closing tags in a row, so that a command may contain
    any one of them; and a broken call becomes an error for the model, without discarding good ones.
    """
    answer = text.rpartition("</think>")[2] if "</think>" in text else text
    calls, at = [], answer.find("<tool_call>")
    while at >= 0:
        start = at + len("<tool_call>")
        end = _end_of_call(answer, start)
        body_end, after = end if end else (len(answer), len(answer))
        calls.append(_parse_call(answer[start:body_end], closed=end is not None))
        at = answer.find("<tool_call>", after)
    return calls


def _end_of_call(answer: str, start: int) -> tuple[int, int] | None:
    """Find where the call's command ends and what follows begins.

    The first closing tags before which as many calls were opened as closed: a command may write a whole call
    into a file. Where a lone opening tag in a command makes that impossible, closing tags that another call
    or the end follows.
    """
    ends = list(_END.finditer(answer, start))
    balanced = (m for n, m in enumerate(ends) if answer.count("<tool_call>", start, m.start()) == n)
    clean = (m for m in ends if re.match(r"\s*(<tool_call>|\Z)", answer[m.end() :]))
    chosen = next(balanced, None) or next(clean, None) or (ends[0] if ends else None)
    return (chosen.start(), chosen.end()) if chosen else None


def _parse_call(body: str, *, closed: bool) -> ToolCall:
    head = _OPEN.match(body)
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
