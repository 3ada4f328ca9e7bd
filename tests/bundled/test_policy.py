"""The shipped policy: its size and form, its template, what it can do, and that its script makes it."""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from swegym_tutorial.bundled import POLICY
from swegym_tutorial.bundled.demonstrations import (
    CAREFUL,
    CLEAN,
    SHIPPED,
    Habits,
    attempt_at,
    demonstrate,
    encode,
    prompt_tokens,
)
from swegym_tutorial.bundled.families import FAMILIES
from swegym_tutorial.bundled.generate import SEED, SPLITS, drafts
from swegym_tutorial.bundled.issues import KEPT_PHRASINGS
from swegym_tutorial.bundled.measure_policy import forced_careful, well_formed
from swegym_tutorial.bundled.repository import files_of
from swegym_tutorial.bundled.tokenizer import PHRASES, SPECIAL, build_tokenizer
from swegym_tutorial.bundled.train_policy import create_model, make_policy, stages, weights_sha256
from swegym_tutorial.bundled.world import Part, make_world, names_of
from swegym_tutorial.config import TrainingConfig
from swegym_tutorial.rollout import Chat
from swegym_tutorial.sandbox import CommandResult
from swegym_tutorial.tasks import GIT_ENV, load_tasks
from swegym_tutorial.tools import BASH_TOOL, observation

CONFIG = TrainingConfig.laptop()


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32").eval()


@pytest.fixture(scope="module")
def chat(tokenizer):
    return Chat(tokenizer, CONFIG.system_prompt)


def test_the_folder_is_at_most_8_mb_and_the_model_a_qwen3_of_at_most_three_million_parameters(
    model, tokenizer
):
    assert sum(path.stat().st_size for path in POLICY.iterdir()) <= 8_000_000
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(p.numel() for p in model.parameters()) <= 3_000_000
    assert model.config.vocab_size == len(tokenizer)
    assert (
        model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_special_strings_are_single_tokens(tokenizer):
    for text in SPECIAL:
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    joined = "".join(SPECIAL)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode(joined, add_special_tokens=False)) == SPECIAL


CONVERSATION = [
    {"role": "system", "content": CONFIG.system_prompt},
    {"role": "user", "content": "Function get_price should return rate plus size."},
    {
        "role": "assistant",
        "reasoning_content": "Look first.",
        "content": "I look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "bash", "arguments": {"command": "ls src"}}},
            {"type": "function", "function": {"name": "bash", "arguments": {"command": "cat a\ncat b"}}},
        ],
    },
    {"role": "tool", "content": "exit_code=0\ncart.py"},
    {"role": "tool", "content": "exit_code=1\n"},
    {"role": "assistant", "content": "Nothing there."},
    {"role": "user", "content": "Go on."},
]
RENDERED = """\
<|im_start|>system
# Tools

These are the functions that you can call:

<tools>
{"type": "function", "function": {"name": "bash", "description": "Run a bash command in the repository and return its output.", "parameters": {"type": "object", "properties": {"command": {"type": "string", "description": "The command to run."}}, "required": ["command"]}}}
</tools>

A call stands at the end of your turn, in this form:

<tool_call>
<function=NAME>
<parameter=NAME>
VALUE
</parameter>
</function>
</tool_call>

A turn without a call ends the work.

You are a coding agent. Fix the bug with the bash tool.<|im_end|>
<|im_start|>user
Function get_price should return rate plus size.<|im_end|>
<|im_start|>assistant
<think>
Look first.
</think>

I look.

<tool_call>
<function=bash>
<parameter=command>
ls src
</parameter>
</function>
</tool_call>
<tool_call>
<function=bash>
<parameter=command>
cat a
cat b
</parameter>
</function>
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
exit_code=0
cart.py
</tool_response>
<tool_response>
exit_code=1

</tool_response><|im_end|>
<|im_start|>assistant
<think>

</think>

Nothing there.<|im_end|>
<|im_start|>user
Go on.<|im_end|>
<|im_start|>assistant
<think>
"""


def test_the_template_renders_a_whole_conversation(tokenizer):
    text = tokenizer.apply_chat_template(
        CONVERSATION, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False
    )
    assert text == RENDERED
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_template_without_tools_is_plain_and_refuses_unknown_roles(tokenizer):
    text = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False)
    assert text == (
        f"<|im_start|>system\n{CONFIG.system_prompt}<|im_end|>\n"
        "<|im_start|>user\nFunction get_price should return rate plus size.<|im_end|>\n"
    )
    alone = tokenizer.apply_chat_template([{"role": "user", "content": "Hello."}], tokenize=False)
    assert alone == "<|im_start|>user\nHello.<|im_end|>\n"
    with pytest.raises(Exception, match="there is no role critic"):
        tokenizer.apply_chat_template([{"role": "critic", "content": "Hm."}], tokenize=False)


def test_the_client_reads_the_frame_of_an_observation_off_the_template(chat, tokenizer):
    frame = tokenizer.decode(chat.observations(["exit_code=0\nA", "exit_code=2\n"], stopped=True))
    assert frame == (
        "\n<|im_start|>user\n<tool_response>\nexit_code=0\nA\n</tool_response>\n<tool_response>\nexit_code=2\n"
        "\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_any_text_has_a_round_trip(tokenizer):
    texts = [
        text
        for task in load_tasks(split=None)
        for text in (*task.files.values(), task.patch, task.test_patch)
    ]
    texts += [
        *PHRASES,
        "Zażółć gęślą jaźń, 日本語 \t\r\n\x00\x7f  🐍 \n\n  <think >",
        "a" * 300,
        "return x%y",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_prompts_and_attempts_are_short(chat):
    for task in load_tasks(split=None):
        assert len(chat.prompt(task)) <= 90
    rng = random.Random(0)
    lengths = [len(encode(chat, demonstrate(rng, CAREFUL))[0]) for _ in range(200)]
    assert sum(lengths) / len(lengths) <= 250
    assert max(lengths) <= 360
    assert max(lengths) < CONFIG.context_tokens - CONFIG.turn_tokens


def test_demonstrations_are_what_the_client_would_have_made(chat, tokenizer):
    rng = random.Random(1)
    for _ in range(100):
        demonstration = demonstrate(rng, CLEAN)
        tokens, said = encode(chat, demonstration)
        turns = [step.turn for step in demonstration.steps]
        assert all(map(well_formed, turns))
        spoken = tokenizer.decode([token for token, mine in zip(tokens, said, strict=True) if mine])
        assert spoken == "".join(f"{turn}<|im_end|>" for turn in turns)
        assert not said[len(prompt_tokens(chat, demonstration.world.issue)) - 1]


def test_demonstrations_never_use_a_name_of_a_bundled_task():
    rng = random.Random(2)
    used = {f.name for _ in range(300) for m in demonstrate(rng, CLEAN).world.modules for f in m.functions}
    assert used <= set(names_of(Part.DEMONSTRATIONS))
    assert not used & {*names_of(Part.TRAIN), *names_of(Part.HELD_OUT)}


def test_shipped_habits_resolve_about_a_quarter_and_careful_ones_all():
    rng = random.Random(3)
    resolved = sum(demonstrate(rng, SHIPPED).resolves for _ in range(2000)) / 2000
    assert 0.15 < resolved < 0.35
    assert all(demonstrate(rng, CAREFUL).resolves for _ in range(200))
    careless = Habits(look=1, act=1, line=0, test=1, repair=1)
    assert all(attempt_at(rng, demonstrate(rng, CAREFUL).world, careless).resolves for _ in range(200))


def test_the_kept_phrasings_have_no_word_that_demonstrations_lack(chat):
    rng = random.Random(5)
    shown = {token for _ in range(3000) for token in chat.encode(demonstrate(rng, CLEAN).world.issue)}
    held_out = names_of(Part.HELD_OUT)
    kept = {
        token
        for number in range(1000)
        for family in [FAMILIES[number % len(FAMILIES)]]
        for token in chat.encode(make_world(rng, family, held_out, phrasings=KEPT_PHRASINGS).issue)
    }
    assert not kept - shown, [chat.decode([token]) for token in kept - shown]


@pytest.mark.slow
def test_what_demonstrations_show_is_what_bash_prints(tmp_path):
    rng = random.Random(4)
    commands, missing = 0, 0
    for number in range(2 * len(FAMILIES)):
        world = make_world(rng, FAMILIES[number % len(FAMILIES)], names_of(Part.DEMONSTRATIONS))
        folder = tmp_path / str(number)
        for path, text in files_of(world, "a-world").items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        run(folder, "git init -q . && git add -A && git commit -q -m Start")
        habits = Habits(look=number % 5 > 0, act=1, line=number // len(FAMILIES), test=1, repair=1)
        for step in attempt_at(rng, world, habits).steps[:-1]:
            command = step.turn.partition("<parameter=command>\n")[2].partition("\n</parameter>")[0]
            assert observation(run(folder, command), CONFIG.observation_chars) == step.shown
            commands += 1
            missing += "No such file" in (step.shown or "")
    assert missing and commands > 60


def run(folder: Path, command: str) -> CommandResult:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**GIT_ENV, "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return CommandResult(done.returncode, done.stdout, timed_out=False, truncated_bytes=0, seconds=0.0)


@pytest.mark.parametrize("split", [split.name for split in SPLITS])
def test_with_the_careful_plan_forced_it_resolves_the_tasks(model, chat, split):
    worlds = [draft.world for draft in drafts(SEED) if draft.split == split]
    assert [world.issue for world in worlds] == [task.problem_statement for task in load_tasks(split=split)]
    forced = forced_careful(model, chat, worlds)["all"]
    assert forced.greedy >= 0.9
    assert forced.sampled >= 0.75  # 0.93 and more of what was practised, 0.86 of the two other families


def test_an_untrained_model_resolves_nothing_even_so(chat, tokenizer):
    import torch

    torch.manual_seed(0)
    worlds = [draft.world for draft in drafts(SEED)][:4]
    forced = forced_careful(create_model(tokenizer).eval(), chat, worlds)["all"]
    assert forced.greedy == 0
    assert forced.sampled < 1e-6


def test_well_formed_turns_are_told_from_broken_ones():
    good = "Look.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\nls < a\n</parameter>\n</function>\n</tool_call>"
    assert well_formed(good)
    assert well_formed("Done.\n</think>\n\nFixed the bug.")
    assert not well_formed(good.replace("</function>\n", ""))
    assert not well_formed(good + " And more.")
    assert not well_formed("Done.\n</think>\n\n")
    assert not well_formed("Done.")
    assert not well_formed("Done.\n</think>\n\n<tool_call>")


def test_the_shipped_tokenizer_is_what_the_script_builds(tokenizer):
    again = build_tokenizer()
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template
    assert again.encode(RENDERED) == tokenizer.encode(RENDERED)


@pytest.mark.slow
def test_training_for_a_few_steps_learns_and_repeats_itself(tmp_path):
    folders = [tmp_path / name for name in ("one", "two", "other")]
    made = [
        make_policy(folder, seed, stages(seed, (6, 1, 1, 2)))
        for folder, seed in zip(folders, (0, 0, 1), strict=True)
    ]
    weights = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert weights[0] == weights[1] != weights[2]
    assert made[0]["log"] == made[1]["log"]
    hashes = [each["weights_sha256"] for each in made]
    assert hashes == [weights_sha256(folder) for folder in folders]
    assert hashes[0] == hashes[1] != hashes[2]
    skill, habits = made[0]["log"]["skill"], made[0]["log"]["habits"]
    assert habits[-1]["loss_said"] < skill[0]["loss_said"] - 0.5


def test_the_record_beside_the_weights_tells_how_they_were_made(model):
    made = json.loads((POLICY / "made_with.json").read_text())
    assert made["weights_sha256"] == weights_sha256(POLICY)  # measured were these weights and no others
    assert made["parameters"] == sum(p.numel() for p in model.parameters())
    assert [stage["name"] for stage in made["stages"]] == ["skill", "hard", "more skill", "habits"]
    assert made["seconds"] < 60 * 60
    quality = made["quality"]
    for split in SPLITS:
        assert quality[f"{split.name}, careful plan forced"]["all"]["greedy"] >= 0.9
        sampled = quality[f"{split.name}, temperature 1"]
        assert sampled["attempts"] >= 160
        assert 0.1 <= sampled["resolved"] <= 0.4
        assert sampled["mixed_groups"] >= 0.6
        assert sampled["well_formed_turns"] >= 0.95
        assert quality[f"{split.name}, greedy"]["resolved"] <= 0.2
