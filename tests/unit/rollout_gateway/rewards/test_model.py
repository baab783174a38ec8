"""A reward model in its process, against transformers over the same tiny checkpoints."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from paceline.errors import ConfigError, Unavailable
from rollout_gateway.chat.messages import Message
from rollout_gateway.config import ModelRewardConfig, RewardsConfig
from rollout_gateway.environments.base import Episode, EpisodeTask
from rollout_gateway.rewards import RewardRules

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
CHARACTERS = "0123456789+-=#<>usa "
TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_tokenizer(directory: Path, *, pad: bool = True, template: str = "", bert: bool = False) -> None:
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *CHARACTERS]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    if bert:
        tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]" if pad else None)
    fast.chat_template = template or None
    fast.save_pretrained(directory)


def write_llama(directory: Path, *, labels: int = 1, positions: int = 64, **tokenizer: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(**TINY, num_labels=labels, max_position_embeddings=positions, pad_token_id=None)
    model = LlamaForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(directory)
    write_tokenizer(directory, **tokenizer)
    return directory


def write_bert(directory: Path, labels: dict[int, str]) -> Path:
    torch.manual_seed(1)
    model = BertForSequenceClassification(
        BertConfig(**TINY, max_position_embeddings=64, id2label=labels, pad_token_id=1)
    )
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(directory)
    write_tokenizer(directory, bert=True)
    return directory


def ids_of(text: str) -> list[int]:
    return [4 + CHARACTERS.index(character) if character in CHARACTERS else 0 for character in text]


@torch.no_grad()
def logits(kind: type[Any], directory: Path, ids: list[int]) -> list[float]:
    """Transformers' logits of one text alone."""
    model = kind.from_pretrained(directory, dtype=torch.float32).eval()
    return [float(logit) for logit in model(torch.tensor([ids])).logits[0]]


def episode(text: str, *messages: Message) -> Episode:
    return Episode(EpisodeTask("t", "2+4=", "6"), text, "stop", messages)


Start = Callable[..., RewardRules]


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Start]:
    made: list[RewardRules] = []

    def make(directory: Path, **settings: Any) -> RewardRules:
        made.append(RewardRules(RewardsConfig(model=ModelRewardConfig(model=str(directory), **settings))))
        return made[-1]

    yield make
    for rules in made:
        await rules.stop()


async def test_texts_of_any_batch_get_the_single_logit_of_transformers(tmp_path: Path, start: Start) -> None:
    rules = start(write_llama(tmp_path), max_batch=4)
    texts = ["#6", "#7", "48-18=30#6", "#" * 30, "é", "6 6", "", "#66", "#1"]
    rule = rules.rule("model")
    values = await asyncio.gather(*(rule.score(episode(text)) for text in texts))
    expected = [logits(LlamaForSequenceClassification, tmp_path, ids_of("2+4=" + text))[0] for text in texts]
    assert values == pytest.approx(expected, abs=1e-5)
    assert len(set(values)) == len(texts)


async def test_without_a_padding_token_texts_are_scored_one_by_one(tmp_path: Path, start: Start) -> None:
    rule = start(write_llama(tmp_path, pad=False)).rule("model")
    values = await asyncio.gather(*(rule.score(episode(text)) for text in ("#6", "#", "= #1")))
    expected = [
        logits(LlamaForSequenceClassification, tmp_path, ids_of("2+4=" + text))[0] for text in ("#6", "#", "= #1")
    ]
    assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("positions", "max_tokens"), [(64, 12), (12, 2048)])
async def test_a_long_text_keeps_its_end(tmp_path: Path, start: Start, positions: int, max_tokens: int) -> None:
    rule = start(write_llama(tmp_path, positions=positions), max_tokens=max_tokens).rule("model")
    text = "0123456789" * 3 + "#6"
    expected = logits(LlamaForSequenceClassification, tmp_path, ids_of(text)[-12:])[0]
    assert await rule.score(episode(text)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "index"),
    [({0: "LABEL_0", 1: "LABEL_1"}, 1), ({0: "POSITIVE", 1: "NEGATIVE"}, 0), ({0: "negative", 1: "positive"}, 1)],
)
async def test_of_two_labels_the_positive_one_is_the_reward_and_special_tokens_stay(
    tmp_path: Path, start: Start, labels: dict[int, str], index: int
) -> None:
    rule = start(write_bert(tmp_path, labels), max_tokens=10).rule("model")
    values = await asyncio.gather(rule.score(episode("#6")), rule.score(episode("0123456789#7")))
    short = logits(BertForSequenceClassification, tmp_path, [2, *ids_of("2+4=#6"), 3])
    long = logits(BertForSequenceClassification, tmp_path, [2, *ids_of("456789#7"), 3])
    assert values == pytest.approx([short[index], long[index]], abs=1e-5)


async def test_a_conversation_is_read_under_the_chat_template(tmp_path: Path, start: Start) -> None:
    rule = start(write_llama(tmp_path, template=TEMPLATE)).rule("model")
    said = episode("#6", Message("user", "2+4="), Message("assistant", "#6"))
    expected = [
        logits(LlamaForSequenceClassification, tmp_path, ids_of(text))[0] for text in ("<u>2+4=<a>#6", "2+4=#6")
    ]
    assert [await rule.score(said), await rule.score(episode("#6"))] == pytest.approx(expected, abs=1e-5)


async def test_a_text_that_cannot_be_read_is_unscored_and_its_neighbours_are_not(tmp_path: Path, start: Start) -> None:
    refusing = "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    rule = start(write_llama(tmp_path, template=refusing)).rule("model")
    values = await asyncio.gather(rule.score(episode("", Message("tool", "x"))), rule.score(episode("#6")))
    assert values[0] is None
    assert values[1] is not None


async def test_a_model_that_is_killed_is_replaced(tmp_path: Path, start: Start) -> None:
    rules = start(write_llama(tmp_path))
    first = await rules.rule("model").score(episode("#6"))
    (pid,) = rules.pids
    os.kill(pid, signal.SIGKILL)
    assert await rules.rule("model").score(episode("#6")) == first
    assert rules.pids != [pid]


async def test_a_model_that_takes_too_long_is_ended_and_that_is_no_zero(tmp_path: Path, start: Start) -> None:
    rules = start(write_llama(tmp_path), deadline_s=0.3)
    await rules.check("model")
    (pid,) = rules.pids
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Unavailable, match="took too long"):
        await rules.rule("model").score(episode("#6"))
    assert rules.pids == []


async def test_who_waits_at_the_end_is_told(tmp_path: Path, start: Start) -> None:
    rules = start(write_llama(tmp_path), max_batch=1)
    await rules.check("model")
    os.kill(rules.pids[0], signal.SIGSTOP)
    asked = [asyncio.ensure_future(rules.rule("model").score(episode("#6"))) for _ in range(3)]
    await asyncio.sleep(0)
    await rules.stop()
    for failed in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(failed, Unavailable)
    with pytest.raises(Unavailable, match="stopped"):
        await rules.rule("model").score(episode("#6"))


async def test_pickled_weights_are_refused(tmp_path: Path, start: Start) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pickled weights are not loaded.*pytorch_model\.bin"):
        await start(tmp_path).check("model")


@pytest.mark.parametrize("directory", ["", "no/such/directory"])
async def test_a_missing_directory_is_a_fault_of_the_settings(start: Start, directory: str) -> None:
    rules = RewardRules(RewardsConfig(model=ModelRewardConfig(model=directory)))
    with pytest.raises(ConfigError, match=r"gateway\.rewards\.model\.model"):
        await rules.check("model")


async def test_a_checkpoint_without_a_reward_head_is_refused(tmp_path: Path, start: Start) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks weights: score\.weight"):
        await start(tmp_path).check("model")


async def test_three_labels_are_no_reward(tmp_path: Path, start: Start) -> None:
    with pytest.raises(ConfigError, match="several labels"):
        await start(write_llama(tmp_path, labels=3)).check("model")


async def test_a_broken_checkpoint_is_refused(tmp_path: Path, start: Start) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        await start(tmp_path).check("model")
