"""The tiny policy's tokenizer: its chat template in Qwen3.5's form, and a small vocabulary.

Whole words are single tokens, so that copying a name means copying one token a word. Text that is the same in
every conversation (the lines of the system message, the frame of a turn) has tokens of its own, which keeps an
attempt short: 130 tokens with the shipped habits, 210 with the careful plan, on average. Any other text still has a round trip, byte by byte. Knows nothing of training.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..config import TINY_SYSTEM_PROMPT
from ..tools import BASH_TOOL
from .demonstrations import CLEAN, demonstrate
from .families import DEFAULT, KEYS, LOOP
from .repository import ALL_PASS, CHECK
from .world import MODULES, NOUNS, VERBS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL = [
    PADDING,
    "<|im_start|>",
    END_OF_TURN,
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<function=bash>",
    "</function>",
    "<parameter=command>",
    "</parameter>",
]
# Frames of the turns, and pieces of commands that the policy should not have to spell.
PHRASES = [
    "user\n",
    "user\n<tool_response>\nexit_code=",
    "\n</tool_response>",
    "assistant\n<think>\n",
    "\n</think>",
    "\n\n<tool_call>\n<function=bash>\n<parameter=command>\n",
    "\n</parameter>\n</function>\n</tool_call>",
    'git grep -nW --heading "def',
    "sed -i '",
    "s/",
    "/' ",
    CHECK,
    ALL_PASS,
    "FAILED assert",
    *(f"src/{module}.py" for module in MODULES),
    ":def",
    "-   ",
    '"""',
    # So that a fragment's own token comes first in it; see docs/world.md for what was seen where it did not.
    *(fragment for family in (DEFAULT, LOOP) for fragment in family.fragments),
]
# Operators with their blanks, words with the blank before them, two digits; everything else character by character.
SPLIT = r" (?:[-+%<>]=?|==) | ?[A-Za-z]+| ?\d{1,2}| +(?= )|[^\sA-Za-z\d]|\s"
LINES = 60  # no module has more: each line's number is one token

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' %}
{%- if tools or system %}
    {{- '<|im_start|>system\n' }}
    {%- if tools %}
        {{- '# Tools\n\nThese are the functions that you can call:\n\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\n</tools>\n\nA call stands at the end of your turn, in this form:\n\n' }}
        {{- '<tool_call>\n<function=NAME>\n<parameter=NAME>\nVALUE\n</parameter>\n</function>\n</tool_call>' }}
        {{- '\n\nA turn without a call ends the work.' }}
        {{- '\n\n' if system }}
    {%- endif %}
    {{- system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set called = call.function or call %}
            {{- '\n' if not loop.first else '\n\n' if message.content else '' }}
            {{- '<tool_call>\n<function=' + called.name + '>\n' }}
            {%- for name, value in called.arguments.items() %}
                {{- '<parameter=' + name + '>\n' + (value if value is string else value | tojson) }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.role != 'system' %}
        {{- raise_exception('there is no role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}
""".strip()


def build_tokenizer(seed: int = 5, texts: int = 4000) -> PreTrainedTokenizerFast:
    """Return the tokenizer, its merges learned from the texts of demonstrations.

    Raises ValueError where a word of the world would take more than one token.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), bytewise])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,  # not reached: the texts have fewer words
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(seed, texts), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=END_OF_TURN, pad_token=PADDING, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    phrases = [AddedToken(text, normalized=False) for text in (*PHRASES, *_constant_lines(tokenizer))]
    tokenizer.add_tokens(phrases)
    _check_words(tokenizer)
    return tokenizer


def _texts(seed: int, count: int) -> Iterator[str]:
    rng = random.Random(seed)
    for _ in range(count):
        demonstration = demonstrate(rng, CLEAN)
        yield demonstration.world.issue
        for step in demonstration.steps:
            yield step.turn
            yield step.shown or ""
        yield from demonstration.world.sources(fixed=True).values()
    for number in range(2 * LINES):  # twice each, as the rarest pairs of digits may be missing
        yield f"{1 + number % LINES}:"


def _constant_lines(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return what the first message always says, cut into lines."""
    messages = [{"role": "system", "content": TINY_SYSTEM_PROMPT}]
    text = str(tokenizer.apply_chat_template(messages, tools=[BASH_TOOL], tokenize=False))
    body = text.removeprefix("<|im_start|>").removesuffix(f"{END_OF_TURN}\n")
    return list(dict.fromkeys(re.findall(r"[^\n]+\n*", body)))


def _check_words(tokenizer: PreTrainedTokenizerFast) -> None:
    words = [*(f" {verb}" for verb in VERBS), *(w for noun in NOUNS for w in (noun, f" {noun}")), *KEYS]
    words += [f"src/{module}.py" for module in MODULES]
    words += [str(number) for number in range(1, LINES + 1)]
    if split := [word for word in words if len(tokenizer.encode(word, add_special_tokens=False)) != 1]:
        raise ValueError(f"words of the world that are not one token each: {split}")
