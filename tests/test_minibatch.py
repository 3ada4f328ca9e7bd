"""Groups, advantages and the Datum, against numbers worked out by hand."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from swegym_tutorial.grading import Episode, Outcome, Verdict
from swegym_tutorial.minibatch import (
    Fate,
    Group,
    advantages,
    fate_of,
    prepare_minibatch,
    split_evenly,
    token_advantages,
)
from swegym_tutorial.rollout import Ending, RecordingLost, Rollout


def episode(
    reward: float, tokens=(5, 6, 7, 8), mask=(0, 0, 1, 1), logprobs=(0.0, 0.0, -1.0, -2.0)
) -> Episode:
    arrays = np.array(tokens, np.int32), np.array(mask, bool), np.array(logprobs, np.float32)
    rollout = Rollout("task", *arrays, (), Ending.FINAL, b"", 1.0)
    return Episode(rollout, Verdict(Outcome.RESOLVED if reward else Outcome.UNRESOLVED))


def group(*rewards: float, version: int = 0, number: int = 0) -> Group:
    return Group(number, "task", version, tuple(map(episode, rewards)))


def test_advantages_by_hand():
    # One of four solved: mean 0.25, standard deviation with n - 1 is 0.5.
    np.testing.assert_allclose(advantages(np.array([1, 0, 0, 0])), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)
    # Two of two: mean 0.5, standard deviation sqrt(0.5).
    np.testing.assert_allclose(advantages(np.array([1, 0])), [0.70710678, -0.70710678], rtol=1e-5)


# Case 35 (AReaL#1419): partial groups.
@pytest.mark.parametrize("size", [8, 7, 2])
def test_case_35_advantages_are_the_groups_own_whatever_its_size(size):
    rewards = np.array([1.0] + [0.0] * (size - 1))
    values = advantages(rewards)
    assert abs(values.sum()) < 1e-9 and values[0] > 0 > values[1]
    np.testing.assert_allclose(values.std(ddof=1), 1.0, rtol=1e-4)


def test_case_35_a_singleton_gives_zero_and_a_small_group_is_dropped():
    assert advantages(np.array([1.0])).tolist() == [0.0]
    assert fate_of(group(1.0), 0, min_group_size=2) is Fate.FAILED
    assert fate_of(Group(0, "task", 0, ()), 0, min_group_size=2) is Fate.FAILED
    assert fate_of(group(1.0, 0.0), 0, min_group_size=2) is Fate.KEPT


def test_fates():
    assert fate_of(group(1, 1, 1), 0, 2) is Fate.UNIFORM
    assert fate_of(group(0, 0), 5, 2) is Fate.UNIFORM
    assert fate_of(group(0, 1, version=3), 4, 2) is Fate.KEPT
    assert fate_of(group(0, 1, version=3), 5, 2) is Fate.STALE


def test_token_advantages_by_hand():
    mask = np.array([False, True, True])
    logprobs = np.array([0.0, -1.0, -2.0], np.float32)
    reference = np.array([-9.0, -1.5, -1.0])
    # advantage 2, kl_coef 0.1, 4 generated tokens: (2 - 0.1 * (-1 + 1.5)) / 4 and (2 - 0.1 * (-2 + 1)) / 4.
    values = token_advantages(mask, logprobs, 2.0, 4, reference, 0.1)
    np.testing.assert_allclose(values, [0.0, 0.4875, 0.525], rtol=1e-6)
    assert values.dtype == np.float32


def test_a_datum_shifts_everything_by_one():
    data = prepare_minibatch([group(1, 0)])
    assert len(data) == 2
    first = data[0]
    assert first.model_input.to_ints() == [5, 6, 7]
    inputs = first.loss_fn_inputs
    assert inputs["target_tokens"].to_numpy().tolist() == [6, 7, 8]
    assert inputs["logprobs"].to_numpy().tolist() == [0.0, -1.0, -2.0]
    # Advantage 0.7071 over the minibatch's four generated tokens; the first target belongs to the prompt.
    np.testing.assert_allclose(inputs["advantages"].to_numpy(), [0.0, 0.1767767, 0.1767767], rtol=1e-5)


def test_the_kl_term_pulls_towards_the_reference():
    reference = [[np.array([0.0, 0.0, -2.0, -2.0])] * 2]
    with_kl = (
        prepare_minibatch([group(1, 0)], reference, kl_coef=0.5)[0].loss_fn_inputs["advantages"].to_numpy()
    )
    # (0.70710 - 0.5 * (-1 + 2)) / 4 for the first sampled token, no change where both agree.
    np.testing.assert_allclose(with_kl, [0.0, 0.0517767, 0.1767767], rtol=1e-4)


def test_a_missing_or_misshapen_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        prepare_minibatch([group(1, 0)], None, kl_coef=0.1)
    with pytest.raises(ValueError, match="2 reference log-probabilities for 4 tokens"):
        prepare_minibatch([group(1, 0)], [[np.zeros(2)] * 2], kl_coef=0.1)


def test_an_attempt_on_disk_is_read_back_or_refused():
    def gone():
        raise RecordingLost("a disk fault", {})

    whole = group(1, 0)
    first, second = whole.episodes
    for read, how in (
        (lambda: second.rollout, contextlib.nullcontext()),
        (gone, pytest.raises(RecordingLost)),
    ):
        kept = replace(second, rollout=replace(second.rollout.bare(), read=read))
        with how:
            assert prepare_minibatch([replace(whole, episodes=(first, kept))])[1].model_input.to_ints() == [
                5,
                6,
                7,
            ]


@pytest.mark.parametrize(
    "count, sizes", [(8, [4, 4]), (5, [2, 3]), (3, [3]), (1, [1]), (9, [3, 3, 3]), (0, [])]
)
def test_a_batch_is_split_evenly(count, sizes):
    groups = [group(0, 1, number=n) for n in range(count)]
    parts = split_evenly(groups, 4)
    assert sorted(map(len, parts)) == sizes
    assert [g for part in parts for g in part] == groups


def test_attempts_without_a_sampled_token_weigh_nothing():
    nothing = np.zeros(3, bool), np.zeros(3, np.float32)
    for reference in (None, np.zeros(3)):
        weights = token_advantages(*nothing, 1.0, 0, reference, 0.1)
        assert weights.dtype == np.float32 and not weights.any()
