"""Every setting of a run in one flat, frozen record, and the two presets.

Knows nothing of the rest of the package. The names are those of the published recipe (GRPO on SWE-Gym);
`laptop()` runs anywhere in minutes, `spindle()` is the full run against a Tinker-compatible server.
"""

from __future__ import annotations

import json
import math
import typing
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SYSTEM_PROMPT = """\
You are a software engineer at work in a git repository at /testbed. You have one tool, bash, which runs a \
command there; there is no network. Find the cause of the issue that the user describes and fix it in the \
source with the smallest change that is right. Look before you edit. Do not weaken, skip or delete tests. \
When the fix is in place, say in a sentence or two what you changed, without a tool call: that ends your work."""

TINY_SYSTEM_PROMPT = "You are a coding agent. Fix the bug with the bash tool."


@dataclass(frozen=True)
class TrainingConfig:
    """The settings of one run. Lengths are in tokens, times in seconds unless the comment says otherwise."""

    # What is trained, and where
    preset: str = "laptop"  # laptop | spindle: which preset this began as
    base_model: str = "tiny-qwen3"  # the name that the training server knows the model by
    tokenizer: str | None = None  # a path or a hub name; None: what the server says
    tokenizer_revision: str | None = None  # pins the tokenizer's files on the hub
    tasks: str = "bundled"  # bundled | swegym | a path to a JSONL file
    sandbox: str = "auto"  # auto (local, else docker) | local | docker | modal | subprocess
    clients: int = 1  # LoRA adapters trained side by side on one server
    lora_rank: int = 16  # alpha is the server's
    train_unembed: bool = False  # whether the output layer gets an adapter too
    seed: int = 0  # decides the order of the tasks, the adapters' start and the sampling

    # How long
    steps: int = 30  # batches a client; one batch = one publication of weights
    hours: float = 1.0  # training ends after these many hours since the run's start, or since its resume

    # One attempt
    system_prompt: str = TINY_SYSTEM_PROMPT
    context_tokens: int = 1024  # prompt, turns and observations together
    turn_tokens: int = 80  # at most this many sampled tokens a turn
    max_turns: int = 6
    temperature: float = 1.0
    tool_timeout: float = 10.0  # a command of the agent's is killed after this
    observation_chars: int = 1500  # of a command's output, its last ones are shown to the agent
    grading_timeout: float = 60.0  # the hidden tests are killed after this
    only_valid: bool = True  # leave out tasks that `tasks validate` has found to be broken or flaky
    share_verdicts: bool = (
        True  # identical patches of one task are graded once, unless it is known to be flaky
    )
    grade_empty_patches: bool = (
        False  # an empty patch gets a sandbox and its tests too; it earns 0 either way
    )
    patch_bytes: int = 2_000_000  # a larger patch is invalid

    # One batch
    group_size: int = 8  # attempts at one task under one policy
    min_group_size: int = 2  # a group with fewer graded attempts is dropped
    groups_per_batch: int = 8  # a batch closes when this many mixed groups are in,
    max_groups_per_batch: int | None = 8  # or this many were seen and one was kept (None: no such limit)
    max_staleness: int = (
        1  # publications that a group may be old when it is trained on; 0: none is begun early
    )
    max_fruitless_groups: int = 100  # the run stops after this many groups in a row without a mixed one
    minibatch_groups: int = 4  # groups a forward_backward and optim_step

    # The update
    kl_coef: float = 0.0  # weight of the KL term against the base model; 0 asks for no reference
    learning_rate: float = 1.3e-3  # of Adam
    warmup_steps: int = 2  # the learning rate rises linearly over this many steps
    cooldown_share: float = 0.5  # and falls linearly to 0 over this last share of `steps`; 0: it stays
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-12  # the SDK's default
    grad_clip_norm: float = 1.0
    clip_low: float = 0.8  # PPO's ratio is clipped below this
    clip_high: float = 1.28  # and above this

    # Client-side parallelism; the server's own is its business
    rollout_workers: int = 16  # attempts at once, a client
    grading_workers: int = 2  # gradings at once, a client
    inflight_groups: int = (
        4  # groups whose attempts are not all over; none starts while others wait for a worker
    )
    grading_queue_size: int = 64  # attempts waiting to be graded before rollouts wait
    completed_group_buffer: int = (
        8  # graded groups that may wait for the trainer, for each that it can still take
    )
    sandbox_cpus: float = 2.0  # cores of a sandbox (docker, modal)
    sandbox_memory_mb: int = 2048  # memory of all processes of a sandbox together
    sandbox_processes: int = 256  # processes and threads at once in a sandbox (all kinds but modal)
    sandbox_lifetime: float = 7200.0  # a sandbox ends by itself after this (docker, modal)
    sandbox_starts: int = 16  # sandboxes started at once at most: services throttle storms (docker, modal)
    attempt_retries: int = 2  # an infrastructure fault is tried again this often, after a pause

    # What goes wrong, and what is kept
    max_fault_share: float = 0.5  # a client stops where more than this share of its last `fault_window`
    fault_window: int = 64  # attempts was lost to infrastructure faults
    fault_minutes: float = 1.0  # for so long: shorter troubles are waited out
    keep_checkpoints: int = 5  # the last ones that are listed, and can be gone back to with --from-step
    episodes_gb: float = 2.0  # of recorded attempts, in 10^9 bytes: beyond it the oldest are deleted

    # Measuring
    evaluation_attempts: int = 4  # a held-out task, before and after; `evaluate` makes 8, for pass@8
    evaluation_tasks: int | None = None  # tasks of each held-out split, drawn by the seed (None: all)

    def __post_init__(self) -> None:
        positive = [
            "clients",
            "steps",
            "hours",
            "lora_rank",
            "context_tokens",
            "turn_tokens",
            "max_turns",
            "tool_timeout",
            "observation_chars",
            "grading_timeout",
            "patch_bytes",
            "group_size",
            "groups_per_batch",
            "minibatch_groups",
            "learning_rate",
            "rollout_workers",
            "grading_workers",
            "inflight_groups",
            "grading_queue_size",
            "completed_group_buffer",
            "max_fruitless_groups",
            "fault_window",
            "fault_minutes",
            "keep_checkpoints",
            "episodes_gb",
            "evaluation_attempts",
            "sandbox_cpus",
            "sandbox_memory_mb",
            "sandbox_processes",
            "sandbox_lifetime",
            "sandbox_starts",
            "grad_clip_norm",
            "clip_low",
            "adam_eps",
        ]
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{item.name} must be a finite number, not {value}")
        if self.preset not in ("laptop", "spindle"):
            raise ValueError(f"preset is laptop or spindle, not {self.preset!r}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must lie between 0 and {2**31 - 1}, not {self.seed}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {getattr(self, name)}")
        for name in ("kl_coef", "temperature", "warmup_steps", "attempt_retries", "max_staleness"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.max_groups_per_batch is not None and self.max_groups_per_batch < self.groups_per_batch:
            raise ValueError("max_groups_per_batch must be at least groups_per_batch, or none")
        if self.evaluation_tasks is not None and self.evaluation_tasks <= 0:
            raise ValueError(f"evaluation_tasks must be positive, or none, not {self.evaluation_tasks}")
        if not 2 <= self.min_group_size <= self.group_size:
            raise ValueError("min_group_size must lie between 2 and group_size: one attempt has no advantage")
        if not 0 < self.max_fault_share <= 1:
            raise ValueError(f"max_fault_share must lie in (0, 1], not {self.max_fault_share}")
        if not 0 <= self.cooldown_share <= 1:
            raise ValueError(f"cooldown_share must lie in [0, 1], not {self.cooldown_share}")
        if not self.clip_low < 1 < self.clip_high:
            raise ValueError("clip_low < 1 < clip_high must hold: they bound PPO's probability ratio")

    @classmethod
    def laptop(cls, **changes: Any) -> TrainingConfig:
        """The default: a tiny policy, bundled tasks and a server on this machine; minutes on two cores."""
        return replace(cls(), **changes)

    @classmethod
    def spindle(cls, **changes: Any) -> TrainingConfig:
        """The published full run: eight rank-32 adapters of Qwen3.5-9B at 128K context, 100 batches each."""
        config = cls(
            preset="spindle",
            base_model="qwen35-9b-lora-128k",
            tokenizer="Qwen/Qwen3.5-9B",
            tokenizer_revision="c202236235762e1c871ad0ccb60c8ee5ba337b9a",
            tasks="swegym",
            sandbox="modal",
            clients=8,
            lora_rank=32,
            seed=4242,
            steps=100,
            hours=24.0,
            system_prompt=SYSTEM_PROMPT,
            context_tokens=131_072,
            turn_tokens=8192,
            max_turns=20,
            tool_timeout=120.0,
            observation_chars=20_000,
            grading_timeout=1200.0,
            groups_per_batch=32,
            max_groups_per_batch=None,
            max_fruitless_groups=500,
            minibatch_groups=8,
            kl_coef=1e-4,
            learning_rate=1e-6,
            warmup_steps=0,
            cooldown_share=0.0,
            adam_beta2=0.95,
            rollout_workers=64,
            grading_workers=64,
            inflight_groups=32,
            sandbox_memory_mb=8192,
            sandbox_processes=4096,
            attempt_retries=4,
            fault_window=256,
            fault_minutes=30.0,
            episodes_gb=100.0,
            evaluation_tasks=32,
        )
        return replace(config, **changes)

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; what comes after the last one has that one's."""
        risen = (step + 1) / max(1, self.warmup_steps)
        cooldown = self.cooldown_share * self.steps
        left = max(1, self.steps - step) / cooldown if cooldown else 1.0
        return self.learning_rate * min(1.0, risen, left)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def with_settings(self, settings: typing.Iterable[str]) -> TrainingConfig:
        """Return a copy with `FIELD=VALUE` texts applied, as `--set` takes them.

        Raises ValueError that names the field for an unknown one or a value of the wrong type.
        """
        types = typing.get_type_hints(TrainingConfig)
        changes: dict[str, Any] = {}
        for setting in settings:
            name, equals, text = setting.partition("=")
            if not equals or name not in types:
                known = ", ".join(f.name for f in fields(self))
                raise ValueError(f"--set takes FIELD=VALUE, and {setting!r} names none of: {known}")
            changes[name] = _parse(name, text, types[name])
        return replace(self, **changes)


def _parse(name: str, text: str, kind: Any) -> Any:
    options = typing.get_args(kind) or (kind,)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    if str in options:
        return text
    try:
        value = json.loads(text.lower() if bool in options else text)
    except ValueError:
        value = text
    if bool in options and isinstance(value, bool):
        return value
    if float in options and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if int in options and isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(f"{name} takes {getattr(options[0], '__name__', options[0])}, not {text!r}")
