"""Sampling against plain transformers: distributions, stops, seeds, batches that change under way, versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swegym_tutorial.server import decoding
from swegym_tutorial.server.decoding import Decoder
from swegym_tutorial.server.models import BaseModel
from swegym_tutorial.server.records import (
    ALPHA,
    AdamStep,
    Datum,
    LoraSpec,
    LossName,
    SampleJob,
    Samples,
    TrainBatch,
    UserError,
)
from swegym_tutorial.server.sampling import BASE, Adapter

from .conftest import CONFIGS, CONTEXT, EOS, VOCAB

NO_STOP = frozenset[int]()


def prompt_of(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, len(VOCAB), size)


def decoder_of(base: BaseModel, adapter: Adapter = BASE) -> Decoder:
    return Decoder(base.sampling, lambda: adapter, base.limits, base.eos, lambda: base.tokenizer)


def run(base: BaseModel, *jobs: SampleJob, adapter: Adapter = BASE) -> list[Samples]:
    decoder = decoder_of(base, adapter)
    answers: dict[int, Samples | Exception] = {}
    for n, job in enumerate(jobs):
        decoder.add(job, lambda answer, n=n: answers.__setitem__(n, answer))
    while decoder.busy:
        decoder.work(10)
    assert all(isinstance(answer, Samples) for answer in answers.values())
    return [answers[n] for n in range(len(jobs))]


def plain_logprobs(folder: Path, tokens: np.ndarray) -> torch.Tensor:
    """Log-probabilities of every token after the first, over the vocabulary, from transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(tokens)[None]).logits[0], -1)[:-1]


def test_log_probabilities_of_samples_and_prompts_are_those_of_transformers(base: BaseModel) -> None:
    jobs = [
        SampleJob(
            prompt_of(size, size), max_tokens=limit, stop_tokens=NO_STOP, temperature=temperature, top_k=top_k
        )
        for size, limit, temperature, top_k in [
            (3, 9, 1.0, -1),
            (17, 4, 0.5, -1),
            (8, 12, 1.7, 5),
            (1, 3, 0.0, -1),
        ]
    ]
    for job, answer in zip(jobs, run(base, *jobs), strict=True):
        (sequence,) = answer.sequences
        assert len(sequence.tokens) == job.max_tokens and not sequence.stopped
        whole = np.concatenate([job.prompt, sequence.tokens]).astype(np.int64)
        expected = (
            plain_logprobs(base.folder, whole).gather(1, torch.from_numpy(whole[1:, None]))[:, 0].numpy()
        )
        assert np.abs(expected[job.prompt.size - 1 :] - sequence.logprobs).max() < 1e-4
        (scored,) = run(base, SampleJob(whole, max_tokens=1, prompt_logprobs=True))
        assert np.isnan(scored.prompt_logprobs[0])
        assert np.abs(scored.prompt_logprobs[1:] - expected).max() < 1e-4


def test_topk_and_the_last_prompt_tokens(base: BaseModel) -> None:
    prompt = prompt_of(9)
    job = SampleJob(
        prompt, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=3, prompt_logprobs_last_n=4
    )
    (answer,) = run(base, job)
    best = plain_logprobs(base.folder, prompt).topk(3)
    assert np.isnan(answer.prompt_logprobs[:5]).all() and np.isfinite(answer.prompt_logprobs[5:]).all()
    assert np.array_equal(answer.topk_ids[5:], best.indices[4:].numpy())
    assert np.abs(answer.topk_logprobs[5:] - best.values[4:].numpy()).max() < 1e-4


def test_no_bit_of_a_prompts_scores_hangs_on_what_else_is_read(base: BaseModel) -> None:
    """A resumed run's references are those of a run that was left alone, however its requests come."""
    scored = [SampleJob(prompt_of(3 + n * 11 % 90, n), 1, prompt_logprobs=True) for n in range(12)]
    alone = [run(base, job)[0].prompt_logprobs for job in scored]
    others = [SampleJob(prompt_of(5 + n, n), 20, num_samples=n, stop_tokens=NO_STOP) for n in (1, 3)]
    mixed = [*scored[:3], others[0], *scored[3:7], others[1], *scored[7:]]
    for jobs in (scored, scored[::-1], mixed, others + scored):
        for job, answer in zip(jobs, run(base, *jobs), strict=True):
            if job.scores_prompt:
                wanted = next(alone[n] for n in range(len(scored)) if scored[n] is job)
                assert answer.prompt_logprobs.tobytes() == wanted.tobytes()


def test_temperature_zero_is_greedy(base: BaseModel) -> None:
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32).eval()
    jobs = [SampleJob(prompt_of(n, n), max_tokens=10, temperature=0.0) for n in (4, 11)]
    jobs += [SampleJob(job.prompt, max_tokens=10, top_k=1) for job in jobs]
    jobs += [SampleJob(job.prompt, max_tokens=10, top_p=1e-6) for job in jobs[:2]]
    for job, answer in zip(jobs, run(base, *jobs), strict=True):
        wanted = model.generate(torch.from_numpy(job.prompt)[None], max_new_tokens=10, do_sample=False)[0]
        assert answer.sequences[0].tokens.tolist() == wanted[job.prompt.size :].tolist()


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 4, 1.0), (1.0, -1, 0.6)]
)
def test_tokens_come_as_often_as_they_should(
    base: BaseModel, temperature: float, top_k: int, top_p: float
) -> None:
    prompt = prompt_of(6)
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        probabilities = (
            (model(torch.from_numpy(prompt)[None]).logits[0, -1] / temperature).softmax(-1).double()
        )
    order = probabilities.argsort(descending=True)
    before = probabilities[order].cumsum(0) - probabilities[order]
    kept = order[: top_k if top_k > 0 else None][: int((before < top_p).sum())]
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    jobs = [
        SampleJob(
            prompt,
            1,
            num_samples=200,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_tokens=NO_STOP,
        )
        for seed in range(20)
    ]
    drawn = [int(s.tokens[0]) for answer in run(base, *jobs) for s in answer.sequences]
    counts = np.bincount(drawn, minlength=len(VOCAB))
    assert counts[expected.numpy() == 0].sum() == 0
    spread = (len(drawn) * expected * (1 - expected)).sqrt().numpy()
    assert (np.abs(counts - len(drawn) * expected.numpy()) <= 4.5 * spread + 1).all()


def test_a_seed_decides_a_sample_whatever_else_is_decoded(base: BaseModel) -> None:
    job = SampleJob(prompt_of(5), max_tokens=20, num_samples=3, seed=11, stop_tokens=NO_STOP)
    (alone,) = run(base, job)
    others = [SampleJob(prompt_of(n, n), max_tokens=n, stop_tokens=NO_STOP) for n in range(2, 30, 3)]
    beside = run(base, *others[:5], job, *others[5:])[5]
    assert [s.tokens.tolist() for s in alone.sequences] == [s.tokens.tolist() for s in beside.sequences]
    assert len({tuple(s.tokens.tolist()) for s in alone.sequences}) == 3
    unseeded = [
        run(base, SampleJob(job.prompt, 20, stop_tokens=NO_STOP))[0].sequences[0].tokens for _ in "ab"
    ]
    assert not np.array_equal(*unseeded)


def test_requests_join_and_leave_under_way(base: BaseModel) -> None:
    """Each is answered as if it were alone, whenever it came."""
    jobs = [
        SampleJob(prompt_of(3 + n * 7 % 20, n), max_tokens=5 + n * 5 % 17, seed=n, stop_tokens=NO_STOP)
        for n in range(24)
    ]
    decoder, answers = decoder_of(base), dict[int, Samples | Exception]()
    waiting = list(enumerate(jobs))
    while waiting or decoder.busy:
        for n, job in waiting[:1]:
            decoder.add(job, lambda answer, n=n: answers.__setitem__(n, answer))
        waiting = waiting[1:]
        decoder.work(0)  # a single step
    for n, job in enumerate(jobs):
        (alone,) = run(base, job)
        got = answers[n]
        assert isinstance(got, Samples)
        assert np.array_equal(got.sequences[0].tokens, alone.sequences[0].tokens)
        assert np.abs(got.sequences[0].logprobs - alone.sequences[0].logprobs).max() < 1e-4


def test_more_than_fits_into_a_batch_is_answered_all_the_same(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swegym_tutorial.server.decoding.MAX_ROWS", 4)
    monkeypatch.setattr("swegym_tutorial.server.decoding.PREFILL_TOKENS", 20)
    jobs = [SampleJob(prompt_of(8, n), 3, num_samples=1 + n % 6, stop_tokens=NO_STOP) for n in range(12)]
    assert [len(answer.sequences) for answer in run(base, *jobs)] == [job.num_samples for job in jobs]


def test_the_cache_has_no_more_room_than_it_may(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 1500
    monkeypatch.setattr("swegym_tutorial.server.decoding.MAX_TOKENS", most)
    decoder, answers = decoder_of(base), list[Samples | Exception]()
    jobs = [
        SampleJob(prompt_of(2 + n * 7 % 40, n), 5 + n * 13 % 50, num_samples=1 + n % 5, stop_tokens=NO_STOP)
        for n in range(30)
    ]
    rows, held = 0, 0
    for job in jobs:
        decoder.add(job, answers.append)
        decoder.work(0)
    while decoder.busy:
        decoder.work(0)
        rows = max(rows, len(decoder._rows))
        held = max(held, int(np.prod(decoder._cache.view.capacity)))
    assert len(answers) == len(jobs) and all(isinstance(answer, Samples) for answer in answers)
    assert rows > 8 and most / 2 < held <= most
    # More than that is held for a request alone, which could not be answered else.
    decoder.add(SampleJob(prompt_of(40), 20, num_samples=30, stop_tokens=NO_STOP), answers.append)
    decoder.add(jobs[0], answers.append)
    decoder.work(0)
    assert len(decoder._rows) == 30
    while decoder.busy:
        decoder.work(1)
    assert len(answers) == len(jobs) + 2


def test_stop_tokens(base: BaseModel) -> None:
    prompt = prompt_of(6)
    free = SampleJob(prompt, max_tokens=60, num_samples=8, seed=0, stop_tokens=NO_STOP)
    (unstopped,) = run(base, free)
    assert any(EOS in s.tokens for s in unstopped.sequences)  # and went on
    assert all(len(s.tokens) == 60 and not s.stopped for s in unstopped.sequences)
    for stops, ends in ((None, {EOS}), (frozenset({7, 9}), {7, 9})):
        (answer,) = run(base, SampleJob(prompt, max_tokens=60, num_samples=8, seed=0, stop_tokens=stops))
        for sequence, whole in zip(answer.sequences, unstopped.sequences, strict=True):
            place = next((n for n, token in enumerate(whole.tokens) if token in ends), None)
            wanted = whole.tokens if place is None else whole.tokens[: place + 1]
            assert sequence.stopped == (place is not None)
            assert np.array_equal(sequence.tokens, wanted)


def test_stop_strings_end_with_the_token_that_completes_them(base: BaseModel) -> None:
    (free,) = run(base, SampleJob(prompt_of(6), max_tokens=40, seed=4, stop_tokens=NO_STOP))
    tokens = free.sequences[0].tokens.tolist()
    pair = "".join(VOCAB[token] for token in tokens[10:12])
    text = [base.tokenizer.decode(tokens[: n + 1]) for n in range(len(tokens))]
    wanted = next(n for n, so_far in enumerate(text) if pair in so_far) + 1
    (answer,) = run(
        base, SampleJob(prompt_of(6), 40, seed=4, stop_tokens=NO_STOP, stop_strings=(pair, "<never>"))
    )
    assert answer.sequences[0].tokens.tolist() == tokens[:wanted] and answer.sequences[0].stopped


def test_the_context_bounds_a_sample(base: BaseModel) -> None:
    (answer,) = run(base, SampleJob(prompt_of(CONTEXT - 3), stop_tokens=NO_STOP))
    assert len(answer.sequences[0].tokens) == 4  # the last one is never read
    base.limits.check_sample(SampleJob(prompt_of(CONTEXT), max_tokens=1))
    with pytest.raises(UserError, match="context holds 96"):
        base.limits.check_sample(SampleJob(prompt_of(CONTEXT), max_tokens=2))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_version_is_sampled_from_as_it_was_trained(folders: dict[str, Path], name: str) -> None:
    """In every architecture, with an adapter on every kind of layer, also on an output layer that is tied."""
    base = BaseModel(folders[name], threads=1)
    base.trainer.create("f", LoraSpec(4))
    prompt = prompt_of(12)
    datum = Datum(prompt[:-1], prompt[1:])
    (before,) = run(base, SampleJob(prompt, 1, prompt_logprobs=True))
    embedding = base.sampling.model.get_input_embeddings().weight.clone()
    for _ in range(3):
        base.trainer.run("f", TrainBatch([datum], LossName.CROSS_ENTROPY))
        base.trainer.step("f", AdamStep(0.02))
    trained = base.trainer.run("f", TrainBatch([datum], LossName.CROSS_ENTROPY, backward=False)).logprobs[0]
    weights = base.trainer.weights("f")
    layers = {key[:-2]: (weights[key], weights[f"{key[:-2]}.B"]) for key in weights if key.endswith(".A")}
    adapter = Adapter("a", ALPHA / 4, layers)
    (answer,) = run(base, SampleJob(prompt, 1, prompt_logprobs=True), adapter=adapter)
    assert np.abs(answer.prompt_logprobs[1:] - trained).max() < 1e-3
    assert np.abs(answer.prompt_logprobs[1:] - before.prompt_logprobs[1:]).max() > 0.1
    assert torch.equal(embedding, base.sampling.model.get_input_embeddings().weight)
    few = {key: value for key, value in layers.items() if "0" in key}
    run(base, SampleJob(prompt, 1), adapter=Adapter("b", 1.0, few))
    (after,) = run(base, SampleJob(prompt, 1, prompt_logprobs=True))
    assert np.array_equal(before.prompt_logprobs[1:], after.prompt_logprobs[1:])


def test_outputs_that_are_not_finite_fail_the_request(base: BaseModel) -> None:
    layer = "model.layers.0.mlp.up_proj"
    weight = base.sampling.model.get_submodule(layer).weight
    huge = Adapter(
        "huge", float("nan"), {layer: (torch.ones(1, weight.shape[1]), torch.ones(weight.shape[0], 1))}
    )
    decoder, answers = decoder_of(base, huge), list[Samples | Exception]()
    decoder.add(SampleJob(prompt_of(4), 3), answers.append)
    with pytest.raises(UserError, match="diverged") as raised:
        decoder.work(1)
    decoder.fail(raised.value)
    assert answers == [raised.value] and not decoder.busy


@pytest.mark.parametrize(
    "where",
    ["sampling.SamplingModel.forward", "decoding.score", "cache.RowCache.open", "cache.RowCache.copy"],
)
def test_where_a_prompt_cannot_be_read_all_are_told_and_none_is_left(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fault(*given: Any) -> None:
        raise error

    error = MemoryError("no room")
    job = SampleJob(prompt_of(9), 5, num_samples=3, seed=1, stop_tokens=NO_STOP, prompt_logprobs=True)
    decoder, under_way = decoder_of(base), list[Samples | Exception]()
    decoder.add(SampleJob(prompt_of(4), 30, stop_tokens=NO_STOP), under_way.append)
    decoder.work(0)
    told: list[Samples | Exception] = []
    for _ in range(2):
        decoder.add(job, told.append)
    with monkeypatch.context() as patch, pytest.raises(MemoryError) as raised:
        patch.setattr(f"swegym_tutorial.server.{where}", fault)
        decoder.work(1)
    decoder.fail(raised.value)
    assert under_way == [error] and told == [error, error] and not decoder.busy
    decoder.add(job, told.append)
    while decoder.busy:
        decoder.work(1)
    (alone,), after = run(base, job), told[-1]
    assert isinstance(after, Samples)
    for one, other in zip(after.sequences, alone.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)
    assert np.array_equal(after.prompt_logprobs[1:], alone.prompt_logprobs[1:])


def test_turns_that_go_on_from_earlier_ones_are_answered_as_if_they_were_new(base: BaseModel) -> None:
    """Whatever of a prompt was read before, alone or beside others, with and without a known beginning."""
    decoder = decoder_of(base)
    prompts = [
        prompt_of(9),
        prompt_of(9),
        prompt_of(14, 1),
        np.concatenate([prompt_of(9)[:5], prompt_of(6, 2)]),
    ]
    for turn in range(4):
        jobs = [
            SampleJob(prompt, 4 + n, seed=10 * turn + n, stop_tokens=NO_STOP, num_samples=1 + n % 2)
            for n, prompt in enumerate(prompts)
        ]
        answers: dict[int, Samples | Exception] = {}
        for n, job in enumerate(jobs):
            decoder.add(job, lambda answer, n=n, answers=answers: answers.__setitem__(n, answer))
        while decoder.busy:
            decoder.work(10)
        for n, job in enumerate(jobs):
            (alone,) = run(base, job)  # by a decoder that knows nothing
            got = answers[n]
            assert isinstance(got, Samples)
            for one, other in zip(got.sequences, alone.sequences, strict=True):
                assert np.array_equal(one.tokens, other.tokens)
                assert np.abs(one.logprobs - other.logprobs).max() < 1e-4
            prompts[n] = np.concatenate([job.prompt, got.sequences[-1].tokens, prompt_of(3, turn)]).astype(
                np.int64
            )


def test_another_adapter_under_the_same_name_forgets_what_was_read(base: BaseModel) -> None:
    layer = "model.layers.0.self_attn.k_proj"
    weight = base.sampling.model.get_submodule(layer).weight
    torch.manual_seed(0)
    layers = {layer: (torch.randn(2, weight.shape[1]), torch.randn(weight.shape[0], 2))}
    adapters = [BASE, Adapter("", 0.3, layers)]
    current = [BASE]
    decoder = Decoder(base.sampling, lambda: current[0], base.limits, base.eos, lambda: base.tokenizer)
    for adapter in adapters:
        current[0] = adapter
        answers: list[Samples | Exception] = []
        decoder.add(SampleJob(prompt_of(9), 5, seed=1, stop_tokens=NO_STOP), answers.append)
        while decoder.busy:
            decoder.work(1)
        (alone,) = run(base, SampleJob(prompt_of(9), 5, seed=1, stop_tokens=NO_STOP), adapter=adapter)
        assert isinstance(answers[0], Samples)
        assert np.abs(answers[0].sequences[0].logprobs - alone.sequences[0].logprobs).max() < 1e-4


def test_a_version_that_was_long_in_changing_is_sampled_from_for_longer(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a large model would do little but take on the weights of one version after the other."""
    decoder, answers = decoder_of(base), list[Samples | Exception]()
    clock, step = [0.0], decoder._step

    def takes(seconds: float, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            call(*given)
            clock[0] += seconds

        return timed

    monkeypatch.setattr(decoding, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(decoder, "_step", takes(1.0, step))
    decoder.add(SampleJob(prompt_of(4), 4, stop_tokens=NO_STOP), answers.append)
    decoder.work(0)
    assert not answers and clock == [1.0]  # one step
    monkeypatch.setattr(base.sampling, "activate", takes(1.0, base.sampling.activate))
    decoder.work(0)
    assert len(answers) == 1 and clock == [5.0]


def test_a_change_of_weights_that_failed_midway_leaves_no_mixture(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name, _ in base.sampling.model.named_modules() if name.endswith("q_proj")][:2]
    assert len(names) == 2
    shape = base.sampling.model.get_submodule(names[0]).weight.shape
    layers = {name: (torch.ones(1, shape[1]), torch.ones(shape[0], 1)) for name in names}
    one, two = Adapter("one", 1.0, layers), Adapter("two", 2.0, layers)
    before = run(base, SampleJob(prompt_of(6), 4, temperature=0.0, stop_tokens=NO_STOP), adapter=one)
    real, merged = base.sampling._weight, list[str]()

    def fails_at_the_second(layer: str) -> torch.Tensor:
        merged.append(layer)
        if len(merged) == 2:
            raise MemoryError
        return real(layer)

    with monkeypatch.context() as patch:
        patch.setattr(base.sampling, "_weight", fails_at_the_second)
        with pytest.raises(MemoryError):
            base.sampling.activate(two)
    after = run(base, SampleJob(prompt_of(6), 4, temperature=0.0, stop_tokens=NO_STOP), adapter=one)
    np.testing.assert_array_equal(after[0].sequences[0].logprobs, before[0].sequences[0].logprobs)
