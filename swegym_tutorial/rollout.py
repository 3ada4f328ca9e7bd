"""One attempt: sample a turn, run its commands, show what came out, until the agent is done.

The trajectory is token-exact: sampled ids are appended as they came and only observations are encoded, so that
training sees what was sampled. Earlier turns, thinking included, are never rendered anew: the policy sees its
own words again. Qwen3.5's template gives the same text: it drops only the thinking that lies before the last
user message, and here there is one, the issue. Knows nothing of tests, rewards or training.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from .answers import prepare
from .config import TrainingConfig
from .patches import GitTimeout, capture_patch
from .sandbox import CommandResult, Sandbox, SandboxBackend
from .tasks import Task
from .token_ids import shared
from .tools import BASH_TOOL, observation, parse_tool_calls

CONTEXT_MARGIN = 16  # tokens left free at the end of the context


class Ending(StrEnum):
    """Why an attempt ended."""

    FINAL = "final"  # the agent gave an answer without a tool call
    TURN_LIMIT = "turn_limit"
    CONTEXT_LIMIT = "context_limit"
    GENERATION_LIMIT = "generation_limit"  # one turn used up its whole budget
    INFRASTRUCTURE = "infrastructure"  # not the agent's doing: never graded


@dataclass(frozen=True)
class Sample:
    """What the policy said in one turn."""

    tokens: list[int]
    logprobs: list[float]  # of each token, under the policy that sampled it
    stopped: bool  # at a stop token; False: the budget ran out


class RecordingLost(RuntimeError):
    """An attempt that was kept on disk alone cannot be read back: an infrastructure fault."""

    def __init__(self, text: str, key: Mapping[str, Any]) -> None:
        """key: the fields of the attempt's events."""
        super().__init__(text)
        self.key = dict(key)


class Sampler(Protocol):
    """One fixed policy to sample from."""

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Continue the prompt. Raises an infrastructure error (PolicyError) where the server fails."""
        ...


@dataclass(frozen=True)
class Turn:
    """One turn: what the policy said, and what each of its commands did."""

    text: str  # all that was sampled, thinking and special strings included
    sampled_tokens: int
    commands: tuple[str, ...]
    results: tuple[CommandResult, ...]
    errors: tuple[str, ...]  # what the model was told of broken calls
    sampling_seconds: float
    tool_seconds: float


@dataclass(frozen=True)
class Rollout:
    """One attempt. The three arrays have equal lengths; a trailing observation is cut off.

    Where `read` is set it is kept on disk: what takes memory is left out here, and `whole` brings it back.
    """

    task_id: str
    tokens: np.ndarray  # int32: prompt, turns and observations as the policy saw them
    mask: np.ndarray  # bool: True where the token was sampled
    logprobs: np.ndarray  # float32: the sampled tokens' log-probabilities, 0 elsewhere
    turns: tuple[Turn, ...]
    ending: Ending
    patch: bytes
    seconds: float
    read: Callable[[], Rollout] | None = field(default=None, repr=False, compare=False)

    def whole(self) -> Rollout:
        """Return it with all that it had. Raises RecordingLost where it was on disk, and cannot be read."""
        return self if self.read is None else self.read()

    def bare(self) -> Rollout:
        """Return it without its tokens, texts, outputs and patch: what was counted of its turns is left."""
        arrays = np.zeros(0, np.int32), np.zeros(0, bool), np.zeros(0, np.float32)
        turns = (replace(turn, text="", commands=(), results=(), errors=()) for turn in self.turns)
        return Rollout(self.task_id, *arrays, tuple(turns), self.ending, b"", self.seconds)

    @property
    def sampled_tokens(self) -> int:
        """Of its turns; of its mask where it has none, as one made by hand."""
        return sum(turn.sampled_tokens for turn in self.turns) if self.turns else int(self.mask.sum())

    @property
    def sampling_seconds(self) -> float:
        return sum(turn.sampling_seconds for turn in self.turns)

    @property
    def tool_seconds(self) -> float:
        """Seconds in commands and in opening the sandbox and capturing the patch."""
        return max(0.0, self.seconds - self.sampling_seconds)


class TemplateError(RuntimeError):
    """The tokenizer's chat template can't carry a conversation with a tool; the text says what it lacks."""


def _special_strings(tokenizer: Any) -> re.Pattern[str] | None:
    """Return a pattern of the strings that a tokenizer reads as special tokens, such as the end of a turn."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


class Chat:
    """Turns conversations into tokens, by the tokenizer's own chat template.

    What stands around an observation is read off the template once, by rendering a marker, so that any
    template with tool messages serves.
    """

    def __init__(self, tokenizer: Any, system_prompt: str) -> None:
        self.tokenizer = tokenizer
        self._lock = threading.Lock()  # fast tokenizers fail with "Already borrowed" in two threads at once
        self.system_prompt = system_prompt
        if tokenizer.eos_token_id is None:
            raise TemplateError("the tokenizer has no end-of-sequence token, so no turn could end")
        self.stop_tokens: list[int] = [tokenizer.eos_token_id]
        self._special = _special_strings(tokenizer)
        self._strips = {"start": False, "end": False}  # white space of an observation; Qwen3.5's does both
        self._before, self._between, self._after = self._around_observations()
        self._end_of_turn = tokenizer.decode(self.stop_tokens)
        if not self._before.startswith(self._end_of_turn):
            raise TemplateError(
                f"the chat template does not end a turn with {self._end_of_turn!r}, the end-of-sequence token"
            )
        self._before = self._before.removeprefix(self._end_of_turn)

    def _around_observations(self) -> tuple[str, str, str]:
        """Return what the template writes before, between and after two tool messages behind a turn."""
        turn, one, two = "(turn)", 'observation "1"', '\tobservation "2"\t'
        opening = [*self.messages("(issue)"), {"role": "assistant", "content": turn}]
        try:
            text = self._render(
                [*opening, {"role": "tool", "content": one}, {"role": "tool", "content": two}]
            )
        except Exception as error:  # what a template raises is its own choice
            told = f"{type(error).__name__}: {error}"
            raise TemplateError(f"the chat template takes no tool messages: {told}") from error
        text = text.rpartition(turn)[2]
        bare = two.strip()
        self._strips = {"start": f"\t{bare}" not in text, "end": f"{bare}\t" not in text}
        two = self._as_shown(two)
        if text.count(one) != 1 or text.count(two) != 1 or text.index(one) > text.index(two):
            raise TemplateError("the chat template does not show tool messages as they are, in their order")
        before, rest = text.split(one)
        between, after = rest.split(two)
        return before, between, after

    def messages(self, issue: str) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": self.system_prompt},
            {"role": "user", "content": self.harmless(issue)},
        ]

    def harmless(self, text: str) -> str:
        """Break up special strings in text from outside, so that a file or an issue can't end a message."""
        return (
            self._special.sub(lambda match: f"{match[0][:1]} {match[0][1:]}", text) if self._special else text
        )

    def _as_shown(self, observation: str) -> str:
        """Return an observation without the white space that the template strips."""
        observation = observation.lstrip() if self._strips["start"] else observation
        return observation.rstrip() if self._strips["end"] else observation

    def _render(self, messages: list[dict[str, Any]]) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=[BASH_TOOL], add_generation_prompt=True, tokenize=False
        )

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of a turn, without the token that ends it."""
        body = tokens[:-1] if tokens and tokens[-1] in self.stop_tokens else tokens
        with self._lock:
            return self.tokenizer.decode(body, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def prompt(self, task: Task) -> list[int]:
        """Return the first turn's prompt: system message with the tool, issue, generation prompt."""
        return self.encode(self._render(self.messages(task.problem_statement)))

    def observations(self, texts: list[str], *, stopped: bool) -> list[int]:
        """Return what follows a turn: its end where the policy didn't sample it, tool responses, next opening."""
        start = "" if stopped else self._end_of_turn
        shown = self._between.join(self._as_shown(self.harmless(text)) for text in texts)
        return self.encode(start + self._before + shown + self._after)


def generate_rollout(
    task: Task,
    sampler: Sampler,
    chat: Chat,
    sandboxes: SandboxBackend,
    config: TrainingConfig,
    *,
    seed: int | None = None,
    on_turn: Callable[[Turn], None] = lambda turn: None,
) -> Rollout:
    """Let the policy work on one task in a sandbox of its own, and return the attempt with its patch.

    seed: makes sampling repeatable on servers that honour it; each turn gets its own from it.
    Raises SandboxError and PolicyError for infrastructure faults; what the agent does never raises.
    """
    began = time.monotonic()
    tokens = shared(chat.prompt(task))  # lists that grow with every turn, and of which hundreds wait at once
    sampled: list[tuple[int, np.ndarray]] = []  # (position, log-probabilities) of each turn's tokens
    turns: list[Turn] = []
    ending = Ending.TURN_LIMIT
    with closing(sandboxes.open(task)) as sandbox:
        prepare(sandbox, task, sandboxes)
        while len(turns) < config.max_turns:
            budget = min(config.turn_tokens, config.context_tokens - len(tokens) - CONTEXT_MARGIN)
            if budget <= 0:
                ending = Ending.CONTEXT_LIMIT
                break
            start = time.monotonic()
            turn_seed = None if seed is None else (seed + len(turns)) % 2**31
            sample = sampler.sample(tokens, budget, turn_seed)
            sampled.append((len(tokens), np.array(sample.logprobs, np.float32)))
            tokens = tokens + shared(sample.tokens)
            turn, shown = _act(sandbox, chat.decode(sample.tokens), sample, time.monotonic() - start, config)
            turns.append(turn)
            on_turn(turn)
            if not sample.stopped:
                cut_by_context = budget < config.turn_tokens
                ending = Ending.CONTEXT_LIMIT if cut_by_context else Ending.GENERATION_LIMIT
                break
            if not shown:
                ending = Ending.FINAL
                break
            tokens = tokens + shared(chat.observations(shown, stopped=sample.tokens[-1] in chat.stop_tokens))
            del sample, shown  # not to be kept while the next turn is waited for
        patch = _patch_of(sandbox, task, sandboxes, config.patch_bytes)
    return Rollout(
        task.instance_id, *_arrays(tokens, sampled), tuple(turns), ending, patch, time.monotonic() - began
    )


def _patch_of(sandbox: Sandbox, task: Task, sandboxes: SandboxBackend, limit: int) -> bytes:
    """Capture the patch. What git cannot read in time is the agent's doing, and no patch, where git can without it.

    Else a pipe in place of .gitattributes, say, would be an infrastructure fault, and cost the agent nothing.
    """
    try:
        return capture_patch(sandbox, task, limit)
    except GitTimeout:
        with closing(sandboxes.open(task)) as untouched:
            capture_patch(untouched, task, limit)
        return b""


def _act(
    sandbox: Sandbox, text: str, sample: Sample, sampling_seconds: float, config: TrainingConfig
) -> tuple[Turn, list[str]]:
    """Run the turn's calls in order. Returns the turn, and what the policy is shown: nothing ends the attempt."""
    commands: list[str] = []
    results: list[CommandResult] = []
    errors: list[str] = []
    shown: list[str] = []
    start = time.monotonic()
    for call in parse_tool_calls(text) if sample.stopped else []:
        if call.command is None:
            errors.append(call.error or "")
            shown.append(errors[-1])
            continue
        commands.append(call.command)
        # Four bytes a character at most, and half of the output is kept from its end.
        output_bytes = 8 * config.observation_chars
        result = sandbox.exec(call.command, timeout=config.tool_timeout, output_bytes=output_bytes)
        shown.append(observation(result, config.observation_chars))
        results.append(_as_shown(result, config.observation_chars))
    turn = Turn(
        text,
        len(sample.tokens),
        tuple(commands),
        tuple(results),
        tuple(errors),
        sampling_seconds,
        time.monotonic() - start,
    )
    return turn, shown


def _as_shown(result: CommandResult, limit: int) -> CommandResult:
    """Return a result without the output that the policy is not shown, which may be many times as long.

    The note that a sandbox leaves for what it left out itself is output here.
    """
    cut = max(0, len(result.output.rstrip("\n")) - limit)
    if not cut:
        return result
    left_out = len(result.output[:cut].encode("utf-8", "surrogatepass"))
    return replace(result, output=result.output[cut:], truncated_bytes=result.truncated_bytes + left_out)


def _arrays(
    tokens: list[int], sampled: list[tuple[int, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    last, logprobs_of_last = sampled[-1] if sampled else (len(tokens), np.zeros(0, np.float32))
    length = last + len(logprobs_of_last)
    mask = np.zeros(length, dtype=bool)
    logprobs = np.zeros(length, dtype=np.float32)
    for position, values in sampled:
        mask[position : position + len(values)] = True
        logprobs[position : position + len(values)] = values
    return np.array(tokens[:length], dtype=np.int32), mask, logprobs
