"""The settings: presets, refusals, and `--set`."""

import json
from dataclasses import replace

import pytest

from swegym_tutorial import TrainingConfig


def test_the_presets_are_the_published_numbers():
    full = TrainingConfig.spindle()
    published = {
        "context_tokens": 131_072,
        "turn_tokens": 8192,
        "max_turns": 20,
        "group_size": 8,
        "groups_per_batch": 32,
        "minibatch_groups": 8,
        "temperature": 1.0,
        "kl_coef": 1e-4,
        "seed": 4242,
        "rollout_workers": 64,
        "inflight_groups": 32,
        "grading_workers": 64,
        "grading_queue_size": 64,
        "completed_group_buffer": 8,
        "clients": 8,
        "steps": 100,
        "lora_rank": 32,
        "learning_rate": 1e-6,
        "clip_low": 0.8,
        "clip_high": 1.28,
        "base_model": "qwen35-9b-lora-128k",
    }
    assert {name: getattr(full, name) for name in published} == published
    assert full.max_groups_per_batch is None and full.train_unembed is False


def test_the_learning_rate_rises_stays_and_falls():
    config = TrainingConfig.laptop(steps=8, learning_rate=1.0, warmup_steps=2, cooldown_share=0.5)
    assert [config.learning_rate_at(step) for step in range(8)] == [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert {
        replace(config, warmup_steps=0, cooldown_share=0.0).learning_rate_at(step) for step in range(8)
    } == {1.0}
    assert replace(config, cooldown_share=1.0, warmup_steps=0).learning_rate_at(2) == 0.75
    assert config.learning_rate_at(8) == config.learning_rate_at(1000) == 0.25
    assert TrainingConfig.spindle().learning_rate_at(99) == 1e-6


def test_settings_survive_json():
    config = TrainingConfig.laptop(steps=3)
    assert TrainingConfig(**json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"clients": -1},
        {"kl_coef": -0.1},
        {"min_group_size": 1},
        {"min_group_size": 9},
        {"clip_low": 1.1},
        {"max_groups_per_batch": 4},
        {"hours": 0.0},
        {"hours": float("nan")},
        {"learning_rate": float("inf")},
        {"seed": -1},
        {"adam_beta1": 1.0},
        {"cooldown_share": 1.5},
        {"cooldown_share": -0.1},
        {"preset": "spindel"},
    ],
)
def test_what_makes_no_sense_is_refused_by_name(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainingConfig.laptop(**change)


def test_any_field_can_be_set_from_text():
    config = TrainingConfig.laptop().with_settings(
        [
            "kl_coef=0.01",
            "max_groups_per_batch=none",
            "train_unembed=true",
            "hours=2",
            "system_prompt=Be kind = good.",
        ]
    )
    assert (config.kl_coef, config.max_groups_per_batch, config.train_unembed) == (0.01, None, True)
    assert config.hours == 2.0 and isinstance(config.hours, float)
    assert config.system_prompt == "Be kind = good."


@pytest.mark.parametrize(
    "setting", ["kl_coeff=1", "steps", "steps=many", "steps=1.5", "train_unembed=3", "steps=true"]
)
def test_a_wrong_setting_names_itself(setting):
    with pytest.raises(ValueError, match=setting.partition("=")[0]):
        TrainingConfig.laptop().with_settings([setting])
