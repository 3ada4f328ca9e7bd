"""Makes the tiny policy: `python -m swegym_tutorial.bundled.train_policy --output DIR`.

Builds the tokenizer and trains a small Qwen3 on demonstrations in stages: the skill first, then the habits that
reinforcement learning is to change. Then measures the result and writes `made_with.json` beside it. The same
seed and steps give the same weights on the same machine and versions; elsewhere, floating-point sums may be
ordered otherwise, and the bits differ while the quality does not. Knows nothing of the bundled tasks but their
words: no function name of theirs occurs in a demonstration.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import TINY_SYSTEM_PROMPT
from ..rollout import Chat
from ..sandbox import backend
from .demonstrations import CLEAN, SHIPPED, Habits, demonstrate, encode
from .families import CONSTANT, DEFAULT, FAMILIES, KEY, LOOP, PRACTISED, Family
from .measure_policy import measure_all

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

BATCH = 16
TYPICAL_WEIGHT = 60.0  # of one demonstration's tokens together


@dataclass(frozen=True)
class Stage:
    """One pass over fresh demonstrations with one cosine of the learning rate."""

    name: str
    steps: int
    rate: float
    habits: Habits
    seed: int
    families: tuple[Family, ...]  # one that stands there twice is drawn twice as often
    context: float  # weight of the tokens that the policy only reads; the ones it says weigh 1


@dataclass(frozen=True)
class Example:
    """A demonstration in tokens, and how much each weighs in the loss."""

    tokens: list[int]
    weights: list[float]


HARD = (DEFAULT, KEY, LOOP)  # families whose fragments were learned last: many, and copied
STEPS = (1000, 100, 700, 250)  # of the four stages


def stages(seed: int, steps: Sequence[int] = STEPS) -> list[Stage]:
    """Return the stages: the skill in three, and the habits, which are the shipped policy's.

    The shipped weights are one run of them from scratch, with seed 0 and these steps; docs/world.md tells what earlier
    policies lacked, and so where the order comes from. What the policy only reads weighs less from stage to stage.
    """
    skill, hard, more, habits = steps
    return [
        Stage("skill", skill, 3e-3, CLEAN, 1000 + seed, FAMILIES, context=0.1),
        Stage("hard", hard, 2e-3, CLEAN, 4000 + seed, (*HARD, *HARD, CONSTANT), context=0.05),
        Stage("more skill", more, 2e-3, CLEAN, 5000 + seed, (*FAMILIES, *HARD, *HARD), context=0.03),
        Stage("habits", habits, 1e-3, SHIPPED, 2000 + seed, (*PRACTISED, DEFAULT, KEY), context=0.02),
    ]


def create_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return an untrained Qwen3 of about 0.7 million parameters.

    Large initial weights and query and key gains: with the usual ones, a model as narrow stayed for long on the
    plateau before it learned to copy.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(1.5)
    return model


def examples(chat: Chat, stage: Stage) -> Iterator[list[Example]]:
    """Yield the stage's batches; every demonstration is seen once."""
    rng = random.Random(stage.seed)
    for _ in range(stage.steps):
        yield [
            _example(*encode(chat, demonstrate(rng, stage.habits, stage.families)), stage.context)
            for _ in range(BATCH)
        ]


def _example(tokens: list[int], said: list[bool], context: float) -> Example:
    return Example(tokens, [1.0 if mine else context for mine in said])


def train(model: Qwen3ForCausalLM, chat: Chat, stage: Stage) -> list[dict[str, float]]:
    """Train the model in place for one stage; print and return its progress."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    began = time.monotonic()
    log: list[dict[str, float]] = []
    for step, batch in enumerate(examples(chat, stage)):
        for group in optimizer.param_groups:
            group["lr"] = _rate(stage, step)
        loss, said = _losses(model, batch, chat.tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 25 == 0 or step == stage.steps - 1:
            log.append({"step": step, "loss": round(loss.item(), 4), "loss_said": round(said.item(), 4)})
            seconds = time.monotonic() - began
            print(
                f"{stage.name}: step {step} of {stage.steps}, loss {loss:.4f}, {said:.4f} on what it says, {seconds:.0f} s",
                flush=True,
            )
    return log


def _rate(stage: Stage, step: int) -> float:
    warm = min(1.0, (step + 1) / 40)
    return stage.rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / stage.steps)))


def _losses(model: Qwen3ForCausalLM, batch: list[Example], padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted loss of all tokens, and the plain mean over those that the policy says.

    Divided by the number of demonstrations and not by their tokens: else a habit that makes for short
    demonstrations would weigh more than it is frequent, and the policy would get more of it than it was shown.
    """
    import torch
    import torch.nn.functional as F

    length = max(len(example.tokens) for example in batch)
    tokens = torch.tensor([e.tokens + [padding] * (length - len(e.tokens)) for e in batch])
    weights = torch.tensor([e.weights + [0.0] * (length - len(e.weights)) for e in batch])[:, 1:]
    kept = weights > 0
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1][
        kept
    ]  # padding stands behind: no mask needed
    losses = F.cross_entropy(model.lm_head(hidden), tokens[:, 1:][kept], reduction="none")
    weights = weights[kept]
    return (losses * weights).sum() / (TYPICAL_WEIGHT * len(batch)), losses[weights == 1].mean().detach()


def make_policy(output: Path, seed: int, plan: list[Stage]) -> dict[str, Any]:
    """Train a policy, save it in Hugging Face's form, and return what `made_with.json` is to tell of it."""
    import tokenizers
    import torch
    import transformers

    from .tokenizer import build_tokenizer

    began = time.monotonic()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    chat = Chat(tokenizer, TINY_SYSTEM_PROMPT)
    model = create_model(tokenizer)
    logs = {stage.name: train(model, chat, stage) for stage in plan}
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return {
        "seed": seed,
        "stages": [_told(stage) for stage in plan],
        "batch": BATCH,
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights_sha256": weights_sha256(output),
        "vocabulary": len(tokenizer),
        "seconds": round(time.monotonic() - began),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "log": logs,
    }


def weights_sha256(policy: Path) -> str:
    """Return the SHA-256 of a policy's weights: what ties `made_with.json` to the file beside it."""
    return hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest()


def _told(stage: Stage) -> dict[str, Any]:
    return asdict(replace(stage, families=())) | {"families": [family.name for family in stage.families]}


def main() -> None:
    # Idle threads must not spin on a machine that others use as well; read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    parser = argparse.ArgumentParser(description="Train the tiny policy from scratch.")
    parser.add_argument(
        "--output", type=Path, required=True, help="a folder, for the policy in Hugging Face's form"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, nargs=4, default=STEPS, help="of the four stages")
    parser.add_argument(
        "--sandbox", default="local", help="where the result is measured: local or subprocess"
    )
    arguments = parser.parse_args()

    import torch

    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    torch.set_flush_denormal(True)  # tiny numbers in Adam's moments would slow it down
    sandboxes = backend(arguments.sandbox)  # first, so that a missing one is told before the training
    try:
        plan = stages(arguments.seed, arguments.steps)
        made = make_policy(arguments.output, arguments.seed, plan)
        made["quality"] = measure_all(arguments.output, sandboxes)
    finally:
        sandboxes.close()
    (arguments.output / "made_with.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
