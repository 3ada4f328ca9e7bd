"""Measures a policy on the bundled tasks: `python -m swegym_tutorial.bundled.measure_policy [DIR]`.

Real attempts in real sandboxes, graded by the hidden tests, sampled in batches by transformers itself and not
by a training server. Also tells how well the policy does once the careful plan is forced on it: that is the
skill that it has and, by its habits, mostly doesn't use.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import TrainingConfig
from ..grading import Grader
from ..habits import habits_of, rates
from ..rollout import Chat, Ending, Rollout, Sample, generate_rollout
from ..sandbox import SandboxBackend, backend
from ..tasks import Task, load_tasks
from ..tools import parse_tool_calls
from . import POLICY
from .demonstrations import CAREFUL, Demonstration, attempt_at, call, prompt_tokens
from .generate import SEED, SPLITS, drafts
from .world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTEMPTS_AT_ONCE = 64


@dataclass(frozen=True)
class Quality:
    """What a policy did on one split. Rates are shares of attempts unless the comment says otherwise."""

    attempts: int
    resolved: float
    mixed_groups: float  # share of tasks on which some attempts succeed and others fail
    well_formed_turns: float  # share of turns
    habits: dict[str, float]  # how often each was there where it came up
    twins: dict[str, float]  # share resolved with and without a twin
    turns: float  # mean of an attempt
    tokens: float  # mean of an attempt, prompt and observations included
    families: dict[str, float]  # share resolved of each family's attempts
    endings: dict[str, int]


@dataclass(frozen=True)
class Forced:
    """What happens with the careful plan's thoughts given: share of tasks resolved."""

    greedy: float
    sampled: float  # at temperature 1: the mean probability of all right commands and the answer


@dataclass(frozen=True)
class Request:
    """A prompt that waits to be continued."""

    prompt: list[int]
    max_tokens: int
    answer: Future[Sample]


class BatchedSampler:
    """Continues the prompts of many threads together. Temperature 0 is greedy."""

    def __init__(self, model: PreTrainedModel, padding: int, end_of_turn: int, temperature: float) -> None:
        self._model = model
        self._padding = padding
        self._end = end_of_turn
        self._temperature = temperature
        self._waiting: queue.SimpleQueue[Request] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="batched-sampler", daemon=True).start()

    def sample(self, prompt: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Continue the prompt. The seed is not looked at: the batch has one random state."""
        answer: Future[Sample] = Future()
        self._waiting.put(Request(prompt, max_tokens, answer))
        return answer.result()

    def _serve(self) -> None:
        while True:
            batch = [self._waiting.get()]
            time.sleep(0.05)  # the others finish their commands and join
            while not self._waiting.empty():
                batch.append(self._waiting.get())
            try:
                samples = self._continue(batch)
            except Exception as error:
                for request in batch:
                    request.answer.set_exception(error)
                continue
            for request, sample in zip(batch, samples, strict=True):
                request.answer.set_result(sample)

    def _continue(self, batch: list[Request]) -> list[Sample]:
        import torch

        width = max(len(request.prompt) for request in batch)
        padded = torch.tensor([[self._padding] * (width - len(r.prompt)) + r.prompt for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
        how: dict[str, Any] = {"do_sample": False}
        if self._temperature > 0:
            how = {"do_sample": True, "temperature": self._temperature, "top_k": 0, "top_p": 1.0}
        output = self._model.generate(  # type: ignore[operator]
            padded,
            attention_mask=mask,
            max_new_tokens=max(request.max_tokens for request in batch),
            return_dict_in_generate=True,
            output_logits=True,
            **how,
        )
        new = output.sequences[:, width:]
        scaled = torch.stack(output.logits, dim=1) / (self._temperature or 1.0)
        logprobs = torch.log_softmax(scaled, -1).gather(-1, new[..., None])[..., 0]
        return [
            self._cut(row.tolist(), values.tolist(), request.max_tokens)
            for row, values, request in zip(new, logprobs, batch, strict=True)
        ]

    def _cut(self, tokens: list[int], logprobs: list[float], budget: int) -> Sample:
        end = tokens.index(self._end) + 1 if self._end in tokens else len(tokens)
        length = min(end, budget)
        return Sample(tokens[:length], logprobs[:length], stopped=tokens[length - 1] == self._end)


def well_formed(text: str) -> bool:
    """Tell whether a turn is one thought and then one call or a plain answer, to the letter."""
    thought, closed, said = text.partition("\n</think>\n\n")
    if not closed or "<" in thought:
        return False
    calls = parse_tool_calls(text)
    if calls:
        return calls[0].command is not None and text == call(thought, calls[0].command)
    return bool(said.strip()) and "<" not in said


def measure(
    model: PreTrainedModel,
    chat: Chat,
    tasks: Sequence[Task],
    sandboxes: SandboxBackend,
    *,
    attempts: int,
    temperature: float,
) -> Quality:
    """Make `attempts` attempts at each task, grade them and count."""
    config = TrainingConfig.laptop()
    tokenizer = chat.tokenizer
    sampler = BatchedSampler(model, tokenizer.pad_token_id, tokenizer.eos_token_id, temperature)
    grader = Grader(sandboxes, config)

    def one(task: Task) -> tuple[Task, Rollout, float]:
        rollout = generate_rollout(task, sampler, chat, sandboxes, config)
        return task, rollout, grader.grade(task, rollout.patch).reward

    with ThreadPoolExecutor(ATTEMPTS_AT_ONCE) as pool:
        return _summary(list(pool.map(one, [task for task in tasks for _ in range(attempts)])))


def _summary(done: list[tuple[Task, Rollout, float]]) -> Quality:
    worlds = {f"bundled__{draft.name}": draft.world for draft in drafts(SEED)}
    by_task, by_family, by_twin = (defaultdict[str, list[float]](list) for _ in range(3))
    for task, _, reward in done:
        world = worlds[task.instance_id]
        by_task[task.instance_id].append(reward)
        by_family[world.target.family.name].append(reward)
        by_twin["with" if world.twin else "without"].append(reward)
    rollouts = [rollout for _, rollout, _ in done]
    turns = sum(len(rollout.turns) for rollout in rollouts)
    formed = sum(well_formed(turn.text) for rollout in rollouts for turn in rollout.turns)
    cut = sum(rollout.ending is Ending.GENERATION_LIMIT for rollout in rollouts)
    habits = rates(habits_of(rollout.turns) for rollout in rollouts)
    n = len(done)
    return Quality(
        attempts=n,
        resolved=sum(reward for _, _, reward in done) / n,
        mixed_groups=sum(0 < sum(rewards) < len(rewards) for rewards in by_task.values()) / len(by_task),
        well_formed_turns=(formed - cut) / turns,
        habits={habit: had / of for habit, (had, of) in habits.items()},
        twins=_means(by_twin),
        turns=turns / n,
        tokens=sum(len(rollout.tokens) for rollout in rollouts) / n,
        families=_means(by_family),
        endings=dict(Counter(rollout.ending.value for rollout in rollouts)),
    )


def _means(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in groups.items()}


def forced_careful(
    model: PreTrainedModel, chat: Chat, worlds: Sequence[World], batch: int = 32
) -> dict[str, Forced]:
    """Force the thoughts of the careful plan, and see whether what it says follows: of each family, and of "all".

    Forward passes only: greedy decoding is right where each token of the commands and of the answer is the likeliest one.
    """
    found: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for start in range(0, len(worlds), batch):
        some = worlds[start : start + batch]
        for world, result in zip(some, _forced(model, chat, some), strict=True):
            found[world.target.family.name].append(result)
            found["all"].append(result)
    return {
        name: Forced(
            greedy=sum(right for right, _ in results) / len(results),
            sampled=sum(chance for _, chance in results) / len(results),
        )
        for name, results in found.items()
    }


def _forced(model: PreTrainedModel, chat: Chat, worlds: Sequence[World]) -> list[tuple[bool, float]]:
    """Return for each world whether commands and answer are right greedily, and their probability at temperature 1."""
    import torch

    rows = [_plan(chat, attempt_at(random.Random(0), world, CAREFUL)) for world in worlds]
    longest = max(len(tokens) for tokens, _ in rows)
    padding = chat.tokenizer.pad_token_id
    padded = torch.tensor([tokens + [padding] * (longest - len(tokens)) for tokens, _ in rows])
    with torch.no_grad():
        hidden = model.model(input_ids=padded).last_hidden_state  # padding stands behind: no mask needed
        results = []
        for row, (tokens, asked) in enumerate(rows):
            logprobs = torch.log_softmax(model.lm_head(hidden[row, [at - 1 for at in asked]]).float(), -1)
            wanted = torch.tensor([tokens[at] for at in asked])
            likelihood = logprobs.gather(1, wanted[:, None]).sum().item()
            results.append((bool((logprobs.argmax(-1) == wanted).all()), math.exp(likelihood)))
    return results


def _plan(chat: Chat, demonstration: Demonstration) -> tuple[list[int], list[int]]:
    """Return an attempt's tokens, and the positions of those that follow a thought: of the commands and the answer."""
    tokens = prompt_tokens(chat, demonstration.world.issue)
    asked: list[int] = []
    for step in demonstration.steps:
        thought, mark, command = step.turn.partition("\n</think>")
        tokens += chat.encode(thought + mark)
        said = chat.encode(command) + chat.stop_tokens
        asked += range(len(tokens), len(tokens) + len(said))
        tokens += said
        if step.shown is not None:
            tokens += chat.observations([step.shown], stopped=True)
    return tokens, asked


def measure_all(policy: Path, sandboxes: SandboxBackend, *, attempts: int = 8) -> dict[str, Any]:
    """Return all that is told of a policy's quality, by name; prints each part as it is found."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype="float32").eval()
    chat = Chat(tokenizer, TrainingConfig.laptop().system_prompt)
    found: dict[str, Any] = {}

    def tell(name: str, what: Quality | dict[str, Forced]) -> None:
        told = asdict(what) if isinstance(what, Quality) else {f: asdict(each) for f, each in what.items()}
        found[name] = {key: _rounded(value) for key, value in told.items()}
        print(f"{name}: {json.dumps(found[name])}", flush=True)

    for split in (split.name for split in SPLITS):
        tasks = load_tasks("bundled", split=split)
        worlds = [draft.world for draft in drafts(SEED) if draft.split == split]
        tell(f"{split}, careful plan forced", forced_careful(model, chat, worlds))
        sampled = measure(model, chat, tasks, sandboxes, attempts=attempts, temperature=1.0)
        tell(f"{split}, temperature 1", sampled)
        tell(f"{split}, greedy", measure(model, chat, tasks, sandboxes, attempts=1, temperature=0.0))
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the tiny policy on the bundled tasks.")
    parser.add_argument("policy", nargs="?", type=Path, default=POLICY)
    parser.add_argument("--attempts", type=int, default=8, help="a task and split, at temperature 1")
    parser.add_argument("--sandbox", default="local", help="local or subprocess")
    arguments = parser.parse_args()
    sandboxes = backend(arguments.sandbox)
    try:
        measure_all(arguments.policy, sandboxes, attempts=arguments.attempts)
    finally:
        sandboxes.close()


if __name__ == "__main__":
    main()
