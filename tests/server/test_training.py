"""The trainer against plain transformers and autograd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swegym_tutorial.server import training
from swegym_tutorial.server.models import BaseModel
from swegym_tutorial.server.records import ALPHA, AdamStep, Datum, LoraSpec, LossName, TrainBatch, UserError
from swegym_tutorial.server.training import Trainer, trainable_layers

from .conftest import CONFIGS, VOCAB

SPEC = LoraSpec(rank=4, train_unembed=False, seed=5)


def make_data(sizes: tuple[int, ...] = (7, 12, 3), seed: int = 0) -> list[Datum]:
    random = np.random.default_rng(seed)
    return [
        Datum(
            tokens=random.integers(2, len(VOCAB), size),
            targets=random.integers(2, len(VOCAB), size),
            weights=random.normal(size=size).astype(np.float32),
            logprobs=random.normal(-3, 0.5, size).astype(np.float32),
            advantages=random.normal(size=size).astype(np.float32),
        )
        for size in sizes
    ]


def with_adapter(base: BaseModel, spec: LoraSpec = SPEC, name: str = "f") -> Trainer:
    """A trainer whose adapter's B isn't zero, so that both A and B have a gradient."""
    base.trainer.create(name, spec)
    weights = base.trainer.weights(name)
    torch.manual_seed(1)
    base.trainer.load(name, {k: torch.randn_like(v) * 0.05 for k, v in weights.items()}, None)
    return base.trainer


def plain_logprobs(
    folder: Path, weights: dict[str, torch.Tensor], rank: int, data: list[Datum]
) -> list[torch.Tensor]:
    """Each datum's log-probabilities from transformers alone, the adapter added to the weights by hand."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    changed = {}
    for layer in {key[:-2] for key in weights}:
        delta = ALPHA / rank * weights[f"{layer}.B"] @ weights[f"{layer}.A"]
        changed[f"{layer}.weight"] = model.get_parameter(f"{layer}.weight").detach() + delta
    answers = []
    for datum in data:
        inputs = (torch.from_numpy(datum.tokens)[None],)
        logits = torch.func.functional_call(model, changed, inputs, tie_weights=False).logits[0]
        answers.append(
            torch.log_softmax(logits, -1).gather(1, torch.from_numpy(datum.targets)[:, None])[:, 0]
        )
    return answers


def test_log_probabilities_are_those_of_transformers(base: BaseModel) -> None:
    data = make_data()
    trainer = with_adapter(base)
    answer = trainer.run("f", TrainBatch(data, LossName.CROSS_ENTROPY, backward=False))
    expected = plain_logprobs(base.folder, trainer.weights("f"), 4, data)
    for got, wanted in zip(answer.logprobs, expected, strict=True):
        assert np.abs(got - wanted.detach().numpy()).max() < 1e-4
    assert answer.metrics["loss:sum"] == pytest.approx(
        -sum(float(lp.detach() @ torch.from_numpy(d.weights)) for lp, d in zip(expected, data, strict=True)),
        abs=1e-3,
    )


def cross_entropy(lp: torch.Tensor, d: Datum) -> torch.Tensor:
    return -(lp * torch.from_numpy(d.weights)).sum()


def importance_sampling(lp: torch.Tensor, d: Datum) -> torch.Tensor:
    return -((lp - torch.from_numpy(d.logprobs)).exp() * torch.from_numpy(d.advantages)).sum()


def ppo(lp: torch.Tensor, d: Datum) -> torch.Tensor:
    total = torch.tensor(0.0)
    for ratio, advantage in zip(
        (lp - torch.from_numpy(d.logprobs)).exp(), d.advantages.tolist(), strict=True
    ):
        bounded = min(max(ratio, torch.tensor(0.9)), torch.tensor(1.5))
        total = total - min(ratio * advantage, bounded * advantage)
    return total


@pytest.mark.parametrize(
    "loss, formula",
    [
        (LossName.CROSS_ENTROPY, cross_entropy),
        (LossName.IMPORTANCE_SAMPLING, importance_sampling),
        (LossName.PPO, ppo),
    ],
)
def test_gradients_are_those_of_autograd(
    base: BaseModel, loss: LossName, formula: Callable[[torch.Tensor, Datum], torch.Tensor]
) -> None:
    data = make_data()
    trainer = with_adapter(base)
    answer = trainer.run("f", TrainBatch(data, loss, clip_low=0.9, clip_high=1.5))
    weights = {key: value.requires_grad_() for key, value in trainer.weights("f").items()}
    logprobs = plain_logprobs(base.folder, weights, 4, data)
    total = sum(formula(lp, datum) for lp, datum in zip(logprobs, data, strict=True))
    total.backward()
    assert answer.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-4)
    for key, parameter in trainer._clients["f"].parameters.items():
        assert torch.allclose(parameter.grad, weights[key].grad, rtol=1e-3, atol=1e-4), key
        assert parameter.grad.abs().max() > 1e-3


@pytest.mark.parametrize(
    "ratio, advantage, flows",
    [
        (1.4, 1.0, False),
        (1.4, -1.0, True),
        (0.6, -1.0, False),
        (0.6, 1.0, True),
        (1.0, 1.0, True),
        (1.0, -1.0, True),
    ],
)
def test_ppo_clips_at_both_ends(base: BaseModel, ratio: float, advantage: float, flows: bool) -> None:
    trainer = with_adapter(base)
    (datum,) = make_data((6,))
    now = trainer.run("f", TrainBatch([datum], LossName.CROSS_ENTROPY, backward=False)).logprobs[0]
    sampled = Datum(
        datum.tokens,
        datum.targets,
        logprobs=(now - np.log(ratio)).astype(np.float32),
        advantages=np.full(6, advantage, np.float32),
    )
    answer = trainer.run("f", TrainBatch([sampled], LossName.PPO, clip_low=0.8, clip_high=1.28))
    assert (trainer.step("f", AdamStep())["grad_norm"] > 1e-3) == flows
    assert answer.metrics["clipped_tokens:sum"] == (0 if flows else 6)
    bounded = min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
    assert answer.metrics["loss:sum"] == pytest.approx(-6 * bounded, rel=1e-4)


def test_gradients_add_up_until_the_step(base: BaseModel) -> None:
    data = make_data()
    trainer = with_adapter(base)
    trainer.run("f", TrainBatch(data, LossName.CROSS_ENTROPY))
    whole = [p.grad.clone() for p in trainer._clients["f"].parameters.values()]
    trainer.load("f", trainer.weights("f"), None)  # drops the gradient
    for part in (data[:1], data[1:]):
        trainer.run("f", TrainBatch(part, LossName.CROSS_ENTROPY))
        trainer.run("f", TrainBatch(part, LossName.CROSS_ENTROPY, backward=False))
    parts = [p.grad for p in trainer._clients["f"].parameters.values()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, parts, strict=True))
    trainer.step("f", AdamStep())
    with pytest.raises(UserError, match="forward_backward first"):
        trainer.step("f", AdamStep())


def test_a_batch_that_fails_leaves_the_gradient_as_it_was(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training.MICRO_BATCH_TOKENS, "cpu", 1)  # a datum a time
    data = make_data()
    trainer = with_adapter(base)
    trainer.run("f", TrainBatch(data, LossName.IMPORTANCE_SAMPLING))
    before = [p.grad.clone() for p in trainer._clients["f"].parameters.values()]
    far = Datum(*data[2].__dict__.values())
    far.logprobs[:] = -200
    with pytest.raises(UserError, match="ratio is not finite"):
        trainer.run("f", TrainBatch([data[0], data[1], far], LossName.IMPORTANCE_SAMPLING))
    after = [p.grad for p in trainer._clients["f"].parameters.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_is_adamw_after_clipping(base: BaseModel) -> None:
    trainer = with_adapter(base)
    trainer.run("f", TrainBatch(make_data(), LossName.CROSS_ENTROPY))
    expected = [torch.nn.Parameter(p.detach().clone()) for p in trainer._clients["f"].parameters.values()]
    grads = [p.grad.clone() for p in trainer._clients["f"].parameters.values()]
    norm = float(torch.stack([g.norm() for g in grads]).norm())
    optimizer = torch.optim.AdamW(expected, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for parameter, grad in zip(expected, grads, strict=True):
        parameter.grad = grad * 0.5 / norm
    optimizer.step()
    told = trainer.step("f", AdamStep(0.01, 0.8, 0.9, 1e-6, 0.1, grad_clip_norm=0.5))
    assert told["grad_norm"] == pytest.approx(norm, rel=1e-4) and told["learning_rate"] == 0.01
    for wanted, got in zip(expected, trainer.weights("f").values(), strict=True):
        assert torch.allclose(wanted, got, atol=1e-5)


def test_seeds_decide_the_start_and_nothing_else(base: BaseModel) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("f", 1), ("b", 1), ("c", 2), ("d", None), ("e", None)):
        base.trainer.create(name, LoraSpec(4, seed=seed))
    assert torch.equal(state, torch.random.get_rng_state())
    first = {name: next(iter(base.trainer.weights(name).values())) for name in "fbcde"}
    assert torch.equal(first["f"], first["b"])
    for one, other in ("fc", "fd", "de"):
        assert not torch.allclose(first[one], first[other])


def test_a_fresh_adapter_changes_nothing_and_adapters_keep_apart(base: BaseModel) -> None:
    data = make_data()
    batch = TrainBatch(data, LossName.CROSS_ENTROPY, backward=False)
    expected = plain_logprobs(base.folder, {}, 1, data)
    for name in ("f", "b"):
        base.trainer.create(name, SPEC)
        got = base.trainer.run(name, batch).logprobs
        assert all(np.abs(g - e.detach().numpy()).max() < 1e-4 for g, e in zip(got, expected, strict=True))
    untouched = base.trainer.run("b", batch).logprobs
    base.trainer.run("f", TrainBatch(data, LossName.CROSS_ENTROPY))
    base.trainer.step("f", AdamStep(0.1))
    assert np.abs(base.trainer.run("f", batch).logprobs[0] - expected[0].detach().numpy()).max() > 0.1
    assert all(
        np.array_equal(a, b) for a, b in zip(untouched, base.trainer.run("b", batch).logprobs, strict=True)
    )
    with pytest.raises(UserError, match="without a gradient"):
        base.trainer.step("b", AdamStep())
    base.trainer.delete("f")
    base.trainer.create("f", SPEC)
    again = base.trainer.run("f", batch).logprobs
    assert all(np.abs(g - e.detach().numpy()).max() < 1e-4 for g, e in zip(again, expected, strict=True))


def test_a_loaded_state_continues_as_the_saved_one(base: BaseModel) -> None:
    batch = TrainBatch(make_data(), LossName.CROSS_ENTROPY)
    trainer = with_adapter(base)
    trainer.run("f", batch)
    trainer.step("f", AdamStep(0.01))
    weights, optimizer = trainer.weights("f"), trainer.optimizer_state("f")
    trainer.run("f", batch)
    trainer.step("f", AdamStep(0.01))
    trainer.create("b", SPEC)
    trainer.load("b", weights, optimizer)
    trainer.run("b", batch)
    trainer.step("b", AdamStep(0.01))
    expected = trainer.weights("f")
    assert all(torch.equal(value, expected[key]) for key, value in trainer.weights("b").items())
    trainer.load("b", weights, None)
    trainer.run("b", batch)
    trainer.step("b", AdamStep(0.01))
    assert not all(torch.equal(value, expected[key]) for key, value in trainer.weights("b").items())
    trainer.create("c", LoraSpec(8))
    with pytest.raises(UserError, match="another rank"):
        trainer.load("c", weights, optimizer)


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_found_in_every_architecture(folders: dict[str, Path], name: str) -> None:
    found = trainable_layers(AutoModelForCausalLM.from_pretrained(folders[name]))
    attention, mlp = {"gpt_neox": (2, 2), "gpt2": (2, 2)}.get(name, (4, 3))  # a layer, of which there are two
    assert [len(names) for names in found.values()] == [2 * attention, 2 * mlp, 1]


def test_what_cannot_be_trained_is_refused(folders: dict[str, Path]) -> None:
    for wrong in ({"rank": 0}, {"rank": 100_000}, {"rank": 4, "seed": -1}):
        with pytest.raises(UserError, match=r"rank|seed"):
            LoraSpec(**wrong)
    with pytest.raises(UserError, match="nothing to train"):
        LoraSpec(4, train_attn=False, train_mlp=False, train_unembed=False)
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"])
    trainer = Trainer(model)
    trainer._layers["train_mlp"] = []  # as in an architecture whose layers have other names
    with pytest.raises(UserError, match="train_mlp: Qwen3ForCausalLM has no layers"):
        trainer.create("f", LoraSpec(4))
