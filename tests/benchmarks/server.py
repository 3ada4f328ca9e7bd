"""Sample from and train the tiny policy: the local server, asked by the real SDK, against plain transformers.

    python tests/benchmarks/server.py [--attempts 1 16 64] [--turns 4] [--longer 1] [--rank 16] [--threads N] [--repeats 3]

Sampling: so many attempts at the bundled tasks side by side, each of several turns that begin with all earlier ones,
an observation between. Numbers of tokens are drawn once, and the same for all ways. *One by one* is what one writes
first: `generate` for each turn, its log-probabilities kept. *Padded* is `generate` on that turn of all attempts, padded
at the left; it goes on until the longest is done, and what is beyond an attempt's own tokens is not counted. Both have
the adapter merged into the model. Training: forward_backward and optim_step on so many sequences, against peft with
AdamW, a sequence at a time, and all of them in one batch, padded at the right.

Goal: at least twice as fast as one by one with 16 and more. Both sides have torch's default of threads unless told
otherwise. The server is a process of its own, the clients are threads of this one; the ways take turns, and the best
of the repeats counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import tinker
import torch
import transformers
from tinker import types
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from swegym_tutorial.bundled import POLICY
from swegym_tutorial.config import TINY_SYSTEM_PROMPT
from swegym_tutorial.minibatch import datum
from swegym_tutorial.rollout import Chat
from swegym_tutorial.server.process import LocalServer
from swegym_tutorial.tasks import load_tasks

ALPHA = 32  # the server's
RATE = 1e-4
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Attempt:
    """What is given of an attempt; what is sampled is the model's affair, but not how much."""

    prompt: list[int]
    sampled: list[int]  # tokens of each turn
    observations: list[list[int]]  # what follows each turn


def attempts_of(count: int, turns: int, longer: int = 1) -> list[Attempt]:
    """Prompts of the bundled tasks, turns of 8 to 24 tokens, and pieces of text of 10 to 40 as observations."""
    chat = Chat(AutoTokenizer.from_pretrained(POLICY), TINY_SYSTEM_PROMPT)
    tasks, random = load_tasks("bundled:all", split=None), np.random.default_rng(0)
    made = []
    for n in range(count):
        task = tasks[n // 8 % len(tasks)]  # in groups of eight, as in training
        sizes = (longer * random.integers(8, 25, turns)).tolist()
        texts = [(task.patch * longer)[: longer * int(random.integers(20, 80))] for _ in sizes]
        shown = [chat.observations([text], stopped=False) for text in texts]
        made.append(Attempt(chat.prompt(task), sizes, shown))
    return made


# -- Sampling ------------------------------------------------------------------------------------------


def by_server(client: tinker.SamplingClient, attempts: Sequence[Attempt]) -> None:
    def attempt(given: Attempt) -> None:
        tokens = list(given.prompt)
        for size, observation in zip(given.sampled, given.observations, strict=True):
            asked = types.SamplingParams(max_tokens=size, temperature=1.0, stop=[])
            answer = client.sample(types.ModelInput.from_ints(tokens), 1, asked).result().sequences[0]
            assert len(answer.tokens) == size == len(answer.logprobs or [])
            tokens += [*answer.tokens, *observation]

    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(attempt, attempts))


def generated(model: Any, prompts: list[list[int]], size: int) -> list[list[int]]:
    """Sample so many tokens for each prompt, and their log-probabilities, with plain `generate`."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        answer = model.generate(
            tokens, attention_mask=seen, max_new_tokens=size, do_sample=True, temperature=1.0, top_k=0,
            use_cache=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        new = answer.sequences[:, width:]
        logprobs = torch.stack(answer.logits, 1).log_softmax(-1).gather(2, new[:, :, None])
    assert logprobs.shape == (len(prompts), size, 1)
    return new.tolist()


def padded(model: Any, attempts: Sequence[Attempt]) -> None:
    tokens = [list(attempt.prompt) for attempt in attempts]
    for turn in range(len(attempts[0].sampled)):
        sizes = [attempt.sampled[turn] for attempt in attempts]
        said = generated(model, tokens, max(sizes))
        for n, attempt in enumerate(attempts):
            tokens[n] += [*said[n][: sizes[n]], *attempt.observations[turn]]


def one_by_one(model: Any, attempts: Sequence[Attempt]) -> None:
    for attempt in attempts:
        padded(model, [attempt])


# -- Training ------------------------------------------------------------------------------------------


def sequences_of(attempts: Sequence[Attempt]) -> list[np.ndarray]:
    """Attempts of one to all turns, with sampled tokens that are made up: int32 (tokens,)."""
    random = np.random.default_rng(1)
    made = []
    for attempt in attempts:
        tokens = list(attempt.prompt)
        for n in range(int(random.integers(1, len(attempt.sampled) + 1))):
            tokens += [*random.integers(3, 600, attempt.sampled[n]).tolist(), *attempt.observations[n]]
        made.append(np.array(tokens, np.int32))
    return made


def update(model: Any, optimizer: Any, batches: list[torch.Tensor]) -> None:
    """One step of PPO's loss on batches (rows, tokens), -1 where they are padded."""
    for tokens in batches:
        inputs, targets = tokens[:, :-1].clamp(min=0), tokens[:, 1:]
        logits = model(input_ids=inputs, attention_mask=(tokens[:, :-1] >= 0).long(), use_cache=False).logits
        logprobs = logits.log_softmax(-1).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.28)) * 1e-3
        loss[targets >= 0].sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trained_by_server(client: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """Both calls are sent before the first is answered, as the package does it."""
    forward = client.forward_backward(data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28})
    step = client.optim_step(types.AdamParams(learning_rate=RATE, grad_clip_norm=1.0))
    assert len(forward.result().loss_fn_outputs) == len(data)
    step.result()


# -- Both ----------------------------------------------------------------------------------------------


def plain_model(rank: int, merged: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # nothing stops before its number of tokens
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=LAYERS))
    return adapted.merge_and_unload() if merged else adapted.eval()


def rates(repeats: int, ways: Sequence[tuple[int, Callable[[], None]]]) -> list[float]:
    """Return the tokens per second of each way, told with its tokens; the best of its repeats. They take turns."""
    found = [0.0] * len(ways)
    for _ in range(repeats):
        for n, (tokens, way) in enumerate(ways):
            began = time.perf_counter()
            way()
            found[n] = max(found[n], tokens / (time.perf_counter() - began))
    return found


def sampled(attempts: Sequence[Attempt]) -> int:
    return sum(sum(attempt.sampled) for attempt in attempts)


def told(what: str, count: int, tokens: int, found: list[float]) -> None:
    ours, first, second = found
    goal = ("met" if ours >= 2 * first else "MISSED") if count >= 16 else ""
    print(
        f"| {what} | {count:3} | {tokens:6,} | {ours:6,.0f} | {first:6,.0f} | {second:6,.0f} "
        f"| {ours / first:5.1f} | {ours / second:4.1f} | {goal:6} |",
        flush=True,
    )


def measure(server: LocalServer, args: argparse.Namespace) -> None:
    service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    trainer = service.create_lora_training_client("tiny", rank=args.rank, seed=0, train_unembed=False)
    merged, adapted = plain_model(args.rank, merged=True), plain_model(args.rank, merged=False)
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=RATE)
    everyone = attempts_of(max(args.attempts), args.turns, args.longer)
    sequences = sequences_of(everyone)
    by_server(trainer.save_weights_and_get_sampling_client(), everyone[:2])  # what is only slow at first
    for n in args.attempts:
        some, few = everyone[:n], everyone[: min(n, 16)]  # one by one, more attempts take only longer
        tokens = sampled(some)
        ways: list[tuple[int, Callable[[], None]]] = [
            # A version of its own each time: nothing of the last repeat is remembered.
            (tokens, lambda some=some: by_server(trainer.save_weights_and_get_sampling_client(), some)),
            (sampled(few), lambda few=few: one_by_one(merged, few)),
            (tokens, lambda some=some: padded(merged, some)),
        ]
        told("sampled", n, tokens, rates(args.repeats, ways))
    for n in args.attempts:
        chosen = sequences[:n]
        tokens = sum(len(s) - 1 for s in chosen)
        data = [datum(s, np.full(len(s), -3, np.float32), np.full(len(s), 1e-3, np.float32)) for s in chosen]
        single = [torch.from_numpy(s.astype(np.int64))[None] for s in chosen]
        batch = [pad_sequence([row[0] for row in single], batch_first=True, padding_value=-1)]
        ways = [
            (tokens, lambda data=data: trained_by_server(trainer, data)),
            (tokens, lambda single=single: update(adapted, optimizer, single)),
            (tokens, lambda batch=batch: update(adapted, optimizer, batch)),
        ]
        told("trained", n, tokens, rates(args.repeats, ways))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, nargs="+", default=[1, 16, 64], help="side by side")
    parser.add_argument("--turns", type=int, default=4, help="of an attempt")
    parser.add_argument("--longer", type=int, default=1, help="times as long turns and observations")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    parser.add_argument("--repeats", type=int, default=3, help="of which the best counts")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    print(
        f"{args.threads} threads, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; tokens per second\n"
    )
    print(
        "| what    | side by side | tokens | server | one by one | padded | ratio to one by one | to padded | goal |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServer({"tiny": POLICY}, Path(folder), threads=args.threads) as server,
    ):
        measure(server, args)


if __name__ == "__main__":
    main()
