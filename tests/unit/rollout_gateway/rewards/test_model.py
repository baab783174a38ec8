"""A reward model in its process, against transformers over the same tiny checkpoints."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from rule_children import rule_pids
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
from paceline.local.patience import patient
from paceline.services.rollout_gateway.chat.messages import Message
from paceline.services.rollout_gateway.config import ModelRewardConfig, RewardsConfig
from paceline.services.rollout_gateway.environments import Episode, EpisodeTask
from paceline.services.rollout_gateway.rewards import RewardRule
from paceline.services.rollout_gateway.rewards.child_program import Raised
from paceline.services.rollout_gateway.rewards.reward_model import RewardModel
from paceline.services.rollout_gateway.rewards.rules import RewardRules

TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}"
CHARACTERS = "0123456789+-=#<>usa "
TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def write_tokenizer(
    directory: Path, *, pad: bool = True, template: str = "", bert: bool = False
) -> None:
    words = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *CHARACTERS]
    tokenizer = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = Split("", "isolated")
    if bert:
        tokenizer.post_processor = TemplateProcessing(
            "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]" if pad else None
    )
    fast.chat_template = template or None
    fast.save_pretrained(directory)


def write_llama(directory: Path, *, labels: int = 1, positions: int = 64, **tokenizer: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        **TINY, num_labels=labels, max_position_embeddings=positions, pad_token_id=None
    )
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


def scores(directory: Path, *texts: str, max_tokens: int = 2048) -> list[float]:
    """Return the process's answer, without the process."""
    model = RewardModel(str(directory), threads=1, max_tokens=max_tokens)
    return [float(value) for value in answers(model, *map(said, texts))]


def said(text: str, *messages: Message) -> Episode:
    """An episode with an empty prompt."""
    return Episode(EpisodeTask("t", "", "6"), text, "stop", messages)


def answers(model: RewardModel, *episodes: Episode) -> tuple[Any, ...]:
    return model.score_batch(episodes)


TEXTS = ["#6", "#7", "48-18=30#6", "#" * 30, "é", "6 6", "#66", "= #1"]


def test_texts_of_a_batch_get_the_single_logit_of_transformers(tmp_path: Path) -> None:
    values = scores(write_llama(tmp_path), *TEXTS)
    expected = [logits(LlamaForSequenceClassification, tmp_path, ids_of(text))[0] for text in TEXTS]
    assert values == pytest.approx(expected, abs=1e-5)
    assert len(set(values)) == len(TEXTS)


def test_without_a_padding_token_texts_are_scored_one_by_one(tmp_path: Path) -> None:
    values = scores(write_llama(tmp_path, pad=False), *TEXTS)
    expected = [logits(LlamaForSequenceClassification, tmp_path, ids_of(text))[0] for text in TEXTS]
    assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("positions", "max_tokens"), [(64, 12), (12, 2048)])
def test_a_long_text_keeps_its_end(tmp_path: Path, positions: int, max_tokens: int) -> None:
    text = "0123456789" * 3 + "#6"
    values = scores(write_llama(tmp_path, positions=positions), text, max_tokens=max_tokens)
    assert values == pytest.approx(
        logits(LlamaForSequenceClassification, tmp_path, ids_of(text)[-12:]), abs=1e-5
    )


@pytest.mark.parametrize(
    ("labels", "index"),
    [
        ({0: "LABEL_0", 1: "LABEL_1"}, 1),
        ({0: "POSITIVE", 1: "NEGATIVE"}, 0),
        ({0: "negative", 1: "positive"}, 1),
    ],
)
def test_of_two_labels_the_positive_one_is_the_reward_and_special_tokens_stay(
    tmp_path: Path, labels: dict[int, str], index: int
) -> None:
    values = scores(write_bert(tmp_path, labels), "#6", "0123456789#7", max_tokens=10)
    short = logits(BertForSequenceClassification, tmp_path, [2, *ids_of("#6"), 3])
    long = logits(BertForSequenceClassification, tmp_path, [2, *ids_of("456789#7"), 3])
    assert values == pytest.approx([short[index], long[index]], abs=1e-5)


def test_a_conversation_is_read_under_the_chat_template(tmp_path: Path) -> None:
    model = RewardModel(str(write_llama(tmp_path, template=TEMPLATE)), threads=1, max_tokens=64)
    talk = (Message("user", "2+4="), Message("assistant", "#6"))
    values = answers(model, said("2+4=#6", *talk), said("2+4=#6"))
    expected = [
        logits(LlamaForSequenceClassification, tmp_path, ids_of(text))[0]
        for text in ("<u>2+4=<a>#6", "2+4=#6")
    ]
    assert values == pytest.approx(expected, abs=1e-5)


def test_a_text_that_cannot_be_read_leaves_its_neighbours_their_scores(tmp_path: Path) -> None:
    refusing = (
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TEMPLATE
    )
    model = RewardModel(str(write_llama(tmp_path, template=refusing)), threads=1, max_tokens=64)
    first, second, third = answers(model, said("", Message("tool", "x")), said("#6"), said(""))
    assert "no tools" in first.text
    assert second == pytest.approx(
        logits(LlamaForSequenceClassification, tmp_path, ids_of("#6"))[0], abs=1e-5
    )
    assert third == Raised("a text without tokens")


def test_a_checkpoint_without_a_reward_head_is_refused(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match=r"lacks weights: score\.weight"):
        scores(tmp_path)


def test_three_labels_are_no_reward(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several labels"):
        scores(write_llama(tmp_path, labels=3))


def test_a_broken_checkpoint_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        scores(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled weights are not loaded"):
        scores(tmp_path)


@pytest.mark.parametrize("directory", ["", "no/such/directory"])
def test_a_missing_directory_is_a_fault_of_the_settings(directory: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.rewards\.model\.model"):
        RewardModel(directory, threads=1, max_tokens=64)


def episode(text: str, *messages: Message) -> Episode:
    return Episode(EpisodeTask("t", "2+4=", "6"), text, "stop", messages)


def rules_of(directory: Path, **settings: Any) -> RewardRules:
    return RewardRules(RewardsConfig(model=ModelRewardConfig(model=str(directory), **settings)))


@pytest.mark.slow
async def test_the_model_scores_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRewardConfig, "max_batch", 4)
    rules = rules_of(write_llama(tmp_path))
    values = await asyncio.gather(*(rules.rule("model").score(episode(text)) for text in TEXTS))
    assert values == pytest.approx(scores(tmp_path, *("2+4=" + text for text in TEXTS)), abs=1e-5)
    (pid,) = rule_pids()
    await rules.stop()
    assert not psutil.pid_exists(pid)


STAND_IN = """
import os, time
from paceline.services.rollout_gateway.rewards.child_program import Raised

class StandIn:
    def __init__(self, model, threads, max_tokens):
        pass

    def score_batch(self, episodes):
        texts = [episode.text for episode in episodes]
        if "fail" in texts:
            raise RuntimeError("out of memory")
        if "die" in texts:
            os._exit(1)
        if "hang" in texts:
            time.sleep(1000)
        values = [Raised(text) if text == "odd" else float(len(texts)) for text in texts]
        return tuple(value for value, text in zip(values, texts) if text != "skip")
"""


@pytest.fixture
def deadline_s() -> float:
    """Deadline of a batch; a fast score never takes so long."""
    return 60.0


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deadline_s: float) -> RewardRules:
    """Rules over a real process that answers with the batch's size, to avoid the slow start of
    torch.
    """
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr("paceline.services.rollout_gateway.rewards.child.MODEL", "stand_in:StandIn")
    monkeypatch.setattr(ModelRewardConfig, "max_batch", 4)
    return rules_of(tmp_path, deadline_s=deadline_s)


@pytest_asyncio.fixture
async def rule(rules: RewardRules) -> AsyncIterator[RewardRule]:
    yield rules.rule("model")
    await rules.stop()


async def test_episodes_that_wait_share_batches(rule: RewardRule) -> None:
    values = await asyncio.gather(*(rule.score(episode(str(index))) for index in range(10)))
    assert values == [4.0] * 8 + [2.0] * 2


async def test_an_unreadable_text_is_unscored_alone(rule: RewardRule) -> None:
    assert await asyncio.gather(rule.score(episode("odd")), rule.score(episode("#6"))) == [
        None,
        2.0,
    ]


async def test_a_model_killed_while_idle_is_replaced(rule: RewardRule) -> None:
    assert await rule.score(episode("#6")) == 1.0
    (pid,) = rule_pids()
    os.kill(pid, signal.SIGKILL)
    assert await rule.score(episode("#6")) == 1.0
    assert pid not in rule_pids()


@pytest.mark.parametrize(
    ("text", "why", "deadline_s"),
    [("die", "lost", 60.0), ("hang", "too long", 5.0), ("fail", "out of memory", 60.0)],
)
async def test_a_model_that_fails_is_no_zero_and_the_next_text_is_scored(
    rule: RewardRule, text: str, why: str
) -> None:
    with pytest.raises(Unavailable, match=why):
        await rule.score(episode(text))
    assert await rule.score(episode("#6")) == 1.0


async def test_an_answer_without_a_score_for_each_text_leaves_its_batch_unscored(
    rule: RewardRule,
) -> None:
    async with asyncio.timeout(patient(60)):
        values = await asyncio.gather(*(rule.score(episode(text)) for text in ("skip", "#6")))
    assert values == [None, None]
    assert await rule.score(episode("#6")) == 1.0


async def test_who_waits_at_the_end_is_told(rule: RewardRule, rules: RewardRules) -> None:
    await rules.check("model")
    asked = [asyncio.ensure_future(rule.score(episode("hang"))) for _ in range(6)]
    await asyncio.sleep(0)
    await rules.stop()
    for failed in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(failed, Unavailable)
    with pytest.raises(Unavailable, match="stopped"):
        await rule.score(episode("#6"))


async def test_a_caller_that_goes_away_is_left_out(rule: RewardRule) -> None:
    asked = [asyncio.ensure_future(rule.score(episode(str(index)))) for index in range(3)]
    await asyncio.sleep(0)
    asked[1].cancel()
    assert await asyncio.gather(*asked[::2]) == [2.0, 2.0]
