"""Tiny random models with a tokenizer of their own, and one server that many tests talk to through the real SDK."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import (
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from swegym_tutorial.server.models import BaseModel
from swegym_tutorial.server.process import LocalServer

EOS = 1
CONTEXT = 96
VOCAB = ["<pad>", "<eos>", *string.ascii_lowercase, *string.digits]
_SIZES = {"vocab_size": len(VOCAB), "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": 0}
_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(
        **_SIZES,
        **_SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
    ),
    "llama": LlamaConfig(
        **_SIZES, **_SHAPE, num_key_value_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=False
    ),
    "gpt_neox": GPTNeoXConfig(**_SIZES, **_SHAPE, max_position_embeddings=CONTEXT),
    "gpt2": GPT2Config(**_SIZES, n_embd=32, n_layer=2, n_head=4, n_positions=CONTEXT, n_inner=48),
}


def make_model(folder: Path, name: str) -> Path:
    """Write a random model of an architecture, with weights large enough that it prefers some tokens to others."""
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({word: n for n, word in enumerate(VOCAB)}, unk_token="<pad>"))
    words.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        folder
    )
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), name) for name in CONFIGS}


@pytest.fixture
def base(folders: dict[str, Path]) -> BaseModel:
    """A fresh Qwen3 without adapters."""
    return BaseModel(folders["qwen3"], threads=1)


@pytest.fixture(scope="session")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    models = {"tiny": folders["qwen3"], "tiny/alias": folders["qwen3"], "other": folders["gpt_neox"]}
    with LocalServer(models, tmp_path_factory.mktemp("state"), threads=1) as started:
        yield started


@pytest.fixture(scope="session")
def service(server: LocalServer) -> Iterator[tinker.ServiceClient]:
    client = tinker.ServiceClient(base_url=server.url, api_key=server.key)
    yield client
    client.holder.close()
