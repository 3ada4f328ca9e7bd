"""The bash tool: what its parser makes of good and broken calls, and what the policy is shown."""

import pytest

from swegym_tutorial.sandbox import CommandResult
from swegym_tutorial.tools import ToolCall, observation, parse_tool_calls


def call(command: str) -> str:
    return f"<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"


def commands(text: str) -> list[str | None]:
    return [c.command for c in parse_tool_calls(text)]


def test_a_call_after_thinking():
    assert parse_tool_calls("Look first.\n</think>\n\n" + call("ls -la")) == [ToolCall("ls -la")]


def test_no_call_is_a_final_answer():
    assert parse_tool_calls("Done.\n</think>\n\nFixed the bug.") == []
    assert parse_tool_calls("") == []


def test_calls_in_the_thinking_do_not_count():
    assert commands(call("rm -rf /") + "\n</think>\n\n" + call("ls")) == ["ls"]


def test_several_calls_in_one_turn_keep_their_order():
    assert commands(call("one") + "\n" + call("two") + "\n" + call("three")) == ["one", "two", "three"]


# Case 31 (ollama#17914, Rapid-MLX#1515): every malformed call gives the command or an error that says what is wrong.
BROKEN = [
    ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>", "not closed"),
    ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>", "not closed"),
    ("<tool_call>\n<function=bash>\n<parameter=command>\nls", "not closed"),
    ("<tool_call>", "not closed"),
    ("<tool_call>\n<function=bash>\n<parameter=command>\nls\n</function>\n</tool_call>", "not closed"),
    ("<tool_call>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>", "must open it"),
    ("<tool_call>\n<function=bash>\nls\n</parameter>\n</function>\n</tool_call>", "must open it"),
    ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', "it is JSON"),
    ('<tool_call>{"name": "bash"', "it is JSON"),
    (call("ls").replace("function=bash", "function=python"), "no function 'python'"),
    (call("ls").replace("function=bash", "function="), "no function ''"),
    (call("ls").replace("parameter=command", "parameter=cmd"), "no parameter 'cmd'"),
    (call(""), "empty"),
    (call("  \n "), "empty"),
    (call("ls").replace("<function=bash>", "<function bash>"), "must open it"),
]


@pytest.mark.parametrize("text, why", BROKEN)
def test_case_31_a_broken_call_is_an_error_for_the_model(text, why):
    (broken,) = parse_tool_calls("Hm.\n</think>\n\n" + text)
    assert broken.command is None
    assert why in broken.error and "<function=bash>" in broken.error


KEPT = [
    ("cat > x.xml <<'E'\n<a>\n</parameter>\n</a>\nE", "a closing tag in a heredoc"),
    ("cat > x <<'E'\n</tool_call>\nE\nls", "the call's own closing tag"),
    ("echo '</function>' '</parameter>'", "two of them"),
    (f"cat > doc <<'E'\n{call('inner')}\nE", "a whole call in a heredoc"),
    ("  indented\n\n\nwith blank lines", "white space"),
    ("echo '<tool_call>'", "an opening tag"),
    ("echo '</think>'", "the end of thinking"),
]


@pytest.mark.parametrize("command", [text for text, _ in KEPT], ids=lambda c: repr(c[:20]))
def test_case_31_a_command_with_tags_in_it_is_kept_whole(command):
    assert commands("Hm.\n</think>\n\n" + call(command)) == [command]


def test_case_31_white_space_between_the_tags_may_vary():
    text = "<tool_call><function=bash><parameter=command>ls</parameter></function></tool_call>"
    assert commands(text) == ["ls"]
    assert commands(text.replace("><", ">\n\n  <").replace("</parameter>", "\n</parameter>")) == ["ls"]


def test_case_31_one_bad_call_does_not_discard_good_ones():
    bad = call("ls").replace("function=bash", "function=edit")
    assert commands(call("one") + bad + call("two")) == ["one", None, "two"]


def test_case_31_text_behind_a_call_does_not_become_part_of_it():
    assert commands(call("ls") + "\nThat should list the files.") == ["ls"]
    assert commands(call("ls") + " and then " + call("pwd")) == ["ls", "pwd"]


def result(output: str, exit_code: int = 0, timed_out: bool = False) -> CommandResult:
    return CommandResult(exit_code, output, timed_out, 0, 2.0)


def test_the_policy_sees_the_exit_code_and_the_end_of_the_output():
    assert observation(result("a\nb\n"), 100) == "exit_code=0\na\nb"
    assert observation(result("", 1), 100) == "exit_code=1\n"
    shown = observation(result("x" * 50 + "end"), 10)
    assert shown == "exit_code=0\n[43 characters left out]\nxxxxxxxend"
    assert observation(result("part", 124, True), 100) == "exit_code=124 (killed after 2 s)\npart"


END = "\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text, count",
    [
        ("<tool_call>" * 10_000, 1),
        (END * 10_000, 0),
        ("<tool_call>" * 10_000 + END * 10_000, 1),
        (call("ls") * 10_000, 10_000),
        (("<tool_call>" + call("ls")) * 10_000, 10_000),
        (call("ls") + (END + " text") * 10_000, 1),
        (call("\n" * 200_000 + "ls" + "\n" * 200_000 + "pwd"), 1),
        (call("ls" + "</parameter>\n\n" * 10_000), 1),
        ("<tool_call>" + " " * 200_000, 1),
    ],
    ids=range(9),
)
def test_a_long_degenerate_turn_is_read_in_no_time(text, count):
    # Nothing is timed: reading that takes the square of the length would hold up the tests for all to see.
    assert len(parse_tool_calls(text)) == count


def test_white_space_at_a_commands_end_is_left_out_and_kept_at_its_start():
    assert commands(call("\n  ls \n\n\t ")) == ["\n  ls"]
