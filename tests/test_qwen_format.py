"""Prompt, tool responses and calls in the format that Qwen/Qwen3.5-9B was trained on.

What is expected is written down here, read off the published chat template (chat_template.jinja of that model,
MD5 94f89e03284d911fc65d06422439fd79). Three tokenizers are held against it: one made here, whose small template
has the published one's structure; the bundled policy's; and the published one, where its files are on this machine.
"""

import hashlib
import json
from dataclasses import replace

import pytest
from conftest import Script
from hypothesis import given, settings
from hypothesis import strategies as st

from swegym_tutorial import TrainingConfig
from swegym_tutorial.bundled import POLICY
from swegym_tutorial.rollout import Chat, generate_rollout
from swegym_tutorial.tools import BASH_TOOL, parse_tool_calls

MD5 = "94f89e03284d911fc65d06422439fd79"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# The published template's structure in words of our own: what it trims, which thinking it keeps, where lines end.
TEMPLATE = """
{%- set asked = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{% set asked.last = messages.index(m) %}{% endfor %}
{%- if asked.last < 0 %}{{ raise_exception('nobody asks anything') }}{% endif %}
{{- '<|im_start|>system\n# Tools\n\n(what there is)\n\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n\n(how to call)\n\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- for m in messages[1:] %}
    {%- set text = (m.content or '') | trim %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' + text + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index > asked.last %}
            {{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {{- ('\n' if not loop.first else '\n\n' if text else '') + '<tool_call>\n' }}
            {{- '<function=' + call.function.name + '>\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\n' + value + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user' if loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}
""".strip()

SYSTEM = TrainingConfig.spindle().system_prompt
ISSUE = "merge() loses the last row – always.\n\n```python\nmerge(a, b)\n```"
OPENING = f"\n\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{ISSUE}<|im_end|>\n<|im_start|>assistant\n<think>\n"
ONE_RESPONSE = (
    "\n<|im_start|>user\n<tool_response>\nexit_code=0\none\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n"
)
THREE_RESPONSES = (
    "\n<|im_start|>user\n<tool_response>\nexit_code=0\none\n</tool_response>\n<tool_response>\nexit_code=1\n"
    "  two\n</tool_response>\n<tool_response>\nexit_code=0\nthree\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n<think>\n"
)
TWO_CALLS = (
    "<tool_call>\n<function=bash>\n<parameter=command>\ngrep -rn 'merge' src\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=bash>\n<parameter=command>\ncat <<'E'\n  x\nE\n</parameter>\n</function>\n</tool_call>"
)
COMMANDS = ["grep -rn 'merge' src", "cat <<'E'\n  x\nE"]


def made_here():
    """A byte-level tokenizer with Qwen3.5's added tokens, of which only three are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in NOT_SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def published():
    from transformers import AutoTokenizer

    config = TrainingConfig.spindle()
    try:
        return AutoTokenizer.from_pretrained(
            config.tokenizer, revision=config.tokenizer_revision, local_files_only=True
        )
    except OSError:
        pytest.skip(reason=f"{config.tokenizer} is not in this machine's Hugging Face cache")


@pytest.fixture(scope="module", params=["made here", "bundled", "published"])
def qwen(request) -> Chat:
    from transformers import AutoTokenizer

    if request.param == "bundled":
        return Chat(AutoTokenizer.from_pretrained(POLICY), SYSTEM)
    return Chat(made_here() if request.param == "made here" else published(), SYSTEM)


@pytest.fixture
def trims(qwen) -> bool:
    """Whether the template trims messages. The bundled policy learned from one that doesn't."""
    return "| trim" in qwen.tokenizer.chat_template or "|trim" in qwen.tokenizer.chat_template


def decoded(chat: Chat, tokens: list[int]) -> str:
    return chat.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_the_published_template_is_the_one_written_down_here():
    template = published().chat_template.encode()
    assert MD5 in {hashlib.md5(template).hexdigest(), hashlib.md5(template.rstrip(b"\n")).hexdigest()}


def test_the_first_prompt(qwen, task, trims):
    for issue in [ISSUE, *([f"\n {ISSUE} \r\n"] if trims else [])]:
        text = decoded(qwen, qwen.prompt(replace(task, problem_statement=issue)))
        assert text.startswith("<|im_start|>system\n# Tools\n\n")
        assert f"\n\n<tools>\n{json.dumps(BASH_TOOL)}\n</tools>\n\n" in text
        assert text.endswith(OPENING) and text.count("<|im_start|>") == 3


def test_the_prompt_is_made_of_the_tokens_that_the_model_knows(qwen, task, trims):
    tokens = qwen.prompt(replace(task, problem_statement=ISSUE))
    names = qwen.tokenizer.convert_ids_to_tokens(tokens)
    assert names.count("<|im_start|>") == 3 and names.count("<|im_end|>") == 2
    assert names[-2] == "<think>" or not trims  # to the bundled policy it is text
    assert qwen.stop_tokens == qwen.tokenizer.convert_tokens_to_ids(["<|im_end|>"])


def test_tool_responses(qwen):
    one, three = ["exit_code=0\none"], ["exit_code=0\none", "exit_code=1\n  two", "exit_code=0\nthree"]
    assert decoded(qwen, qwen.observations(one, stopped=True)) == ONE_RESPONSE
    assert decoded(qwen, qwen.observations(three, stopped=True)) == THREE_RESPONSES
    assert decoded(qwen, qwen.observations(one, stopped=False)) == "<|im_end|>" + ONE_RESPONSE


def test_tool_responses_are_trimmed_where_the_template_trims_them(qwen, trims):
    padded = ["exit_code=0\n", " \n exit_code=1\n  two\t\n"]
    text = decoded(qwen, qwen.observations(padded, stopped=True))
    first, second = (part.strip() for part in padded) if trims else padded
    assert text == (
        f"\n<|im_start|>user\n<tool_response>\n{first}\n</tool_response>\n<tool_response>\n{second}\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def turn(thinking: str, content: str, *commands: str) -> dict:
    calls = [
        {"type": "function", "function": {"name": "bash", "arguments": {"command": c}}} for c in commands
    ]
    return {"role": "assistant", "reasoning_content": thinking, "content": content, "tool_calls": calls}


def rendered(chat: Chat, messages: list[dict], **options) -> str:
    return chat.tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], tokenize=False, **options)


def said(chat: Chat, message: dict) -> str:
    """What the model samples for the template to render this turn."""
    text = rendered(chat, [*chat.messages(ISSUE), message])
    return text.rpartition("<|im_start|>assistant\n<think>\n")[2].removesuffix("\n")


def test_calls_as_the_template_writes_them_are_read(qwen):
    text = said(qwen, turn("Look first.", "", *COMMANDS))
    assert text == f"Look first.\n</think>\n\n{TWO_CALLS}<|im_end|>"
    assert [call.command for call in parse_tool_calls(text.removesuffix("<|im_end|>"))] == COMMANDS
    text = said(qwen, turn("Look first.", "I look.", *COMMANDS))
    assert text == f"Look first.\n</think>\n\nI look.\n\n{TWO_CALLS}<|im_end|>"
    assert [call.command for call in parse_tool_calls(text.removesuffix("<|im_end|>"))] == COMMANDS
    assert parse_tool_calls(said(qwen, turn("Done.", "I changed merge()."))) == []


HERE = Chat(made_here(), SYSTEM)
TEXT = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1).filter(str.strip)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXT.filter(lambda text: "<tool_call>" not in text), min_size=1, max_size=3))
def test_any_commands_come_back_from_the_template(commands):
    text = said(HERE, turn("Hm.", "", *commands)).removesuffix("<|im_end|>")
    assert [call.command for call in parse_tool_calls(text)] == [command.rstrip() for command in commands]


@pytest.mark.parametrize("command", ["grep -rn '</think>' src", "echo '<think>' '</think>' '</think>'"])
def test_thinking_ends_at_its_first_closing_tag(command):
    text = said(HERE, turn("Hm.", "", "ls", command)).removesuffix("<|im_end|>")
    assert [call.command for call in parse_tool_calls(text)] == ["ls", command]


def test_a_parameter_that_bash_does_not_have_is_told():
    second = TWO_CALLS.replace("src\n</parameter>", "src\n</parameter>\n<parameter=timeout>\n5\n</parameter>")
    first, good = parse_tool_calls(second)
    assert first.command is None and "no parameter 'timeout'" in first.error and good.command == COMMANDS[1]
    heredoc = "cat > x <<'E'\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\nE"
    assert [call.command for call in parse_tool_calls(said(HERE, turn("", "", heredoc)))] == [heredoc]


def test_case_30_appended_turns_are_what_the_template_renders_thinking_included(
    qwen, task, sandboxes, config
):
    # verl#6854: Qwen3.5's template drops the thinking of turns that lie before the last user message, so that
    # rendering a conversation anew can change what the policy saw. Here one user message comes, the issue, and tool
    # responses are no user messages to the template: what we append is what it would render, token for token as it
    # was sampled, and no thinking is lost.
    first, second = (
        turn("Look first.\n\nThen edit.", "", *["echo one", "echo; printf ' two  '"]),
        turn("Again.", "One more look.", "true"),
    )
    last = turn("All good.", "I changed merge().")
    script = Script(
        qwen, *(said(qwen, message).removesuffix("<|im_end|>") for message in (first, second, last))
    )
    task = replace(task, problem_statement=ISSUE)
    rollout = generate_rollout(task, script, qwen, sandboxes, replace(config, context_tokens=100_000))
    shown = [["exit_code=0\none", "exit_code=0\n\n two  "], ["exit_code=0\n"]]
    responses = [[{"role": "tool", "content": text} for text in texts] for texts in shown]
    messages = [*qwen.messages(ISSUE), first, *responses[0], second, *responses[1], last]
    assert decoded(qwen, rollout.tokens.tolist()) + "\n" == rendered(qwen, messages)
    assert len(rollout.turns) == 3 and [len(t.commands) for t in rollout.turns] == [2, 1, 0]


def test_case_30_thinking_is_dropped_only_before_a_later_user_message(qwen, trims):
    # verl#6854, the other side: this is what we never send.
    messages = [
        *qwen.messages(ISSUE),
        turn("Look first.", "", "ls"),
        {"role": "tool", "content": "exit_code=0"},
    ]
    assert "Look first." in rendered(qwen, messages, add_generation_prompt=True)
    later = rendered(qwen, [*messages, turn("Fine.", "Done."), {"role": "user", "content": "And now?"}])
    assert ("Look first." in later, "Fine." in later) == ((False, False) if trims else (True, True))
    assert "<tool_call>\n<function=bash>\n<parameter=command>\nls\n" in later
